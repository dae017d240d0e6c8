"""A process that trains on several data sets in one batch; see tests/data/test_combined.py.

python combined_run.py FOLDER [elastic] [lose]

In an elastic run there are arrays alone. Otherwise there is also a loader, of which each process has its own share.
With `lose` the last process kills itself once, in the second epoch, when checkpoints were saved. Then another one takes
its place: in an elastic run it joins the others, and otherwise the launcher begins all of them again.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import data, distributed, train

folder, *options = sys.argv[1:]
is_elastic, loses = "elastic" in options, "lose" in options
distributed.initialize(elastic=is_elastic and loses)
rank, count = jax.process_index(), jax.process_count()
draw = np.random.default_rng(0).normal

lost = Path(folder, "lost")


class Losing(data.ArraySource):
    """Arrays, of which the last process reads the twelfth batch only once it was killed."""

    def batches(self, batch_size, *, start=0, **options):
        for number, batch in enumerate(super().batches(batch_size, start=start, **options), start):
            if loses and number == 12 and rank == count - 1 and not lost.exists():
                lost.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


# Of different lengths: 3 batches of the first in a pass, 5 of the second, and 2 of the loader.
sets = {"a": {"x": draw(size=(96, 4))}, "b": Losing({"x": draw(size=(80, 4)), "y": draw(size=80)}, None)}
batch_sizes = {"a": 32, "b": 16}
if not is_elastic:

    def loader(epoch):
        rows = np.random.default_rng(epoch).normal(size=(2, 16, 4))
        return ({"x": np.split(batch, count)[rank]} for batch in rows)

    sets["c"], batch_sizes["c"] = data.from_iterable(loader, steps_per_epoch=2), 16


def loss_fn(params, batch):
    error = batch["b"]["x"] @ params["v"] - batch["b"]["y"]
    parts = {name: (jnp.tanh(batch[name]["x"] @ params["w"]) ** 2).mean() for name in batch if name != "b"}
    return (error**2).mean() + sum(parts.values()), parts


def is_ready():
    """The start of each process that has last said that it is ready."""
    return distributed._Board().entries("ready")


first = {}


def on_step(number, metrics):
    """In an elastic run process 0 waits, so that the steps after this one have the process that came back."""
    if loses and is_elastic and number == 1:
        first.update(is_ready())
    if loses and is_elastic and number == 16:
        while is_ready()[str(count - 1)] == first[str(count - 1)]:
            time.sleep(0.05)


params = {"w": jnp.asarray(draw(size=(4, 3)), "float32"), "v": jnp.asarray(draw(size=4), "float32")}
state, step = train.start(params, optax.adam(0.01), loss_fn, virtual_shards=8 if is_elastic else None)
state, history = train.fit(
    state,
    step,
    data.combine(sets, batch_sizes=batch_sizes),
    epochs=6,
    progress=False,
    on_step=on_step,
    checkpoint_dir=Path(folder, "run"),
    checkpoint_every=2,
)
leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))]
bits = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()[:16]
values = [float(np.linalg.norm(np.float64(leaf))) for leaf in leaves]
losses = [record[name] for record in history for name in ("loss", "a")]
print("END", int(state.step), bits, *values, *losses, flush=True)
