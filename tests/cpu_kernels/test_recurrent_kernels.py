"""The loop of an LSTM and of a GRU by the kernels: float64's numbers, all transforms, cells that are almost such."""

import functools
import itertools

import cpu_model
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from cpu_model import same, text
from jax import export, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from reference import digests, error, missing
from world import mostly_slow

from jaxpar import kv, train
from jaxpar._cpu import recurrent
from jaxpar.models import fast_on_cpus

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
CELLS = ("lstm", "gru")
close = functools.partial(cpu_model.close, rtol=2e-5)


@pytest.fixture(autouse=True)
def biases_are_added_as_in_libraries():
    with jax.numpy_rank_promotion("allow"):
        yield


def normal(*shape, scale=1.0, seed=0):
    return (scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def lstm_cell(params, carry, x):
    c, h = carry
    i, f, g, o = jnp.split(x @ params["input"] + h @ params["state"] + params["bias"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


def gru_cell(params, h, x):
    xr, xz, xn = jnp.split(x @ params["input"] + params["bias"], 3, axis=-1)
    hr, hz, hn = jnp.split(h @ params["state"], 3, axis=-1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    h = (1.0 - z) * jnp.tanh(xn + r * (hn + params["state_bias"])) + z * h
    return h, h


def run(cell, params, x, step=None, **options):
    """All states, T x B x H, and the last carry, of inputs T x B x I."""
    step = step or {"lstm": lstm_cell, "gru": gru_cell}[cell]
    start = (params["c"], params["h"]) if cell == "lstm" else params["h"]
    return lax.scan(functools.partial(step, params), start, x, **options)[::-1]


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


def made(cell, steps=6, batch=5, width=20, inputs=7):
    gates = 4 if cell == "lstm" else 3
    params = {
        "input": normal(inputs, gates * width, scale=inputs**-0.5),
        "state": normal(width, gates * width, scale=width**-0.5, seed=1),
        "bias": normal(gates * width),
        "h": normal(batch, width, seed=2),
        **({"c": normal(batch, width, seed=3)} if cell == "lstm" else {"state_bias": normal(width, seed=3)}),
    }
    return params, normal(steps, batch, inputs, seed=4)


def loss(cell, params, x, **options):
    states, carry = run(cell, params, x, **options)
    return jnp.sin(3 * states).mean() + sum((y * jnp.cos(y)).mean() for y in jax.tree.leaves(carry))


def is_called(function, *args):
    """Whether a kernel computes the loop. Then no loop is left."""
    lowered = text(function, *args)
    called = "@jaxpar_cpu.LstmForward" in lowered or "@jaxpar_cpu.GruForward" in lowered
    assert called != ("stablehlo.while" in lowered)
    return called


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_slow(range(200), 0, 1, most=10))
def test_random_loops(cell, seed):
    sizes = [1, 2, 7, 19], [1, 2, 3, 9, 16, 37], [1, 2, 5, 16, 31, 32, 33, 70, 130]
    rng = np.random.default_rng(seed)
    steps, batch, width = (int(rng.choice(several)) for several in sizes)
    gates = {"lstm": 4, "gru": 3}[cell]
    shapes = (steps, batch, gates * width), (width, gates * width), (batch, width), (batch, width)
    operands = [normal(*shape, scale=0.7, seed=n) for n, shape in enumerate(shapes)]
    operands[1] /= np.float32(width**0.5)
    weights = [normal(steps, batch, width, seed=n) for n in range(recurrent.RESULTS[cell])]

    def all_of(function, operands):
        def total(*operands):
            return sum((w * y).sum() for w, y in zip(weights, function(cell, *operands), strict=False))

        return function(cell, *operands)[: len(weights)], jax.grad(total, (0, 1, 2, 3))(*operands)

    ours, laxs = (jax.jit(functools.partial(all_of, f))(operands) for f in (recurrent.loop, recurrent.by_scan))
    with jax.enable_x64(True):
        operands = [jnp.asarray(x, jnp.float64) for x in operands]
        true = jax.tree.map(np.asarray, jax.jit(functools.partial(all_of, recurrent.by_scan))(operands))
    for a, b, right in zip(*map(jax.tree.leaves, (ours, laxs, true)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert error(a, right) < 1.5 * error(b, right) + 3e-7, (steps, batch, width)


@pytest.mark.slow
def test_rounding_of_long_sums_is_no_worse_than_that_of_lax(cell):
    params, x = made(cell, 64, 32, 256, 128)
    gradient = [jax.jit(jax.grad(lambda p, x, f=f: (f(p, x)[0] ** 2).sum())) for f in (
        fast_on_cpus(functools.partial(run, cell)), functools.partial(run, cell)
    )]  # fmt: skip
    with jax.enable_x64(True):
        true = jax.tree.map(np.asarray, gradient[1](*jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x))))
    for name in params:
        ours, laxs = (error(g(params, x)[name], true[name]) for g in gradient)
        assert ours < 1.1 * laxs + 5e-8, name


def many(p):
    return jax.tree.map(lambda a: jnp.stack([a, a + 0.1, a - 0.1]), p)


def twice_mapped(f):
    each = jax.vmap(jax.vmap(f, (None, 0)), (None, 0))
    return lambda p, x: each(p, jnp.stack([x] * 6).reshape(2, 3, *x.shape))


TRANSFORMS = reference.TRANSFORMS | {
    "gradient of vmap": lambda f: jax.grad(lambda p, x: jax.vmap(f, (None, 0))(p, jnp.stack([x, -x])).sum(), (0, 1)),
    "vmap over inputs": lambda f: lambda p, x: jax.vmap(jax.grad(f), (None, 0))(p, jnp.stack([x, -x])),
    "vmap of the last axis": lambda f: lambda p, x: jax.vmap(f, (None, 3))(p, jnp.stack([x, -x], -1)),
    "vmap over the first state": lambda f: (
        lambda p, x: jax.vmap(lambda h: f({**p, "h": p["h"] + h}, x))(jnp.arange(3.0))
    ),
    "vmap over both": lambda f: lambda p, x: jax.vmap(jax.grad(f))(many(p), jnp.stack([x, -x, x])),
    "vmap in vmap": twice_mapped,
    "linearize": lambda f: lambda p, x: jax.linearize(f, p, x)[1](p, x),
    "hessian": lambda f: lambda p, x: jax.hessian(lambda b: f({**p, "bias": b}, x))(p["bias"]),
    "some of the params": lambda f: lambda p, x: jax.grad(lambda w: f({**p, "state": w}, x))(p["state"]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cell", mostly_slow(CELLS, "lstm"))
@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(cell, name):
    params, x = made(cell, 3, 2, 5, 4)
    of_lax = functools.partial(loss, cell)
    ours, laxs = (jax.jit(TRANSFORMS[name](f)) for f in (fast_on_cpus(of_lax), of_lax))
    assert ("jaxpar_cpu." in ours.lower(params, x).as_text()) == (name != "vmap over both")
    close(ours(params, x), laxs(params, x), rtol=1e-4)


@pytest.mark.slow
def test_eager_calls(cell):
    params, x = made(cell)
    of_lax = functools.partial(loss, cell)
    close(jax.value_and_grad(fast_on_cpus(of_lax))(params, x), jax.value_and_grad(of_lax)(params, x))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pmap", "shard_map", "jit"])
@pytest.mark.parametrize("count", [4, 1])
@pytest.mark.parametrize("options", mostly_slow([{}, {"remat": True}, {"accumulate": 2}], {}))
def test_a_step_of_each_engine(engine, count, options):
    params, _ = made("lstm", 4, 1, 6, 3)
    batch = normal(8, 4, 3)

    def of_batch(params, batch, rng):
        start = {name: jnp.broadcast_to(params[name], (len(batch), 6)) for name in "ch"}
        return loss("lstm", {**params, **start}, batch.swapaxes(0, 1)), {}

    options = {"engine": engine, "devices": jax.devices()[:count], **options}
    state, step = train.start(params, optax.sgd(0.1), of_batch, **options)
    lowered = step.lower(state, batch).as_text()
    assert "jaxpar_cpu.LstmBackward" in lowered
    new, metrics = step(state, batch)
    right, gradient = jax.jit(jax.value_and_grad(lambda p: of_batch(p, batch, None)[0]))(params)
    close(metrics["loss"], right)
    close(kv.to_params(new.store), jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient))


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_in_a_shard_map(check):
    params, x = made("lstm", 4, 8, 6, 3)
    states = {name: params.pop(name) for name in "ch"}
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))

    def gradient(by):
        def local(params, states, x):
            return by(lambda p: loss("lstm", {**p, **states}, x))(params)

        def whole(params, states, x):
            total = lambda p: lax.pmean(local(p, states, x), "i")  # noqa: E731
            value, grads = jax.value_and_grad(total)(params)
            return value, grads if check else lax.pmean(grads, "i")

        specs = (P(), P("i"), P(None, "i"))
        return jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check))

    ours, laxs = gradient(fast_on_cpus), gradient(lambda f: f)
    assert "jaxpar_cpu.LstmBackward" in ours.lower(params, states, x).as_text()
    close(ours(params, states, x), laxs(params, states, x))


@pytest.mark.slow
@pytest.mark.parametrize("varies", list(itertools.product([False, True], repeat=3)))
def test_what_varies_in_a_shard_map_that_checks_it(cell, varies):
    params, x = made(cell, 3, 4, 6, 5)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    states = {name: params.pop(name) for name in ("ch" if cell == "lstm" else "h")}
    # Each array is (1 or 2, ...): the same for both devices, or another one for each.
    args = [
        jax.tree.map(lambda x, vary=vary: jnp.stack([x, 1.5 * x])[: 1 + vary], arg)
        for vary, arg in zip(varies, (params, states, x), strict=True)
    ]
    specs = tuple(P("i") if vary else P() for vary in varies)

    def total(params, states, x):
        params, states, x = jax.tree.map(lambda x: x[0], (params, states, x))
        if any(varies) and not varies[1]:  # what a loop carries varies as what it makes
            states = jax.tree.map(lambda x: lax.pcast(x, "i", to="varying"), states)
        value = loss(cell, {**params, **states}, x)
        return lax.pmean(value, "i") if any(varies) else value

    def gradient(by):
        local = jax.value_and_grad(by(total), (0, 1, 2))
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), specs), check_vma=True))

    close(gradient(fast_on_cpus)(*args), gradient(lambda f: f)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_sharded_arrays_take_the_loop_of_xla(kind):
    params, x = made("lstm", 4, 8, 6, 3)
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    mesh = jax.make_mesh((4,), ("data",), axis_types=(types[kind],))
    of_lax = jax.grad(fast_on_cpus(functools.partial(loss, "lstm")))
    with jax.set_mesh(mesh):
        where = {name: NamedSharding(mesh, P("data") if name in "ch" else P()) for name in params}
        args = jax.device_put(params, where), jax.device_put(x, NamedSharding(mesh, P(None, "data")))
        compiled = jax.jit(of_lax).lower(*args).compile()
        assert "jaxpar_cpu" not in compiled.as_text()
        found = jax.device_get(compiled(*args))
    close(found, jax.jit(jax.grad(functools.partial(loss, "lstm")))(params, x))


@pytest.mark.slow
def test_export_and_other_dtypes_take_the_loop_of_xla(cell):
    params, x = made(cell)
    of_lax = functools.partial(run, cell)
    ours = fast_on_cpus(of_lax)
    exported = export.export(jax.jit(ours))(params, x)
    assert "jaxpar_cpu" not in exported.mlir_module()
    close(exported.call(params, x), jax.jit(of_lax)(params, x))
    for dtype in (jnp.bfloat16, jnp.float16):
        half = jax.tree.map(functools.partial(jnp.asarray, dtype=dtype), (params, x))
        assert not is_called(ours, *half)
        same(jax.jit(ours)(*half), jax.jit(of_lax)(*half))
    with jax.enable_x64(True):
        assert not is_called(ours, *jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x)))
    assert "jaxpar_cpu" not in jax.jit(ours).trace(params, x).lower(lowering_platforms=("tpu",)).as_text()


def variants():
    """Steps of an LSTM: (step, whether a kernel may compute it). Each must give lax's numbers."""
    s, tanh = jax.nn.sigmoid, jnp.tanh

    def step(change, y=lambda p, c, h, x: x @ p["input"] + h @ p["state"] + p["bias"]):
        def function(params, carry, x):
            return change(params, *jnp.split(y(params, *carry, x), 4, axis=-1), *carry, x)

        return function

    def cell_of(i, f, g, c, h):
        return s(f) * c + s(i) * tanh(g)

    def state_of(o, c, old):
        return s(o) * tanh(c)

    def usual(p, i, f, g, o, c, h, x, cell=cell_of, state=state_of, carry=lambda c, h: (c, h), out=lambda c, h, *_: h):
        new = cell(i, f, g, c, h)
        hidden = state(o, new, c)
        return carry(new, hidden), out(new, hidden, x, h)

    def but(**parts):
        """A step that is the usual one but for these parts."""
        return step(functools.partial(usual, **parts))

    def gates_by(gate):
        return but(
            cell=lambda i, f, g, c, h: gate(f) * c + gate(i) * tanh(g), state=lambda o, c, old: gate(o) * tanh(c)
        )

    def updated_by(act):
        return but(cell=lambda i, f, g, c, h: s(f) * c + s(i) * act(g))

    def turned(i, f, g, c, h):
        return tanh(g) * s(i) + c * s(f)

    def masked(p, i, f, g, o, c, h, x):
        (new_c, new_h), _ = usual(p, i, f, g, o, c, h, x)
        keep = x[..., :1] > 0
        carry = jnp.where(keep, new_c, c), jnp.where(keep, new_h, h)
        return carry, carry[1]

    def no_split(params, carry, x):
        c, h = carry
        y, n = params["bias"] + h @ params["state"] + x @ params["input"], h.shape[-1]
        return usual(params, y[:, :n], y[:, n : 2 * n], y[:, 2 * n : 3 * n], y[:, 3 * n :], c, h, x)

    def overlapping(params, carry, x):
        c, h = carry
        y, n = x @ params["input"] + h @ params["state"], h.shape[-1]
        return usual(params, y[:, 1 : n + 1], y[:, n : 2 * n], y[:, :n], y[:, 3 * n :], c, h, x)

    def inputs_changed(params, carry, x):
        x = jax.nn.relu(x)
        return step(usual)(params, carry, x * jnp.cumsum(x, 0))

    def split_weights(params, carry, x):
        c, h = carry
        i, f, g, o = (
            x @ a + b + h @ w
            for a, b, w in zip(*(jnp.split(params[k], 4, -1) for k in ("input", "bias", "state")), strict=True)
        )
        return usual(params, i, f, g, o, c, h, x)

    yes, no = True, False
    return {
        "usual": (step(usual), yes),
        "the cell": (but(out=lambda c, h, x, old: (h, c, x, x @ x.T, jnp.ones(3))), yes),
        "nothing": (but(out=lambda *_: None), yes),
        "permuted": (step(lambda p, i, f, g, *a: usual(p, i, g, f, *a)), yes),
        "turned": (but(cell=turned, state=lambda o, c, old: tanh(c) * s(o), out=lambda c, h, x, old: (h, c, x)), yes),
        "swapped": (but(cell=lambda i, f, g, c, h: s(f) * tanh(g) + s(i) * c, out=lambda c, *_: c), yes),
        "slices": (no_split, yes),
        "overlapping": (overlapping, yes),
        "split weights": (split_weights, yes),
        "inputs changed": (inputs_changed, yes),
        "forget bias": (step(lambda p, i, f, *a: usual(p, i, f + 1, *a)), yes),
        "jit inside": (lambda *a: jax.jit(step(usual))(*a), yes),
        "before": (but(out=lambda c, h, x, old: old), no),
        "residual": (but(out=lambda c, h, x, old: h + x.sum()), no),
        "peephole": (step(lambda p, i, f, g, o, c, *a: usual(p, i + 0.1 * c, f, g, o, c, *a)), no),
        "new peephole": (but(state=lambda o, c, old: s(o + 0.1 * c) * tanh(c)), no),
        "layer norm": (step(lambda p, i, f, g, *a: usual(p, i, f, g - g.mean(-1, keepdims=True), *a)), no),
        "relu": (updated_by(jax.nn.relu), no),
        "hard sigmoid": (gates_by(jax.nn.hard_sigmoid), no),
        "tanh gates": (gates_by(tanh), no),
        "sigmoid update": (updated_by(s), no),
        "crossed": (but(carry=lambda c, h: (h, c), out=lambda c, h, x, old: old), no),  # the state as the next cell
        "coupled": (but(cell=lambda i, f, g, c, h: s(f) * c + (1 - s(f)) * tanh(g)), no),
        "old cell": (but(state=lambda o, c, old: s(o) * tanh(old), out=lambda c, h, x, old: old), no),
        "with h": (but(cell=lambda i, f, g, c, h: s(f) * h + s(i) * tanh(g), out=lambda c, h, x, old: old), no),
        "minus": (but(cell=lambda i, f, g, c, h: s(f) * c - s(i) * tanh(g), out=lambda c, *_: c), no),
        "masked": (step(masked), no),
        "scaled": (step(lambda p, i, *a: usual(p, 2 * i, *a)), no),
        "half of h": (step(usual, lambda p, c, h, x: x @ p["input"] + (h * 0.5) @ p["state"]), no),
        "of the cell": (step(usual, lambda p, c, h, x: x @ p["input"] + c @ p["state"]), no),
        "weight of the step": (step(usual, lambda p, c, h, x: x @ p["input"] + h @ (p["state"] * x.mean())), no),
        "reversed columns": (step(usual, lambda p, c, h, x: (x @ p["input"] + h @ p["state"])[:, ::-1]), no),
        "remat inside": (jax.checkpoint(step(usual)), no),
    }


VARIANTS = variants()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", VARIANTS)
def test_almost_an_lstm(name):
    step, by_kernel = VARIANTS[name]
    params, x = made("lstm", 4, 5, 8, 5)

    def total(function, params, x):
        results = function(params, x)
        return sum(jnp.sin(y).sum() for y in jax.tree.leaves(results)), results

    of_lax = functools.partial(run, "lstm", step=step)
    assert is_called(fast_on_cpus(of_lax), params, x) == by_kernel
    ours, laxs = (
        jax.jit(jax.value_and_grad(functools.partial(total, by(of_lax)), (0, 1), has_aux=True))(params, x)
        for by in (fast_on_cpus, lambda f: f)
    )
    close(ours[0][1], laxs[0][1])
    close(ours, laxs, rtol=1e-4)


def gru_variants():
    s, tanh = jax.nn.sigmoid, jnp.tanh

    def step(change):
        def function(params, h, x):
            x = jnp.split(x @ params["input"] + params["bias"], 3, axis=-1)
            q = jnp.split(h @ params["state"], 3, axis=-1)
            h = change(params, h, x, q)
            return h, h

        return function

    def usual(p, h, x, q, bias=None, mixed=lambda r, z, n, h: (1.0 - z) * n + z * h):
        r, z = s(x[0] + q[0]), s(x[1] + q[1])
        n = tanh(x[2] + r * (q[2] + p["state_bias"] if bias is None else q[2] + bias))
        return mixed(r, z, n, h)

    def by(mixed):
        return step(functools.partial(usual, mixed=mixed))

    def before_product(params, h, x):
        x = jnp.split(x @ params["input"] + params["bias"], 3, axis=-1)
        wr, wz, wn = jnp.split(params["state"], 3, axis=-1)
        r, z = s(x[0] + h @ wr), s(x[1] + h @ wz)
        h = (1.0 - z) * tanh(x[2] + (r * h) @ wn) + z * h
        return h, h

    return {
        "usual": (step(usual), True),
        "no bias": (step(lambda *a: usual(*a, bias=0.0)), True),
        "permuted": (step(lambda p, h, x, q: usual(p, h, x[::-1], q[1:] + q[:1])), True),
        "bias of the step": (step(lambda p, h, x, q: usual(p, h, x, q, bias=x[0])), False),
        "other share": (by(lambda r, z, n, h: (1.0 - r) * n + z * h), False),
        "exchanged": (by(lambda r, z, n, h: z * n + (1.0 - z) * h), False),
        "two": (by(lambda r, z, n, h: (2.0 - z) * n + z * h), False),
        "reset before the product": (before_product, False),
        "difference": (by(lambda r, z, n, h: n + z * (h - n)), False),
    }


GRU_VARIANTS = gru_variants()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", GRU_VARIANTS)
def test_almost_a_gru(name):
    step, by_kernel = GRU_VARIANTS[name]
    params, x = made("gru", 4, 5, 8, 5)
    of_lax = functools.partial(loss, "gru", step=step)
    assert is_called(fast_on_cpus(of_lax), params, x) == by_kernel
    ours, laxs = (jax.jit(jax.value_and_grad(f, (0, 1))) for f in (fast_on_cpus(of_lax), of_lax))
    close(ours(params, x), laxs(params, x), rtol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "by_kernel"), [({"reverse": True}, False), ({"unroll": 3}, True), ({"unroll": True}, True)]
)
def test_options_of_scan(options, by_kernel):
    params, x = made("lstm")
    of_lax = functools.partial(loss, "lstm", **options)
    assert ("jaxpar_cpu." in text(fast_on_cpus(of_lax), params, x)) == by_kernel
    close(jax.jit(fast_on_cpus(of_lax))(params, x), jax.jit(of_lax)(params, x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(["rbg", "threefry2x32", "unsafe_rbg"], "rbg"))
def test_a_cell_that_draws_random_numbers_draws_the_same(kind):
    """Keys of `rbg` give other numbers when all steps draw at once."""
    params, x = made("lstm")
    keys = jax.random.split(jax.random.key(0, impl=kind), len(x))

    def loop(params, x, keys):
        def step(carry, given):
            x, key = given
            return lstm_cell(params, carry, x * jax.random.bernoulli(key, 0.5, x.shape))

        return lax.scan(step, (params["c"], params["h"]), (x, keys))

    fast = fast_on_cpus(loop)
    assert not is_called(fast, params, x, keys)
    found, right = jax.jit(fast)(params, x, keys), jax.jit(loop)(params, x, keys)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, right)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_few_steps(cell, steps):
    params, x = made(cell, steps)
    of_lax = functools.partial(run, cell)
    close(jax.jit(fast_on_cpus(of_lax))(params, x), jax.jit(of_lax)(params, x))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_any_number_of_batch_axes(cell, shape):
    params, x = made(cell, 4, 6)
    cut = lambda a: a[..., : int(np.prod(shape)), :].reshape(*a.shape[:-2], *shape, a.shape[-1])  # noqa: E731
    params, x = {**params, **{k: cut(params[k]) for k in "ch" if k in params}}, cut(x)
    of_lax = functools.partial(loss, cell)
    assert is_called(fast_on_cpus(of_lax), params, x)
    ours, laxs = (jax.jit(jax.value_and_grad(f, (0, 1))) for f in (fast_on_cpus(of_lax), of_lax))
    close(ours(params, x), laxs(params, x), rtol=1e-4)


@pytest.mark.slow
def test_a_loop_without_inputs_and_a_carried_number():
    params, x = made("lstm", 4, 5, 8, 5)

    def without(params, x):
        start = params["c"], params["h"]
        return lax.scan(lambda carry, _: lstm_cell(params, carry, x[0]), start, None, length=5)

    def counted(params, x):
        def step(carry, x):
            state, y = lstm_cell(params, carry[0], x)
            return (state, carry[1] + 1), (y, carry[1])

        return lax.scan(step, ((params["c"], params["h"]), 0), x)

    for of_lax, by_kernel in ((without, True), (counted, False)):
        assert is_called(fast_on_cpus(of_lax), params, x) == by_kernel
        close(jax.jit(fast_on_cpus(of_lax))(params, x), jax.jit(of_lax)(params, x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", mostly_slow([np.nan, np.inf, -np.inf], np.nan), ids=str)
@pytest.mark.parametrize("where", ["input", "state", "h", "c", "x"])
def test_what_is_not_finite_is_where_lax_has_it(cell, where, value):
    params, x = made(cell, 3, 4, 9, 5)
    bad = x if where == "x" else params.get(where, params["bias"])
    bad[(..., 2, *([3] * (bad.ndim > 1)))] = value
    found = [
        jax.jit(jax.value_and_grad(by(functools.partial(loss, cell)), (0, 1))) for by in (fast_on_cpus, lambda f: f)
    ]
    states = [jax.jit(by(functools.partial(run, cell))) for by in (fast_on_cpus, lambda f: f)]
    for fns in (found, states):
        for ours, laxs in zip(*(jax.tree.leaves(f(params, x)) for f in fns), strict=True):
            reference.same_where_not_finite(ours, laxs)


def test_large_and_small_values_are_those_of_lax():
    x = np.concatenate([np.linspace(-120, 120, 4001), np.logspace(-40, 0, 500), -np.logspace(-40, 0, 500)])
    x = np.float32(x)[:, None] * np.ones(4, np.float32)  # width 1: all gates see x
    zero = jnp.zeros((len(x), 1))

    def cell(carry, x):
        c, h = carry
        i, f, g, o = jnp.split(x + h @ jnp.zeros((1, 4)), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (c, jax.nn.sigmoid(o) * jnp.tanh(c)), (c,)

    of_lax = lambda x: lax.scan(cell, (zero, zero), jnp.stack([x, x]))  # noqa: E731
    assert is_called(fast_on_cpus(of_lax), x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-37),
        jax.jit(fast_on_cpus(of_lax))(x), jax.jit(of_lax)(x),
    )  # fmt: skip


FLAX = [{}, {"time_major": True}, {"reverse": True, "keep_order": True}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LSTMCell", "OptimizedLSTMCell", "GRUCell"])
@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("options", mostly_slow(FLAX, {}))
def test_cells_of_flax(library, name, options):
    pytest.importorskip("flax", reason="flax is not installed")
    from flax import linen, nnx

    x = normal(3, 5, 4)
    if library == "linen":
        model = linen.RNN(getattr(linen, name)(6), **options)
        params, apply = model.init(jax.random.key(0), x), model.apply
    else:
        graph, params = nnx.split(nnx.RNN(getattr(nnx, name)(4, 6, rngs=nnx.Rngs(0)), **options))

        def apply(params, x):
            return nnx.merge(graph, params)(x)

    def gradient(by):
        return jax.value_and_grad(lambda params, x: jnp.sin(by(apply)(params, x)).sum(), (0, 1), allow_int=True)

    params = jax.tree.map(lambda a: a + 0.1 if jnp.issubdtype(a.dtype, jnp.floating) else a, params)
    assert is_called(fast_on_cpus(apply), params, x)
    ours, laxs = (jax.jit(gradient(by))(params, x) for by in (fast_on_cpus, lambda f: f))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(laxs), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            close(a, b)


@pytest.mark.slow
def test_flax_with_lengths_and_other_activations():
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    x, lengths = normal(3, 5, 4), jnp.array([5, 2, 3])
    model = linen.RNN(linen.OptimizedLSTMCell(6), return_carry=True)
    params = model.init(jax.random.key(0), x)
    apply = functools.partial(model.apply, seq_lengths=lengths)
    assert is_called(fast_on_cpus(apply), params, x)
    close(jax.jit(fast_on_cpus(apply))(params, x), jax.jit(apply)(params, x))
    other = linen.RNN(linen.LSTMCell(6, activation_fn=jax.nn.relu))
    params = other.init(jax.random.key(0), x)
    assert not is_called(fast_on_cpus(other.apply), params, x)


# The kernels alone: the bits of XLA's products depend on its threads.
BITS = """
import hashlib
import jax, numpy as np
from jaxpar._cpu import recurrent
rng = np.random.default_rng(0)
for cell, gates in (("lstm", 4), ("gru", 3)):
    shapes = [(9, 37, gates * 70), (70, gates * 70), (37, 70), (37, 70)]
    args = [rng.standard_normal(shape, np.float32) / 4 for shape in shapes]
    total = lambda *args: sum((y**2).sum() for y in recurrent.loop(cell, *args))
    step = jax.jit(lambda *args: (recurrent.loop(cell, *args), jax.grad(total, (0, 1, 2, 3))(*args)))
    for device in jax.devices():
        for _ in range(3):
            found = step(*jax.device_put(args, device))
            print(cell, hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(found))).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "devices"), reference.ELSEWHERE, ids=["devices", "threads"])
def test_the_same_bits_on_any_number_of_threads_and_devices(begin, devices):
    one = digests(BITS, "1")
    assert len(one) == len(CELLS)
    assert digests(begin + BITS, devices) == one


def test_an_example_has_the_same_bits_in_any_batch(cell):
    params, x = made(cell, 5, 37, 60, 5)
    few = {**params, **{k: params[k][11:14] for k in "ch" if k in params}}
    states = jax.jit(lambda p, x: fast_on_cpus(functools.partial(run, cell))(p, x)[0])
    # The products with the inputs are XLA's: zeros, so that these are the same.
    same(states(few, 0 * x[:, 11:14]), states(params, 0 * x)[:, 11:14])


@pytest.mark.slow
def test_eight_devices_with_collectives_do_not_hang():
    params, x = made("lstm", 4, 16, 40, 5)
    mesh = Mesh(jax.devices()[:8], "i")
    states = {name: params.pop(name) for name in "ch"}

    def local(params, states, x):
        return lax.pmean(jax.grad(fast_on_cpus(lambda p: loss("lstm", {**p, **states}, x)))(params), "i")

    specs = (P(), P("i"), P(None, "i"))
    whole = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    reference.check_it_does_not_hang(whole, params, states, x)
