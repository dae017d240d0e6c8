"""Which values share a bucket, the way in and out of it, and the collectives that use it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxpar._devices import collectives, mesh
from jaxpar._devices.collectives import BucketLimits

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
avals = st.lists(st.builds(jax.ShapeDtypeStruct, shapes, st.sampled_from(["float32", "int8"])), max_size=12)
limits = st.builds(BucketLimits, st.integers(0, 200), st.integers(0, 100))


def nbytes(aval):
    return int(np.prod(aval.shape, dtype=int)) * aval.dtype.itemsize


@settings(max_examples=100, deadline=None)
@given(avals, limits)
def test_a_plan_keeps_its_limits(avals, limits):
    groups = collectives.plan(avals, limits)
    assert sorted(i for g in groups for i in g) == list(range(len(avals)))
    for group in groups:
        assert len({avals[i].dtype for i in group}) == 1
        assert list(group) == sorted(group)
        if len(group) > 1:
            assert sum(nbytes(avals[i]) for i in group) <= limits.bucket_bytes
            assert all(nbytes(avals[i]) < limits.alone_bytes for i in group)


TAILS = [(3, 5), (), (0, 2), (17,), (2,), (2, 2)]


@pytest.mark.parametrize("limits", [BucketLimits(), BucketLimits(100, 60), BucketLimits(0, 0)], ids=repr)
@pytest.mark.parametrize("axis", [0, 1])
def test_out_of_a_bucket_comes_what_went_in(axis, limits):
    """With `axis` 1 there is a first axis of 3, which no value is joined along."""
    lead = (3,) * axis
    values = [
        np.arange(np.prod((*lead, *tail), dtype=int))
        .reshape((*lead, *tail))
        .astype("int8" if i % 4 == 3 else "float32")
        for i, tail in enumerate(TAILS)
    ]
    groups = collectives.plan(values, limits)
    packed = jax.jit(lambda values: collectives.pack(values, groups, axis))([jnp.asarray(v) for v in values])
    for array, host, group in zip(packed, collectives.pack(values, groups, axis, xp=np), groups, strict=True):
        np.testing.assert_array_equal(array, host)
        size = sum(values[i].size for i in group)
        assert array.shape == (values[group[0]].shape if len(group) == 1 else (*lead, size // 3**axis))
    for value, got in zip(values, jax.jit(lambda p: collectives.unpack(p, TAILS, groups, axis))(packed), strict=True):
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)


def test_a_value_of_its_own_may_come_back_flat_and_gathered():
    """A program over devices has it so."""
    values, groups = [jnp.ones((2, 3)), jnp.zeros(())], ((0,), (1,))
    flat = [v.reshape(-1) for v in collectives.pack(values, groups)]
    assert [v.shape for v in collectives.unpack(flat, [(2, 3), ()], groups)] == [(2, 3), ()]
    gathered = [jnp.stack([v] * 4) for v in flat]
    assert [v.shape for v in collectives.unpack(gathered, [(2, 3), ()], groups, axis=1)] == [(4, 2, 3), (4,)]


def test_defaults_and_edges():
    assert collectives.plan(()) == ()
    many = (jax.ShapeDtypeStruct((256,), "float32"),) * 256
    assert len(collectives.plan(many)) == 1  # 256 KB
    large = (jax.ShapeDtypeStruct((1024, 1024), "float32"),) * 8
    assert collectives.plan(large) == tuple((i,) for i in range(8))
    assert collectives.plan(many[:3], BucketLimits(2048, 10**9)) == ((0, 1), (2,))
    assert collectives.plan(many[:2], BucketLimits(10**9, 1024)) == ((0,), (1,))


@pytest.mark.parametrize("name", ["bucket_bytes", "alone_bytes"])
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_limits_are_sizes(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number of bytes of 0 or more, got {value}"):
        BucketLimits(**{name: value})


VALUES = [(3, 5), (), (0, 2), (17,), (150, 120)]  # the last one is summed by shares


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limits", [BucketLimits(), BucketLimits(0, 0)], ids=["buckets", "alone"])
def test_collectives_against_numpy(limits):
    count = 4
    rng = np.random.default_rng(0)
    given = [rng.integers(-9, 9, (count, *s)).astype(np.float32) for s in VALUES]

    def body(*values):
        mine = collectives.reduce_scatter(values, "i", limits)
        own = [collectives.own_chunk(v, "i") for v in collectives.allreduce(values, "i", limits)]
        return (
            collectives.allreduce(values, "i", limits),
            collectives.gather_sum(values, "i", limits),
            collectives.all_gather(mine, VALUES, "i", limits),
            [collectives.sum_apart(v, "i") for v in values],
            [m - o for m, o in zip(mine, own, strict=True)],
        )

    *sums, differences = jax.pmap(body, "i", devices=jax.devices()[:count])(*given)
    for result in sums:
        for got, value in zip(result, given, strict=True):
            np.testing.assert_array_equal(got, np.broadcast_to(value.sum(0), value.shape))
    assert not any(np.asarray(d).any() for d in differences)


def test_layouts_on_devices():
    devices = tuple(jax.devices()[:4])
    assert mesh.copies_on(devices) is mesh.copies_on(tuple(jax.devices()[:4]))
    assert mesh.copies_on(devices).shard_shape((8, 4)) == (8, 4)
    assert mesh.split_over(devices).shard_shape((8, 4)) == (2, 4)
    assert tuple(mesh.split_over(devices[::-1]).mesh.devices) == devices[::-1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 16, 17, 100])
def test_a_sum_in_order_adds_from_left_to_right(count):
    terms = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    expected = terms[0]
    for term in terms[1:]:
        expected = expected + term
    total = jax.jit(lambda x: collectives.sum_in_order(x))(jnp.asarray(terms))
    np.testing.assert_array_equal(total, expected)
    slope = jax.grad(lambda x: collectives.sum_in_order(x).sum())(jnp.asarray(terms))
    np.testing.assert_array_equal(slope, np.ones_like(terms))


@pytest.mark.parametrize(("axis", "shape"), [(0, (4, 3)), (1, (2, 5))])
def test_a_batch_and_its_shapes_are_padded_alike(axis, shape):
    """With rows of no example at the end, as many as the shards of a step need."""
    batch = {"x": np.arange(24, dtype=np.int16).reshape(2, 3, 4), "y": jnp.arange(1.0, 7).reshape(2, 3)}
    padded = collectives.pad_rows(batch, 2, axis)
    for name, array in batch.items():
        want = np.zeros((*shape, *array.shape[2:]), array.dtype)
        want[:2, :3] = array
        np.testing.assert_array_equal(padded[name], want, strict=True)
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (batch, padded))
    assert collectives.pad_rows(specs[0], 2, axis) == specs[1]
