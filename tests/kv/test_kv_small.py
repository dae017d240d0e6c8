"""Small values of emulated devices at the prompt: few programs, the bits and the errors of the general way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import compilations, put

from jaxpar import kv, updaters
from jaxpar._devices import small_values
from jaxpar.kv._eager import small
from jaxpar.sparse import RowSparse

DEVICES = jax.devices()[:4]
SHAPES = {0: (2, 3), 4: (), 7: (0, 3), 9: (401,)}
UPDATERS = {
    "assign": updaters.assign,
    "accumulate": updaters.accumulate,
    "reads": updaters.stateless(lambda key, pushed, stored: stored - 0.3 * pushed * (key + 1)),
    "momentum": updaters.from_optax(optax.sgd(0.3, momentum=0.9)),
}


def start(kind, update="assign", dtype=jnp.float32, devices=DEVICES):
    store = kv.init(kv.create(kind, devices=devices), list(SHAPES), [jnp.ones(s, dtype) for s in SHAPES.values()])
    return kv.set_updater(store, UPDATERS[update])


def lists(dtype=jnp.float32, devices=DEVICES, seed=0):
    """For each key a value on each device, whose sum depends on the order."""
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal((len(devices), *s)) * 10.0 ** rng.integers(-3, 3) for s in SHAPES.values()]
    return [put(list((3 * v).astype(dtype)), devices) for v in values]


def generally(monkeypatch):
    """From here on, everything goes the general way."""
    for module, name in ((small, "push"), (small, "pushpull"), (small_values, "copies")):
        monkeypatch.setattr(module, name, lambda *_: None)


def seen(tree):
    """Everything of the arrays. XLA chooses where an array without elements is."""
    return [
        (a.shape, a.dtype, a.committed, a.sharding if a.size else None, np.asarray(a).tobytes())
        for a in jax.tree.leaves(tree)
        if isinstance(a, jax.Array)
    ]


def both_ways(monkeypatch, run):
    quick = seen(run())
    with monkeypatch.context() as patch:
        generally(patch)
        return quick, seen(run())


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
def test_the_sums_are_those_of_the_general_way(kind, dtype, monkeypatch):
    def run():
        store, keys = start(kind, dtype=dtype), list(SHAPES)
        store, pulled = kv.pushpull(store, keys, lists(dtype), devices=DEVICES)
        store = kv.push(store, keys[::-1], lists(dtype)[::-1])
        return store, pulled, kv.pull(store, keys), kv.pull(store, [9, 0], devices=DEVICES[::-1])

    quick, general = both_ways(monkeypatch, run)
    assert quick == general


@pytest.mark.parametrize(
    ("kind", "update"),
    [
        ("local", "reads"),
        ("local", "momentum"),
        ("device", "accumulate"),
        ("device", "reads"),
        ("sharded", "accumulate"),
    ],
)
def test_the_updates_are_those_of_the_general_way(kind, update, monkeypatch):
    def run():
        store, keys = start(kind, update), list(SHAPES)
        for seed in range(3):
            store, pulled = kv.pushpull(store, keys, lists(seed=seed), devices=DEVICES[1:3])
        return store, pulled

    quick, general = both_ways(monkeypatch, run)
    assert quick == general


@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
def test_a_push_and_its_pull_are_one_program_a_device(kind):
    store, keys = kv.init(kv.create(kind, devices=DEVICES), [0, 1], [jnp.zeros((5, 9))] * 2), [0, 1]
    values = [put([jnp.ones((5, 9))] * 4, DEVICES) for _ in keys]
    with compilations() as count:
        store, _ = kv.pushpull(store, keys, values, devices=DEVICES)
    assert count() <= len(DEVICES)
    with compilations() as count:
        for _ in range(2):
            store, _ = kv.pushpull(store, [1, 0], values, devices=DEVICES)
    assert count() == 0


@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
def test_what_is_pushed_and_pulled_can_be_donated(kind):
    store, values = start(kind), lists()
    want = [np.sum([np.asarray(v) for v in vs], axis=0) for vs in values]
    store, pulled = kv.pushpull(store, list(SHAPES), values, devices=[*DEVICES, DEVICES[0]])
    assert [p[0] is p[4] for p in pulled] == [True] * len(SHAPES)
    for leaf in jax.tree.leaves((values, pulled)):
        if not leaf.is_deleted():
            jax.jit(lambda x: x * 0 + 7, donate_argnums=0, keep_unused=True)(leaf)
            if not leaf.is_deleted():
                leaf.delete()
    for got, wanted in zip(kv.pull(store, list(SHAPES)), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


def gone(array):
    array.delete()
    return array


WRONG = {
    "no key": lambda v: ([0, 5], v[:2]),
    "a bool": lambda v: ([0, True], v[:2]),
    "a name": lambda v: (["a"], v[:1]),
    "too few": lambda v: ([0, 4], v[:1]),
    "a shape": lambda v: ([0, 4], [v[0], v[0]]),
    "a dtype": lambda v: ([0], [[a.astype(jnp.complex64) for a in v[0]]]),
    "a list": lambda v: ([0], [[[1.0], [2.0]]]),
    "deleted": lambda v: ([0], [[v[0][0], gone(v[0][1])]]),
    "mixed": lambda v: ([0], [[v[0][0], RowSparse(jnp.zeros(1, int), jnp.zeros((1, 3)), (2, 3))]]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_the_general_words(case, monkeypatch):
    def said():
        with pytest.raises(Exception, match=r"kv\.push|a key of the store") as error:
            kv.pushpull(start("local"), *WRONG[case](lists()), devices=DEVICES)
        return type(error.value), str(error.value)

    quick = said()
    generally(monkeypatch)
    assert said() == quick


def test_what_is_not_usual_goes_the_general_way():
    """The results are right; nothing of it is looked up in `small`."""
    store, keys, values = start("device"), list(SHAPES), lists()
    usual = small._find(store, keys, values)
    assert usual is not None
    assert usual.keys == keys
    compressed = kv.set_gradient_compression(store, {"type": "2bit", "threshold": 0.5})
    others = {
        "traced": jax.jit(lambda x: x * (small._find(store, keys, values) is None))(1),
        "compressed": small._find(compressed, keys, values) is None,
        "on NumPy": small._find(store, keys, [[np.asarray(v) for v in vs] for vs in values]) is None,
        "on one device": small._find(store, keys, [vs[:1] for vs in values]) is None,
        "on another number": small._find(store, keys, [vs[:-1] if i else vs for i, vs in enumerate(values)]) is None,
        "in another order": small._find(store, keys, [vs[::-1] for vs in values]) is None,
        "twice a key": small._find(store, [0, 0], [values[0]] * 2) is None,
        "bfloat16": small._find(start("device", dtype=jnp.bfloat16), keys, lists(jnp.bfloat16)) is None,
        "float16": small._find(start("sharded", dtype=jnp.float16), keys, lists(jnp.float16)) is None,
        "with states": small._find(start("device", "momentum"), keys, values) is None,
        "delayed": small._find(kv.create("dist_async"), [], []) is None,
    }
    assert all(others.values()), others


@pytest.mark.parametrize("length", [301, 2048, 40_000])
def test_a_sum_in_a_loop_is_the_sum(length):
    rows = np.random.default_rng(0).standard_normal((4, length), dtype=np.float32)
    looped = jax.jit(small._sum, static_argnums=1)(rows, small._INLINE_FLOPS)
    assert np.asarray(looped).tobytes() == (((rows[0] + rows[1]) + rows[2]) + rows[3]).tobytes()
