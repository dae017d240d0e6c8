"""A program that trains slowly and says at which step it is; test_interrupt.py sends it signals.

python interrupted_run.py CHECKPOINTS|- EPOCHS PLAIN|CATCH [SECONDS_A_STEP]
"""

import functools
import signal
import sys
import time

import optax
import world

from jaxpar import distributed

TX = optax.sgd(0.1, momentum=0.9)
start = functools.partial(world.start_classifier, TX)


def run(state, **options):  # 20 steps of 8
    return world.run_on(world.points(160), state, batch_size=8, **options)


def main(directory, epochs, mode, seconds="0.01"):
    distributed.initialize()

    def on_step(step, metrics):
        print("step", step, flush=True)
        time.sleep(float(seconds))

    try:
        run(start(), epochs=int(epochs), checkpoint_dir=None if directory == "-" else directory, on_step=on_step)
    except KeyboardInterrupt as interrupt:
        if mode == "PLAIN":
            raise
        last = interrupt.history[-1]
        print("caught", int(interrupt.state.step), last["epoch"], last["step"], last.get("interrupted"), flush=True)
        sys.exit(7)
    print("ended", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background of a shell
    main(*sys.argv[1:])
