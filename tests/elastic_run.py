"""A process of an elastic run that fails as it is asked to, once for each failure; see tests/train/test_elastic.py.

Arguments: a folder for marks, then `failure:process:step` each, where failure is kill, stop, loop or one of `EDITS`,
after which the process that comes back finds an edited script. With `late` a
process that comes back calls `fit` only after that step. With `slow:S:E` process 0 waits S seconds after each step, and
there are E epochs of six steps, or as many as pass until there is a file `over`. With `rigid` the run is not elastic.
After `unseen:P:S` or `silent:P:S` process P is killed at that step, and again when it comes back and connects: before
the others know its address, or once they wait for it.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

from jaxpar import data, distributed, kv, train
from jaxpar._devices import processes

folder, *failures = sys.argv[1:]
late = [failure.split(":")[1:] for failure in failures if failure.startswith("late")]
(*_, pause, epochs) = next((failure for failure in failures if failure.startswith("slow")), "slow:0:6").split(":")
is_elastic = "rigid" not in failures
failures = [failure for failure in failures if not failure.startswith(("late", "slow", "rigid"))]
distributed.initialize(elastic=is_elastic)
rank = jax.process_index()
print("PID", rank, os.getpid(), flush=True)


EDITS = {"rate": 0, "loss": 0, "data": 0}
EDITS |= {name: 1 for name in EDITS if rank and Path(folder, f"edit-{name}-{rank}").exists()}


class Failing(data.ArraySource):
    """The batches of arrays. This process fails before it gives some of them."""

    def batches(self, batch_size, *, start=0, **options):
        for number, batch in enumerate(super().batches(batch_size, start=start, **options), start):
            for failure in failures:
                kind, process, step = failure.split(":")
                mark = Path(folder, failure)
                if (int(process), int(step)) == (rank, number) and not mark.exists():
                    mark.touch()
                    fail(kind)
            yield batch


def die_while_connecting(kind):
    """In place of `processes.plan_send`. What it returns ends this process while the others connect to it by Gloo."""
    plan, client = processes.plan_send, distributed._Board().client

    def plan_send(tree, devices):
        plan(tree, devices)
        folder = "cpu:gloo/" + ",".join(str(d.id) for d in devices)
        first = next(i for i, d in enumerate(devices) if d.process_index == 0)

        def send():
            if kind == "silent":
                # The address of process 0 with the highest port: the one with the lower address waits for the other.
                text = client.blocking_key_value_get_bytes(f"{folder}/{first}", 60000)
                port = 8 + int.from_bytes(text[:8], sys.byteorder) + 8 + 2
                for i, d in enumerate(devices):
                    if d.process_index == rank:
                        client.key_value_set_bytes(f"{folder}/{i}", text[:port] + b"\xff\xff" + text[port + 2 :])
                time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

        return send

    processes.plan_send = plan_send


for failure in failures:
    kind, process, _ = failure.split(":")
    mark = Path(folder, f"{failure}-again")
    if kind in ("unseen", "silent") and int(process) == rank and Path(folder, failure).exists() and not mark.exists():
        mark.touch()
        die_while_connecting(kind)


def fail(kind):
    if kind in EDITS:
        Path(folder, f"edit-{kind}-{rank}").touch()
    if kind == "loop":
        while True:
            time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def loss_fn(params, batch, rng):
    hidden = jax.numpy.tanh(batch["x"] @ params["w"])
    noise = jax.random.normal(rng, ()) * 0.01
    loss = ((hidden @ params["v"] - batch["y"]) ** 2).mean() * (1 + EDITS["loss"])
    return loss + noise * params["v"].sum(), {"hidden": hidden.mean()}


draw = np.random.default_rng(0).normal
arrays = {"x": draw(size=(96, 16)).astype(np.float32), "y": draw(size=96).astype(np.float32)}
arrays["y"][50:] += EDITS["data"]
params = {"w": jax.numpy.asarray(draw(size=(16, 16)), "float32"), "v": jax.numpy.asarray(draw(size=16), "float32")}
state = train.create_state(kv.from_params(params, optimizer=optax.adam(0.01 + EDITS["rate"])), 0)
step = train.make_train_step(loss_fn, virtual_shards=8)
seen = []
Path(folder, f"start-{rank}-{os.getpid()}").touch()
for process, step_number in late:
    while int(process) == rank and len(list(Path(folder).glob(f"start-{rank}-*"))) > 1:
        if Path(folder, f"step-{step_number}").exists():
            break
        time.sleep(0.05)


def ready():
    """The start of each process that has last said that it is ready."""
    return distributed._Board().entries("ready")


first, waited = {}, set()


def on_step(number, metrics):
    """Process 0 waits before the next failure until the processes that failed have come back."""
    print("STEP", number, flush=True)
    time.sleep(float(pause))
    if number == 1 and failures:
        first.update(ready())
    for process, step_number in late:
        if int(step_number) == number:
            Path(folder, f"step-{number}").touch()
        if number == 13:
            wait_for(lambda process=process: len(list(Path(folder).glob(f"start-{process}-*"))) > 1)
    here = [process for process, step_number in late if int(step_number) > number]
    if number in (13, 21, 30):
        for failure in [failure for failure in failures if int(failure.split(":")[2]) < number]:
            process = failure.split(":")[1]
            if failure not in waited and process not in ("0", *here) and failure.split(":")[0] not in EDITS:
                wait_for(lambda process=process: ready()[process] != first[process])
                first[process] = ready()[process]
                waited.add(failure)


def is_over(state, record):
    seen.append(record["step"])
    return record["step"] % 6 == 0 and Path(folder, "over").exists()


def wait_for(condition):
    while not condition():
        time.sleep(0.05)


state, history = train.fit(
    state,
    step,
    Failing(arrays, None),
    epochs=int(epochs),
    batch_size=16,
    progress=False,
    callbacks=is_over,
    on_step=on_step,
    eval_data=arrays,
    eval_fn=lambda params, batch: {"loss": (batch["x"] @ params["w"]).mean(-1)},
    eval_every=4,
    checkpoint_dir=Path(folder, "run"),
    checkpoint_every=2,
    certificate=Path(folder, "run.jsonl"),
    certificate_every=1,
)
leaves = jax.tree.leaves((kv.to_params(state.store), state.store.optimizer_state, state.store.updater_state))
bits = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()[:16]
metrics = [{name: record.get(name) for name in ("epoch", "step", "loss", "hidden", "eval_loss")} for record in history]
print("BITS", int(state.step), bits, hashlib.sha256(repr(metrics).encode()).hexdigest()[:16], flush=True)
print("SEEN", rank, len(seen), flush=True)
