"""What `checkpoint` refuses: the error, the call, and the names and values that its message must have, in this order.

Damaged and forged files, disks that fail, other processes that write and files of safetensors are in the other files
of this folder.
"""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from world import adam

from jaxpar import checkpoint, kv

TREE = {"w": jnp.zeros((2, 3)), "n": jnp.int32(0)}
LAYER = {"bias": np.zeros(3, np.float32), "weight": np.ones((5, 3), np.float32)}
ONE = jnp.ones(1)


def store(tx=None, kind="device", compression=None, **layer):
    made = kv.from_params({"dense": layer or LAYER}, kind=kind, optimizer=tx or adam(), devices=jax.devices()[:2])
    return kv.set_gradient_compression(made, {"type": compression}) if compression else made


def late(staleness):
    made = kv.from_params({"a": ONE}, kind="dist_async", staleness=staleness, optimizer=optax.sgd(0.1))
    return kv.push(made, 0, ONE)


def compressed():
    made = kv.set_gradient_compression(kv.init(kv.create("device"), 5, jnp.zeros(32)), {"type": "2bit"})
    return kv.push(made, 5, [jnp.full(32, 0.3)] * 2)


def save(tree, name="new"):
    return lambda folder: checkpoint.save(folder / name, tree)


def restore(saved, like):
    """`like` may be a function, so that it is made in its own test."""

    def call(folder):
        path = folder / "a"
        if saved is not TREE:
            path = folder / "other"
            checkpoint.save(path, saved())
        checkpoint.restore(path, like() if callable(like) else like)

    return call


T, V, C = TypeError, ValueError, checkpoint.CheckpointError
REFUSED = {
    # What is saved.
    "objects": (T, save({"x": np.array([{}], object)}), ["leaf 'x'", "object"]),
    "fields": (T, save({"x": np.zeros(2, [("field", np.int32)])}), ["leaf 'x'", "'field'"]),
    "a text": (T, save({"x": "text"}), ["leaf 'x'", "'text'"]),
    "long doubles": (T, save({"x": np.zeros(2, np.longdouble)}), ["leaf 'x'", str(np.dtype(np.longdouble))]),
    "a large int": (T, save({"x": 2**70}), ["leaf 'x'", "object"]),
    "over a checkpoint": (FileExistsError, save(TREE, "a"), ["a exists"]),
    "a directory of checkpoints to restore": (
        C,
        lambda folder: checkpoint.restore(folder, TREE),
        ["checkpoint.restore:", "has checkpoints in it", "checkpoint.latest("],
    ),
    "over an empty directory": (FileExistsError, save(TREE, "empty"), ["empty exists"]),
    "below a file": (NotADirectoryError, save(TREE, "file/below"), ["file"]),
    "none to keep": (V, lambda folder: checkpoint.Manager(folder, keep=0), ["Manager", "keep", "1 or more", "got 0"]),
    "a file for a directory": (
        OSError,
        lambda folder: checkpoint.Manager(folder / "file"),
        ["Manager", "written to", "file"],
    ),
    "a directory below a file": (
        OSError,
        lambda folder: checkpoint.Manager(folder / "file" / "below"),
        ["Manager", "written to", "file/below"],
    ),
    # What it is restored into.
    "another shape": (
        C,
        restore(TREE, {**TREE, "w": jnp.zeros((2, 4))}),
        ["a ", "'w'", "float32[2,4]", "float32[2,3]"],
    ),
    "another dtype": (
        C,
        restore(TREE, {**TREE, "w": jnp.zeros((2, 3), jnp.float16)}),
        ["'w'", "float16[2,3]", "float32[2,3]"],
    ),
    "a key for a number": (C, restore(TREE, {**TREE, "n": jax.random.key(0)}), ["'n'", "key<fry>[]", "int32[]"]),
    "a leaf less": (C, restore(TREE, {"w": TREE["w"]}), ["'n'", "found int32[]", "1 leaves", "2"]),
    "a leaf more": (C, restore(TREE, {**TREE, "b": ONE}), ["'b'", "float32[1]", "found nothing"]),
    "a wider layer, saved in shares": (
        C,
        restore(lambda: store(kind="sharded"), lambda: store(**{**LAYER, "weight": np.ones((5, 4), np.float32)})),
        ["key 1 ('dense/weight'): value", "float32[5,4]", "float32[5,3]"],
    ),
    "another name": (
        C,
        restore(store, lambda: store(bias=LAYER["bias"], zeight=LAYER["weight"])),
        ["key 1 ('dense/zeight')", "key 1 ('dense/weight')"],
    ),
    "an optimizer with less": (
        C,
        restore(store, lambda: store(optax.sgd(0.1))),
        ["optimizer_state/0/count", "found int32"],
    ),
    "an optimizer with other moments": (
        C,
        restore(store, lambda: store(optax.sgd(0.1, momentum=0.9))),
        ["optimizer_state/0/trace/dense/bias", "found nothing"],
    ),
    "keys without names": (
        C,
        restore(lambda: kv.init(kv.create(), 4, ONE), lambda: kv.init(kv.create(), 4, jnp.ones(2))),
        ["key 4: value", "float32[2]", "float32[1]"],
    ),
    "residuals without compression": (
        C,
        restore(compressed, lambda: kv.init(kv.create("device"), 5, jnp.zeros(32))),
        ["key 5: residuals/5", "float32[2,32]", "set_gradient_compression"],
    ),
    "another staleness": (
        C,
        restore(lambda: late(1), lambda: late(2)),
        ["key 0 ('a')", "1 pushes", "staleness 2", "staleness=1", "kv.flush"],
    ),
    "a path where nothing is": (
        FileNotFoundError,
        lambda folder: checkpoint.restore(folder / "none", TREE),
        ["nothing at", "none"],
    ),
    "no checkpoint": (
        FileNotFoundError,
        lambda folder: checkpoint.restore(checkpoint.latest(folder / "empty"), TREE),
        ["checkpoint.latest"],
    ),
    "a file for checkpoints": (NotADirectoryError, lambda folder: checkpoint.latest(folder / "file"), ["file"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all cases, since none of them may change it."""
    folder = tmp_path_factory.mktemp("errors")
    checkpoint.save(folder / "a", TREE)
    (folder / "empty").mkdir()
    (folder / "file").write_text("mine")
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, folder):
    """Nothing is written by then, and what was there is as it was."""
    error, call, content = REFUSED[case]
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    with pytest.raises(error, match=".*".join(map(re.escape, content))) as caught:
        call(folder)
    assert error is OSError or type(caught.value) is error, "a class that users do not know"
    shutil.rmtree(folder / "other", ignore_errors=True)
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before
