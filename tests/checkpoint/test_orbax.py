"""What plain orbax finds in a checkpoint, what one bit costs, and which names and dtypes come back."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxpar import checkpoint, train
from jaxpar.checkpoint import _arrays

PARAMS = {"conv1": {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4), "bias": np.zeros(4, np.float32)}}


def loss_fn(params, batch, rng):
    return jnp.sum(params["conv1"]["kernel"]), {}


def test_orbax_alone_finds_the_params_by_name(tmp_path):
    state, _ = train.start(PARAMS, optax.adam(0.1), loss_fn, kind="sharded", devices=jax.devices()[:4])
    manager = checkpoint.Manager(tmp_path)
    manager.save(state)
    manager.close()
    path = checkpoint.latest(tmp_path)

    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1")
    like = jax.tree.map(lambda m: np.empty(m.shape, m.dtype), v1.metadata(path).metadata)
    loaded = v1.load(path, like)
    np.testing.assert_array_equal(loaded["params"]["conv1"]["kernel"], PARAMS["conv1"]["kernel"])
    assert loaded["optimizer_state"]["0"]["mu"]["conv1"]["kernel"].shape == (3, 4)

    names = ocp.path.step.standard_name_format(step_prefix="step", step_format_fixed_length=8)
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(step_name_format=names)) as theirs:
        assert theirs.latest_step() == 0


def test_names_that_orbax_would_write_over_each_other(tmp_path):
    tree = {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}, "a/b": jnp.full(2, 3.0), "c": jnp.ones(1), "c/d": jnp.ones(3)}
    tree |= {"": jnp.full(1, 7.0), "é\0": jnp.full(1, 8.0), "\ud800": jnp.full(1, 9.0), "x" * 300: jnp.ones(1)}
    del tree["a/b"]  # jaxpar's own names must differ
    checkpoint.save(tmp_path / "a", tree)
    restored = checkpoint.restore(tmp_path / "a", jax.tree.map(jnp.zeros_like, tree))
    jax.tree.map(np.testing.assert_array_equal, restored, tree)


@pytest.mark.parametrize("names", [*itertools.permutations(["a", "a/b", "a.b", "a_b"])])
def test_unique_names(names):
    unique = [name.replace("/", ".") for name in _arrays.unique_names(names)]
    assert len(set(unique)) == 4
    assert not any(x.startswith(y + ".") for x in unique for y in unique)


DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_to_the_bit(tmp_path, dtype):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    array = jnp.arange(8).astype(dtype)
    in_shards = jax.device_put(array, NamedSharding(mesh, P("x")))
    tree = {"a": array, "none": jnp.zeros((0, 3), dtype), "scalar": array[3], "in_shards": in_shards}
    checkpoint.save(tmp_path / "a", tree)
    split = jax.ShapeDtypeStruct((8,), array.dtype, sharding=in_shards.sharding)
    restored = checkpoint.restore(tmp_path / "a", {**tree, "a": split})
    for name, leaf in tree.items():
        assert restored[name].dtype == leaf.dtype
        assert np.asarray(restored[name]).tobytes() == np.asarray(leaf).tobytes()
    assert restored["a"].sharding == split.sharding


def test_numbers_of_python_and_other_byte_orders(tmp_path):
    checkpoint.save(tmp_path / "a", {"c": 1 + 2j, "big": np.arange(3, dtype=">f4")})
    restored = checkpoint.restore(tmp_path / "a", {"c": 0j, "big": np.zeros(3, ">f4")})
    assert restored["c"] == 1 + 2j
    assert restored["big"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "boxes", [[], [[[0, 2]]], [[[0, 2]], [[1, 4]]], [[[0, 2]], [[2, 4]], [[2, 4]]], [[[0, 4], [0, 1]]]]
)
def test_boxes_that_leave_a_gap_or_overlap_are_refused(boxes):
    with pytest.raises(ValueError):  # noqa: PT011
        _arrays.check_boxes(boxes, (4,))
    _arrays.check_boxes([[[0, 2]], [[2, 4]]], (4,))
    _arrays.check_boxes([], (0, 3))
    _arrays.check_boxes([[]], ())
