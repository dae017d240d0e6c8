"""The hash of a state: each bit, name, shape and dtype counts, and nothing of devices and layouts."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from world import adam, line, start, step_of

from jaxpar import checkpoint, kv, train
from jaxpar.checkpoint import _leaves

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))


def hash_of(tree):
    return str(checkpoint._StateHash(tree))


def bits(*words, dtype="float32"):
    return jnp.asarray(np.array(words, f"uint{8 * np.dtype(dtype).itemsize}").view(dtype))


BASE = {"a": jnp.arange(6.0), "b": jnp.arange(6.0) + 1, "n": jnp.int32(3), "key": jax.random.key(1)}
CHANGES = {
    "one ULP": {"a": BASE["a"].at[5].set(jnp.nextafter(jnp.float32(5), jnp.inf))},
    "the sign of zero": {"a": BASE["a"].at[0].set(-0.0)},
    "two elements": {"a": BASE["a"][jnp.array([1, 0, 2, 3, 4, 5])]},
    "two leaves": {"a": BASE["b"], "b": BASE["a"]},
    "a shape": {"a": BASE["a"].reshape(2, 3)},
    "a dtype": {"n": jnp.uint32(3)},
    "a scalar": {"n": jnp.int32(4)},
    "a key": {"key": jax.random.key(2)},
    "another generator of that size": {"key": jax.random.wrap_key_data(jnp.zeros(4, jnp.uint32), impl="rbg")},
    "another leaf": {"c": jnp.zeros((0,))},
    "a name": {"c": BASE["n"], "n": None},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_hash(change):
    assert hash_of(BASE) == hash_of(jax.tree.map(jnp.copy, BASE))
    assert hash_of({**BASE, **CHANGES[change]}) != hash_of(BASE)


def test_the_hash_is_that_of_earlier_versions():
    """Certificates are files, which another version of jaxpar or jax compares with."""
    tree = {"a": np.arange(6, dtype=np.float32) / 7, "b": np.arange(-3, 3, dtype=np.int8)}
    tree |= {"c": np.array([[True, False]]), "d": np.arange(4, dtype=np.float16)}
    assert hash_of(tree) == hash_of(jax.tree.map(jnp.asarray, tree)) == "ef314e397e8f44f70d599b28f9613484"


DTYPES = (
    "float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int4 uint4 int8 int16 int32 uint8 uint16 uint32 bool complex64"
).split()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_each_dtype(dtype):
    """Each of two elements counts, and their places do."""
    zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
    found = [hash_of(jnp.stack(pair)) for pair in ((zero, zero), (zero, one), (one, zero), (one, one))]
    assert len({*found, hash_of(jnp.zeros(2, "int32" if dtype != "int32" else "int8"))}) == 5
    if dtype in ("float32", "float16", "bfloat16", "complex64"):
        assert hash_of(-jnp.zeros(2, dtype)) != found[0]


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_64_bits(dtype):
    one = np.array([1, 2], dtype)
    other = one.copy()
    other.view(np.uint8)[0] ^= 1  # its last bit
    assert hash_of(one) != hash_of(other)
    with jax.enable_x64(True):
        assert hash_of(jnp.asarray(one)) == hash_of(one)
        assert hash_of(jnp.asarray(other)) == hash_of(other)


@pytest.mark.slow
def test_the_padding_of_a_sharded_store_does_not_count():
    """Ten elements on two, three and four devices have no padding, two and two numbers of it."""
    store = kv.from_params({"w": jnp.arange(10.0) + 1}, kind="sharded", optimizer=adam())
    found = {hash_of(kv.place(store, jax.devices()[:count])) for count in (2, 3, 4)}
    assert len(found) == 1


def test_each_bit_of_a_nan():
    words = [0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001, 0x7F800000]
    assert len({hash_of(bits(word)) for word in words}) == 5
    assert len({hash_of(bits(word, dtype="float16")) for word in (0x7E00, 0x7E01, 0xFE00)}) == 3


def test_every_single_bit_and_every_swap():
    base = np.random.default_rng(0).integers(0, 1 << 32, 8, dtype=np.uint32)
    found = [hash_of(jnp.asarray(base))]
    for i in range(8):
        found += [hash_of(jnp.asarray(np.where(np.arange(8) == i, base ^ np.uint32(1 << b), base))) for b in range(32)]
        for j in range(i):
            order = np.arange(8)
            order[[i, j]] = j, i
            found.append(hash_of(jnp.asarray(base[order])))
    assert len(set(found)) == len(found) == 1 + 8 * 32 + 28


@pytest.mark.slow
def test_layouts_do_not_count():
    tree = {"w": jnp.arange(48.0).reshape(6, 8), "h": jnp.ones((8, 4), "bfloat16"), "key": jax.random.key(0)}
    expected = hash_of(tree)
    for spec in (P(), P("a"), P(None, "b"), P("a", "b"), P(None, ("a", "b"))):
        placed = {n: jax.device_put(tree[n], NamedSharding(MESH, spec)) for n in ("w", "h")}
        assert hash_of({**tree, **placed}) == expected
    assert hash_of({n: np.asarray(x) if n != "key" else x for n, x in tree.items()}) == expected
    with jax.set_mesh(MESH):
        assert hash_of(tree) == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["device", "local", "sharded", "dist_sync"])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_kinds_and_devices_do_not_count(kind, count, tmp_path):
    """Of odd sizes, so that rows of a `sharded` store are padded, and the padding is not zero."""
    state, _ = step_of()(start(4, "device", adam()), line())
    checkpoint.save(tmp_path / "state", state)
    like = start(count, kind, adam())
    other = checkpoint.restore(tmp_path / "state", like)
    assert hash_of(other) == hash_of(state)
    assert hash_of(like) != hash_of(state)


def test_padding_does_not_count():
    store = kv.from_params({"w": jnp.arange(5.0)}, kind="sharded", optimizer=optax.sgd(0.1), devices=jax.devices()[:4])
    (key,) = store.values
    rows = store.values[key]
    assert rows.size == 8
    noise = jax.device_put(jnp.asarray(rows).reshape(-1).at[5:].set(jnp.nan).reshape(rows.shape), rows.sharding)
    last = jax.device_put(jnp.asarray(rows).reshape(-1).at[4].set(7.0).reshape(rows.shape), rows.sharding)
    with_noise, with_last = (dataclasses.replace(store, values={key: v}) for v in (noise, last))
    assert hash_of(with_noise) == hash_of(store)
    assert hash_of(with_last) != hash_of(store)


def test_a_few_words_come_to_the_host():
    found = checkpoint._StateHash(start(4, "sharded", adam()))
    arrays = [sums for _, sums in found.groups]
    assert sum(x.nbytes for x in arrays) == 8 * len(found.records)
    assert len(arrays) <= 2  # programs


@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))], ids=str)
def test_devices_exchange_sums_only(spec):
    split = jax.device_put(jnp.zeros((64, 64)), NamedSharding(MESH, spec))
    program = _leaves.hash_sums.lower([split], (None,)).compile().as_text()
    shapes = re.findall(r"= \(?(\w+\[[\d,]*\])\S* (?:all-|collective-|reduce-scatter)", program)
    assert shapes
    assert {math.prod(map(int, shape[4:-1].split(","))) for shape in shapes} <= {2, 4}


def test_state_of_all_parts():
    """Model state, loss scale, a transform and the generator are in it."""
    loss_fn = lambda p, b, rng, m: (((b["x"] @ p["w"]) ** 2).mean(), ({}, {"mean": m["mean"] + 1}))  # noqa: E731
    options = {"model_state": {"mean": jnp.zeros(2)}, "loss_scale": "dynamic"}
    state, step = train.start({"w": jnp.ones(3)}, optax.sgd(0.1), loss_fn, **options)
    names = {record["name"].split("/")[0] for record in checkpoint._StateHash(step.complete(state)).records}
    assert {"store", "step", "rng", "model_state", "loss_scale"} <= names
