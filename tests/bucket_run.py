"""What each of several processes runs for tests/checkpoint/test_cloud_paths.py, with checkpoints in $BUCKET.

python bucket_run.py HOST:PORT PROCESSES PROCESS FOLDER PHASE...
"""

import os

import jax
import numpy as np
from process_run import attach, keep, new_state, raises, small_run
from several_processes import run_phases, stays_after

from jaxpar import checkpoint

BUCKET = os.environ["BUCKET"]


def undisturbed(folder):
    keep(folder / "undisturbed.npz", *small_run(f"{BUCKET}/undisturbed", progress=False))


def killed(folder):
    """Saves after step 2, and never gets further than step 3."""
    small_run(f"{BUCKET}/run", checkpoint_every=2, progress=False, on_step=stays_after(2))


def resumed(folder):
    keep(folder / "resumed.npz", *small_run(f"{BUCKET}/run", checkpoint_every=2, progress=False, resume=True))


def by_hand(folder):
    """A state that is split over processes, and one of which each process has all."""
    like = {"all": np.zeros(3), "own": jax.numpy.zeros(2)}
    for name, state, zeros in (
        ("split", new_state("sharded"), new_state("sharded")),
        ("whole", {"all": np.arange(3.0), "own": jax.numpy.ones(2)}, like),
    ):
        checkpoint.save(f"{BUCKET}/{name}", state)
        restored = checkpoint.restore(f"{BUCKET}/{name}", zeros)
        hashes = [str(checkpoint._StateHash(x)) for x in (restored, state)]
        assert hashes[0] == hashes[1], name
        path = f"{BUCKET}/{name}"
        raises(FileExistsError, "exists already", lambda path=path, state=state: checkpoint.save(path, state))
    # The bucket refuses what process 1 sends to this path: an error in both, and no checkpoint.
    raises(OSError, "could not ", lambda: checkpoint.save(f"{BUCKET}/refused", new_state("sharded")))
    raises(checkpoint.CheckpointError, "is not complete", lambda: checkpoint.restore(f"{BUCKET}/refused", like))
    assert checkpoint.latest(BUCKET).name == "whole"


if __name__ == "__main__":
    run_phases(globals(), attach)
