"""Any function that JAX can trace: the gradients of gradients, loops, branches and places that are computed."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from viz_models import Spec, f32, i32, xla_flops
from viz_programs import PARAMS, X, faults_of, program

from jaxpar import viz


def u(p, x):
    return (jnp.tanh(x @ p["a"]) @ p["b"])[0]


def gradient_of_a_squared_gradient(p, x):
    return jax.grad(lambda p: jnp.sum(jax.grad(u, 1)(p, x) ** 2))(p)


def gradient_penalty(p, x):
    return jax.grad(lambda p: u(p, x) + 10 * (jnp.linalg.norm(jax.grad(u, 1)(p, x / 2)) - 1) ** 2)(p)


def inner_steps(p, x):
    def step(p):
        g = jax.grad(lambda p: u(p, x) ** 2)(p)
        return {name: p[name] - 0.1 * g[name] for name in p}

    return jax.grad(lambda p: u(step(step(p)), 2 * x) ** 2)(p)


@pytest.mark.parametrize("fn", [gradient_of_a_squared_gradient, gradient_penalty, inner_steps])
def test_gradients_of_gradients(fn):
    assert faults_of(fn, PARAMS, X) == []


def ways(fn, *args, **options):
    """The edges of a graph with those of its params."""
    graph = viz.trace(fn, *args, **options)
    return {(edge.source, edge.target) for edge in (*graph.edges, *graph.weight_edges)}


W, V = Spec((4, 4), f32), Spec((4,), f32)


def test_a_computed_place_in_a_param_is_a_dependency():
    """It was part of the param: the index did not reach the picture."""
    assert ways(lambda w, i: w[i] * 2, W, Spec((), i32)) == {("i", "dynamic_slice0"), ("w", "dynamic_slice0")}
    graph = viz.trace(lambda w, x: w[jnp.argmax(x)] * 2, W, V)
    assert graph.layers[0].op == "argmax"


def test_a_place_that_a_loop_counts_is_part_of_the_param():
    graph = viz.trace(lambda w, x: lax.fori_loop(0, 4, lambda i, c: jnp.tanh(c * w[i]), x), W, V)
    assert [node.op for node in graph.layers] == ["mul", "Activation"]


@pytest.mark.parametrize(("first", "step"), [(0, lambda i, c: c + i), (1, lambda i, c: c * i)])
def test_a_counter_is_not_the_number_that_it_begins_with(first, step):
    """`c + i` was left out, since i begins with 0."""
    graph = viz.trace(lambda w, x: lax.fori_loop(first, first + 5, step, x @ w), W, V)
    assert graph.total_flops == 2 * 16 + 5 * (4 + 1)  # and a conversion


def test_a_number_that_a_while_loop_carries_is_a_dependency():
    def fn(p, x, y):
        def body(carry):
            x, scale, count = carry
            return x * scale, scale + y[0], count + 1

        return lax.while_loop(lambda carry: carry[2] < 4, body, (x, p[0], 0))[0]

    assert ("y", "body0") in ways(fn, V, V, V, params_argnums=None)


def test_what_no_later_pass_needs_costs_nothing():
    def passes(hands_on):
        def body(carry, _):
            x, _ = carry
            return (jnp.tanh(x), x @ hands_on), None

        return lambda w, x: lax.scan(body, (x, x), None, length=3)[0][0]

    graph = viz.trace(lambda w, x: passes(w)(w, x), W, V)
    assert (graph.total_flops, graph.total_params) == (0, 0)


def test_of_a_branch_only_the_results_that_are_needed_cost():
    def fn(w, x, flag):
        return lax.cond(flag, lambda: (x @ w, x + 1), lambda: (x @ (w * 2), x + 2))[1]

    graph = viz.trace(fn, W, V, Spec((), jnp.bool_))
    assert (graph.total_flops, graph.total_params) == (1 + 2 * 4, 0)  # the flag becomes a number


CHOICES = {
    "a branch under vmap": lambda w, x: jax.vmap(lambda x: lax.cond(x[0] > 0, lambda: x @ w, lambda: x * 2))(x[None]),
    "equal cases": lambda w, x: lax.select_n(jnp.argmax(x), x, x * 0, x + 1, x + 1, lax.stop_gradient(x), x),
    "equal numbers": lambda w, x: lax.select_n(jnp.argmax(x), x, *[jnp.zeros(4)] * 3) + w[0],
    "an array and its transpose": lambda w, x: lax.select_n(w > 0, w, w.T),
}


CONSTANTS = {
    "what a loop begins with": lambda w, x: lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c + x[None], jnp.eye(4)),
    "the second result": lambda w, x: x * lax.sort((jnp.arange(4.0), jnp.arange(4.0)), num_keys=1)[1],
    "an index": lambda w, x: w[jnp.array([-1, 2])[jnp.arange(2) - 1]],
    "a rounded number": lambda w, x: lax.reduce_precision(jnp.ones(4), 8, 7) * x,
    "a case that is never picked": lambda w, x: lax.select(jnp.ones(4) > 0, x * 3, x @ (w * 2)),
    "what a place in a param costs": lambda w, x: w[jnp.argmax(jnp.sort(jnp.ones(4)))] * x,
    "a number behind a barrier": lambda w, x: lax.optimization_barrier((jnp.ones(4), x))[0] * x,
}


@pytest.mark.parametrize("fn", (CHOICES | CONSTANTS).values(), ids=CHOICES | CONSTANTS)
def test_equal_choices_cost_nothing_and_constants_cost_once(fn):
    assert viz.trace(fn, W, V).total_flops == xla_flops(fn, W, V)


def one_pass_reads_zeros(w, x):
    return lax.scan(lambda carry, zero: (carry + zero, None), x, jnp.zeros(3))[0]


def a_loop_ends_with_zeros(w, x):
    return x + lax.scan(lambda carry, _: (jnp.zeros(4), carry), x, None, length=2)[0]


@pytest.mark.parametrize(("fn", "flops"), [(one_pass_reads_zeros, 3 * 4), (a_loop_ends_with_zeros, 4)])
def test_numbers_that_go_through_a_loop_are_not_known(fn, flops):
    """XLA counts such an addition. It was left out."""
    assert viz.trace(fn, W, V).total_flops == flops
    assert xla_flops(fn, W, V) >= 4  # of one pass, and of what counts the passes


def test_a_number_that_goes_into_or_out_of_a_map_over_devices_is_not_known():
    """XLA counts the product with it. It was left out."""
    mesh = Mesh(jax.devices()[:2], ("data",))

    def fn(p, x):
        ones = jnp.ones_like(p["a"])
        specs = {"in_specs": (P(), P()), "out_specs": (P(), P())}
        inside, one = jax.shard_map(lambda x, one: (x * one, one), mesh=mesh, **specs)(p["a"], ones)
        return inside * one + p["b"] * ones

    assert faults_of(fn, PARAMS, X) == []
    assert viz.trace(fn, PARAMS, X).total_flops == 3 * 16**2


def test_a_choice_between_an_array_and_itself_under_another_name_costs_nothing():
    """A loop has names of its own for what it is given."""

    def fn(p, x):
        w, same = p["a"], lax.stop_gradient(p["a"])
        return lax.scan(lambda c, _: (jnp.sin(lax.select_n(c > 0, w, same) * c), None), p["b"], None, length=3)[0]

    assert faults_of(fn, PARAMS, X) == []
    assert viz.trace(fn, PARAMS, X).total_flops == 3 * 16**2  # the products


def test_what_two_passes_carry_is_not_the_same_array():
    """Both begin as the same one."""

    def fn(p, x):
        def body(carry, _):
            first, second = carry
            return (jnp.sin(lax.select_n(first > 0, first, second)), jnp.cos(first)), None

        return lax.scan(body, (p["a"], p["a"]), None, length=3)[0][0]

    assert faults_of(fn, PARAMS, X) == []
    assert viz.trace(fn, PARAMS, X).total_flops == 3 * (16**2 + 16**2)


def test_a_mask_that_only_gradients_read_counts():
    def fn(x):
        return jax.jacrev(lambda x: jnp.square(x) * 3)(x)

    assert viz.trace(fn, V).total_flops == xla_flops(fn, V)


def test_the_casts_of_a_gradient_count():
    def fn(w, x):
        return jax.grad(lambda w: jnp.sum(x @ w.astype(jnp.bfloat16).astype(f32) * x))(w)

    assert viz.trace(fn, W, V).total_flops == 2 * 16 + 16 + 16


@pytest.mark.slow
def test_layers_that_are_closed_stand_after_what_they_read():
    fn, _ = program(153)
    for most in (200, 40, 8):
        graph = viz.trace(fn, PARAMS, X, max_nodes=most)
        place = {node.name: at for at, node in enumerate(graph.nodes)}
        assert all(edge.carry or place[edge.source] < place[edge.target] for edge in graph.edges)


def test_params_that_only_other_layers_than_the_differentiated_ones_read_are_params():
    """They were taken for the state of an optimizer."""

    def fn(p, x):
        return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["a"])))(x) @ p["b"]

    assert faults_of(fn, PARAMS, X) == []
    assert viz.trace(fn, PARAMS, X).total_params == 2 * 16**2


def test_a_param_that_only_later_passes_of_a_loop_read_is_a_param():
    """It was taken for the state of an optimizer: its gradient is zeros, and no gradient reads what reads it first."""

    def fn(p, x):
        def body(carry):
            y, scale, count = carry
            return y * scale, scale + (x @ p["a"])[0], count + 1

        def loss(p, x):
            y, _, _ = lax.while_loop(lambda carry: carry[2] < 4, body, (x, 1.0, 0))
            return jnp.sum((y @ p["b"]) ** 2)

        return jax.grad(loss)({**p, "a": lax.stop_gradient(p["a"])}, x)

    graph = viz.trace(fn, PARAMS, X)
    assert graph.total_params == 2 * 16**2
    assert graph.sizes.optimizer == 0


def test_an_array_out_of_a_loop_is_that_of_all_passes():
    def fn(w, x):
        _, ys = lax.scan(lambda c, _: (jnp.tanh(c @ w), jnp.sin(c)), x, None, length=20)
        return ys @ w

    def shapes(fn, *args):
        return {(edge.source, edge.target): edge.shape for edge in viz.trace(fn, *args).edges}

    x = Spec((3, 4), f32)
    assert shapes(fn, W, x)["sin0", "fullyconnected1"] == (20, 3, 4)
    # What another loop reads of it pass by pass is what a pass made.
    twice = shapes(lambda w, x: lax.scan(lambda c, y: (c + jnp.cos(y @ w), None), x, fn(w, x))[0], W, x)
    assert twice["sin0", "fullyconnected1"] == (20, 3, 4)
    mapped = shapes(lambda w, xs: lax.map(jnp.tanh, lax.map(jnp.sin, xs)) @ w, W, Spec((5, 4), f32))
    assert mapped["sin0", "tanh0"] == (4,)
    assert mapped["tanh0", "fullyconnected0"] == (5, 4)


def test_what_jax_casts_before_it_returns_has_the_dtype_of_the_result():
    graph = viz.trace(lambda w, i: jax.nn.one_hot(i, 4) * w[None], V, Spec((5,), i32))
    assert (graph.layers[0].dtype, graph.edges[-1].dtype) == ("float32", "float32")


def test_what_each_copy_of_a_block_hands_on_to_its_next_pass_is_one_array():
    def fn(layers, x):
        def body(states, _):
            y, new = x, []
            for layer, state in zip(layers, states, strict=True):
                y = jnp.tanh(y @ layer["a"] + state @ layer["c"])
                new.append(y)
            return new, y

        return lax.scan(body, [x] * 6, None, length=3)[1]

    graph = viz.trace(fn, [{"a": W, "c": W}] * 6, V)
    assert [edge.arrays for edge in graph.edges if edge.carry] == [1]


def test_what_gradients_read_is_kept_whatever_is_closed():
    """A box of layers and gradients counted what only its own gradients read, or nothing."""
    fn, _ = program(27)
    kept = [sum(node.kept_bytes for node in viz.trace(fn, PARAMS, X, max_nodes=most).nodes) for most in (None, 40, 15)]
    assert kept[0] == kept[1] == kept[2] > 0


ADAPTER = {"q": {"w": Spec((4, 6), f32), "a": Spec((4, 2), f32), "b": Spec((2, 6), f32)}}
NORMALIZED = {"v": Spec((4, 6), f32), "g": Spec((6,), f32)}
COMPLEX = {"re": Spec((4, 6), f32), "im": Spec((4, 6), f32)}
KERNEL = {"conv": {"kernel": Spec((3, 3, 3, 8), f32)}}


def standardized(p, x):
    k = p["conv"]["kernel"]
    k = (k - k.mean((0, 1, 2), keepdims=True)) / (k.std((0, 1, 2), keepdims=True) + 1e-5)
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


MADE = {
    "an adapter": (lambda p, x: x @ (p["q"]["w"] + p["q"]["a"] @ p["q"]["b"]), ADAPTER, "q"),
    "a normalized weight": (lambda p, x: x @ (p["v"] / jnp.linalg.norm(p["v"]) * p["g"][None]), NORMALIZED, "v"),
    "a complex weight": (lambda p, x: x @ lax.complex(p["re"], p["im"]), COMPLEX, "re"),
    "a standardized kernel": (standardized, KERNEL, "conv"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_params_alone_is_a_param(name):
    fn, p, layer = MADE[name]
    graph = viz.trace(fn, p, Spec((2, 5, 5, 3), f32) if p is KERNEL else Spec((3, 4), f32))
    assert [(node.name, node.kind in ("FullyConnected", "Convolution")) for node in graph.layers] == [(layer, True)]
    assert graph.total_params == sum(leaf.size for leaf in jax.tree.leaves(p))


def test_layers_of_a_constant_are_no_bias():
    """The two layers of a time that is fixed vanished in the bias of the one that they are added to."""

    def fn(p, x):
        time = jnp.tanh(jnp.sin(jnp.arange(16.0)) @ p["a"]) @ p["b"]
        return jnp.tanh(x @ p["c"] + time)

    graph = viz.trace(fn, {**PARAMS, "c": PARAMS["a"]}, X)
    assert [node.op for node in graph.layers].count("FullyConnected") == 3


def test_what_is_made_of_gradients_is_no_param():
    def fn(p, x):
        attack = jnp.sign(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["a"])))(x)) * p["b"][0]
        return attack @ p["a"]

    layers = [node.op for node in viz.trace(fn, PARAMS, X).layers]
    assert layers[-1] == "FullyConnected"
    assert "mul" in layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(90), 278, 393, 851, 1124, 1195, 1509, 1616, 2061, 9130, 30041, 30219, 90116, 131986]
)
def test_random_programs(seed):
    """Two thousand of them before a release: `python tests/viz_programs.py`.

    278: a cast that only a gradient reads. 393: what is never picked. 851: the place of a part of a param. 1195: zeros
    through a loop. 1509, 1616: circles over the last pass of a loop. 1124: a gradient of what a loop hands on. 2061:
    the order behind a repeat. 131986: a loop inside of a loop.
    """
    fn, made = program(seed)
    try:
        jax.eval_shape(fn, PARAMS, X)
    except (ValueError, NotImplementedError) as error:
        pytest.skip(f"jax does not differentiate it: {error}")
    assert faults_of(fn, PARAMS, X) == [], made


@pytest.mark.parametrize("seed", [130132, 130147, 130153, 131295, 131603])
def test_programs_that_were_wrong(seed):
    """130132: what a stack of constants becomes. 130147: parts of a number, which XLA folds. 130153, 131603: casts that
    only a gradient reads, or nothing. 131295: a mean over devices between the gradients of two blocks."""
    fn, made = program(seed)
    assert faults_of(fn, PARAMS, X) == [], made


def test_a_loop_inside_of_a_loop_begins_with_what_the_pass_before_handed_on():
    def fn(p, x):
        def outer(carry, _):
            first, second = carry
            inner, _ = lax.scan(lambda c, _: (jnp.tanh(c @ p["a"]), None), second, None, length=2)
            return (inner, first @ p["b"]), None

        return lax.scan(outer, (x, jnp.cos(x)), None, length=3)[0][0]

    assert faults_of(fn, PARAMS, X) == []
    back = {(edge.source, edge.target) for edge in viz.trace(fn, PARAMS, X, repeats=False).edges if edge.carry}
    assert back == {("tanh0", "fullyconnected0"), ("tanh0", "a"), ("fullyconnected0", "a")}


def test_the_cast_of_a_param_that_remat_makes_again_counts():
    """Only the gradient reads it: a dense layer computes nothing again but this."""

    @jax.checkpoint
    def layer(w, x):
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(f32)

    def fn(w, x):
        return jax.grad(lambda w, x: jnp.sum(layer(w, x) ** 2), (0, 1))(w, x)

    assert faults_of(lambda p, x: fn(p["a"], x), PARAMS, X) == []
