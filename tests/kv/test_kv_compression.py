"""A compressed store: MXNet's numbers, residuals of each device, and what goes round it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_model import FOUR, REFERENCE, over, put

from jaxpar import kv, updaters

GRADS = np.array(REFERENCE["grads"], np.float32)  # six pushes from four devices
RECORDED = np.array(REFERENCE["compression_2bit"]["ok"], np.float32)
TWO = {"type": "2bit", "threshold": 0.5}
SHAPE = GRADS.shape[2:]
SPECS = [{"type": "topk", "ratio": 0.25}, TWO, *({"type": t} for t in ("1bit", "int8", "bf16", "powersgd", "int3"))]


def compressed(kind, spec=TWO, shape=SHAPE, **options):
    return kv.set_gradient_compression(kv.init(kv.create(kind, **options), 3, jnp.zeros(shape)), spec)


def residual_of(store):
    """(devices, *shape) of the one key, whatever the layout."""
    leaf = np.asarray(store.residuals[3]["residual"])
    return leaf.reshape(leaf.shape[0], -1)[:, : np.prod(SHAPE, dtype=int)].reshape(leaf.shape[0], *SHAPE)


def model_residuals(pushes):
    residual = np.zeros(pushes.shape[1:], np.float32)
    for values in pushes:
        residual = residual + values
        residual = residual - np.float32(0.5) * np.sign(residual) * (np.abs(residual) >= 0.5)
        yield residual


def check_six_pushes(store, push):
    for values, recorded, residual in zip(GRADS, RECORDED, model_residuals(GRADS), strict=True):
        store = push(store, values)
        np.testing.assert_array_equal(kv.pull(store, 3), recorded)
        np.testing.assert_array_equal(residual_of(store), residual)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "count"), [("sharded", 4), *((kind, n) for kind in ("device", "local", "dist_sync") for n in (4, 1))]
)
def test_mxnets_six_pushes_at_the_prompt(kind, count):
    devices = jax.devices()[:count]
    store = compressed(kind, devices=devices if kind == "sharded" else None)
    check_six_pushes(store, lambda s, v: kv.push(s, 3, put(list(v), devices)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_mxnets_six_pushes_inside_of_programs(engine, kind):
    store = kv.place(compressed(kind, devices=FOUR), FOUR)
    structure = jax.tree.structure(store)
    push = over(engine, store, FOUR, lambda s, v: kv.push(s, 3, v, axis_name="data"))
    check_six_pushes(store, push)
    assert jax.tree.structure(push(store, GRADS[0])) == structure


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_under_jit_and_scan_with_lists(kind):
    store = compressed(kind, devices=FOUR if kind == "sharded" else None)
    push = jax.jit(lambda s, v: kv.push(s, 3, list(v)))
    first = push(store, GRADS[0])  # the residuals are made by the first push
    np.testing.assert_array_equal(kv.pull(first, 3), RECORDED[0])
    last, pulled = jax.lax.scan(lambda s, v: kv.pushpull(s, 3, list(v)), first, GRADS[1:])
    np.testing.assert_array_equal(pulled, RECORDED[1:])
    *_, residual = model_residuals(GRADS)
    np.testing.assert_array_equal(residual_of(last), residual)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s["type"])
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_nothing_is_lost_for_good(kind, spec):
    """What was pushed in all is what arrived in all and what the residuals still hold."""
    store = kv.set_updater(compressed(kind, spec, (16, 12), devices=FOUR), updaters.accumulate)
    rng = np.random.default_rng(0)
    given = np.zeros((16, 12))
    for _ in range(3):
        values = rng.standard_normal((4, 16, 12)).astype(np.float32)
        given += values.sum(0, dtype=np.float64)
        store = kv.push(store, 3, put(list(values), FOUR))
    held = np.asarray(store.residuals[3]["residual"], np.float64).sum(0).reshape(-1)[:192].reshape(16, 12)
    if "owner_residual" in store.residuals[3]:
        held += np.asarray(store.residuals[3]["owner_residual"], np.float64).reshape(16, 12)
    np.testing.assert_allclose(kv.pull(store, 3) + held, given, atol=1e-4)
    assert np.abs(held).max() > 1e-4, "the compression did nothing"


@pytest.mark.slow
def test_keys_and_devices_have_random_streams_of_their_own():
    store = kv.init(kv.create("device", devices=FOUR), [0, 1], [jnp.zeros(256)] * 2)
    store = kv.set_gradient_compression(store, {"type": "bf16", "rounding": "stochastic"})
    same = put([jnp.full(256, 1.001)] * 4, FOUR)
    store = kv.push(store, [0, 1], [same, same])
    held = [np.asarray(store.residuals[k]["residual"])[i].tobytes() for k in (0, 1) for i in range(4)]
    assert len(set(held)) == 8


def test_small_and_integer_values_go_round_it():
    store = kv.init(kv.create("device"), [0, 1, 2], [jnp.zeros(()), jnp.zeros(64, jnp.int32), jnp.zeros((0, 3))])
    store = kv.set_gradient_compression(store, TWO)
    values = [[jnp.float32(0.3)] * 2, [jnp.full(64, 3, jnp.int32)] * 2, [jnp.zeros((0, 3))] * 2]
    store = kv.push(store, [0, 1, 2], values)
    assert store.residuals == {}
    assert float(kv.pull(store, 0)) == np.float32(0.6)
    assert kv.pull(store, 1).tolist() == [6] * 64


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "dtype"), [("local", "float16"), ("device", "bfloat16"), ("sharded", "float16")])
def test_narrow_values_are_compressed(kind, dtype):
    """Wide ones too, in a narrow store. In MXNet (#15252) 2bit was for float32 alone."""
    devices = jax.devices()[:2]
    store = kv.init(kv.create(kind, devices=devices), 3, jnp.zeros(64, dtype))
    store = kv.set_gradient_compression(store, TWO)
    store = kv.push(store, 3, put([jnp.full(64, 0.75, dtype), jnp.full(64, 0.75)], devices))
    assert kv.pull(store, 3).dtype == dtype
    np.testing.assert_array_equal(kv.pull(store, 3).astype(jnp.float32), np.ones(64))


@pytest.mark.slow
def test_it_can_be_changed_and_ended():
    store = kv.push(compressed("device"), 3, [jnp.ones(SHAPE)] * 2)
    assert store.residuals
    again = kv.set_gradient_compression(store, {"type": "2bit", "threshold": 1.0})
    assert again.residuals == {}
    np.testing.assert_array_equal(kv.pull(kv.push(again, 3, [jnp.ones(SHAPE)] * 3), 3), np.full(SHAPE, 3.0))
    plain = kv.set_gradient_compression(store, {"type": "none"})
    np.testing.assert_array_equal(kv.pull(kv.push(plain, 3, jnp.full(SHAPE, 0.3)), 3), np.full(SHAPE, np.float32(0.3)))


def test_init_and_pull_are_not_compressed():
    store = kv.set_gradient_compression(kv.create("device"), TWO)
    store, pulled = kv.broadcast(store, 3, jnp.full(8, 0.123), devices=jax.devices()[:2])
    for copy in pulled:
        np.testing.assert_array_equal(copy, np.full(8, np.float32(0.123)))


def test_a_trained_key_beside_a_frozen_one_is_compressed():
    """Its program calls the first key 0, which is the frozen one of this store."""
    store = kv.from_params({"a": jnp.ones(64), "b": jnp.zeros(64)}, frozen="a", updater=updaters.accumulate)
    store = kv.set_gradient_compression(store, {"type": "2bit"})
    store = kv.push(store, "b", [jax.device_put(jnp.full(64, 0.75), d) for d in FOUR])
    assert kv.pull(store, "b")[0] == 2
    assert float(store.residuals[1]["residual"].sum()) == 4 * 64 * 0.25
