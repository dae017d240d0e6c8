"""Run a script of examples/ and print its last `state`, or `store`, for tests/house/test_examples.py.

It prints a digest and a few numbers.

python example_run.py SCRIPT [EPOCHS [KILL_AFTER]]

With EPOCHS a call of `fit` has so many epochs at most. With KILL_AFTER the process kills itself after so many records
of `fit`, or checkpoints of a loop of its own, as soon as a checkpoint is complete.
"""

import functools
import hashlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

import jaxpar as jp


def at_most(epochs):
    """Epochs of each later call of `fit`."""
    fit = jp.train.fit

    @functools.wraps(fit)
    def shorter(*args, **options):
        return fit(*args, **{**options, "epochs": min(epochs, options["epochs"])})

    jp.train.fit = shorter


def kill_after(number):
    """Kill this process after so many records or saves."""
    made = 0

    def count():
        nonlocal made
        made += 1
        if made < number:
            return
        while not any(jp.checkpoint.latest(folder) for folder in Path("runs").rglob("*/") if folder.is_dir()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    fit = jp.train.fit

    @functools.wraps(fit)
    def fit_and_count(*args, callbacks=(), **options):
        given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        return fit(*args, callbacks=[*given, lambda state, record: count()], **options)

    class Manager(jp.checkpoint.Manager):
        def save(self, *args, **options):
            super().save(*args, **options)
            count()

    jp.train.fit, jp.checkpoint.Manager = fit_and_count, Manager


def numbers(params):
    """A norm of each floating leaf."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]
    return [float(np.linalg.norm(leaf)) for leaf in leaves]


def digest(params):
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(params)):
        hashed.update(np.asarray(leaf).tobytes())
    return hashed.hexdigest()


def main(script, epochs=None, number=None):
    if epochs is not None:
        at_most(int(epochs))
    if number is not None:
        kill_after(int(number))
    found = runpy.run_path(script)
    if "store" in found:
        params = jp.kv.to_params(found["store"])
    else:
        params = {k: s.params for k, s in found["states"].items()} if "states" in found else found["state"].params
    print(json.dumps({"devices": len(jax.devices()), "digest": digest(params), "numbers": numbers(params)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
