"""A program that trains slowly and says at which step it is; test_interrupt.py sends it signals.

python interrupted_run.py CHECKPOINTS|- EPOCHS PLAIN|CATCH [SECONDS_A_STEP]
"""

import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import data, distributed, kv, train

TX = optax.sgd(0.1, momentum=0.9)


def apply(params, images):
    return images @ params["w"]


STEP = train.make_train_step(train.classification_loss(apply))


def examples():  # 20 steps of 8
    images = np.random.default_rng(0).random((160, 4), np.float32)
    return data.Dataset(images, images[:, :3].argmax(1))


def start():
    store = kv.from_params({"w": jnp.zeros((4, 3))}, optimizer=TX)
    return train.create_state(store, 3, devices=jax.devices()[:2])


def run(state, **options):
    return train.fit(state, STEP, examples(), batch_size=8, progress=False, **options)


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
