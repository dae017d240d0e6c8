"""What jaxpar.viz makes of functions: nodes, edges, shapes, parameters and costs."""

import cProfile
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
import viz_models as m
from jax.sharding import PartitionSpec as P
from kv_model import on_mesh
from viz_models import xla_flops

from jaxpar import train, viz
from jaxpar.models import lenet, matrix_factorization
from jaxpar.viz import Call, Fold, Rule
from jaxpar.viz._fold import backward
from jaxpar.viz._scopes import Scope


def ops(graph):
    return [node.op for node in graph.layers]


def check(graph):
    """Names are unique, edges end at nodes, and the order of the nodes is one in which they can be computed."""
    names = [node.name for node in graph.nodes]
    assert len(set(names)) == len(names)
    place = {name: number for number, name in enumerate(names)}
    assert all(place[edge.source] < place[edge.target] or edge.carry for edge in graph.edges)
    assert sum(node.params for node in graph.nodes) == graph.total_params
    return graph


def test_lenet_is_the_layers_of_mxnets_plot():
    graph = check(viz.trace(lenet.apply, m.LENET, m.IMAGES))
    expected = [
        ("conv1", "Convolution", "3x3/1, 20", (256, 26, 26, 20), 200),
        ("relu0", "Activation", "relu", (256, 26, 26, 20), 0),
        ("pooling0", "Pooling", "avg, 2x2/2x2", (256, 13, 13, 20), 0),
        ("conv2", "Convolution", "5x5/1, 50", (256, 9, 9, 50), 25050),
        ("relu1", "Activation", "relu", (256, 9, 9, 50), 0),
        ("pooling1", "Pooling", "avg, 2x2/2x2", (256, 4, 4, 50), 0),
        ("flatten0", "Flatten", "", (256, 800), 0),
        ("dense1", "FullyConnected", "128", (256, 128), 102528),
        ("relu2", "Activation", "relu", (256, 128), 0),
        ("dense2", "FullyConnected", "10", (256, 10), 1290),
    ]
    assert [(n.name, n.op, n.detail, n.shape, n.params) for n in graph.layers] == expected
    names = ["images", *(row[0] for row in expected)]
    assert [(edge.source, edge.target) for edge in graph.edges] == list(itertools.pairwise(names))
    assert [edge.shape for edge in graph.edges] == [(256, 28, 28, 1), *(row[3] for row in expected[:-1])]
    assert graph.total_params == 129_068
    assert {node.dtype for node in graph.nodes} == {"float32"}
    assert graph["conv1"].weights == ("params['conv1']['weight']", "params['conv1']['bias']")
    assert graph["conv1"].source.startswith("models/lenet.py:")
    assert graph["dense2"].outputs == ("output",)
    assert len(graph.weights) == 8


def test_equations_are_those_of_the_jaxpr():
    fn = lambda w, x: jax.lax.sin(x @ w) - 1.0  # noqa: E731
    args = m.Spec((4, 4), m.f32), m.Spec((2, 4), m.f32)
    assert viz.trace(fn, *args).equations == len(jax.make_jaxpr(fn)(*args).eqns) == 3


def test_matrix_factorization_with_its_loss():
    params, user, item = m.factorization()
    assert ops(viz.trace(matrix_factorization.apply, params, user, item)) == ["Embedding", "Embedding", "mul", "sum"]
    graph = check(viz.trace(m.factorization_loss, params, user, item, m.Spec((32,), m.f32)))
    assert ops(graph) == ["Embedding", "Embedding", "mul", "sum", "Loss"]
    assert [node.name for node in graph.inputs] == ["user", "item", "score"]
    assert graph.layers[-1].shape == ()
    assert [node.detail for node in graph.layers] == ["943x64", "1682x64", "", "", "squared error"]
    assert [node.params for node in graph.layers] == [943 * 64, 1682 * 64, 0, 0, 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gradient", "factorization", "transformer", "transformer gradient", "haiku"])
def test_flops_agree_with_xla(name):
    """Nearly: XLA counts before it folds masks, scales, indices and choices by a constant, which are not counted."""
    fn, args = m.network(name)
    assert m.traced(name).total_flops == pytest.approx(xla_flops(fn, *args), rel=4e-4)


def test_flops_of_lenet_are_exactly_those_of_xla():
    assert viz.trace(lenet.apply, m.LENET, m.IMAGES).total_flops == xla_flops(lenet.apply, m.LENET, m.IMAGES)


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(2, 1), (0, 3)]])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_flops_of_any_convolution(padding, stride, dilation):
    def conv(w, x):
        options = {"rhs_dilation": (dilation, 1), "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        return jax.lax.conv_general_dilated(x, w, (stride, 1), padding, **options)

    args = m.Spec((3, 3, 4, 6), m.f32), m.Spec((2, 14, 11, 4), m.f32)
    grad = jax.grad(lambda w, x: conv(w, x).sum(), argnums=(0, 1))
    assert viz.trace(conv, *args).total_flops == xla_flops(conv, *args)
    assert viz.trace(grad, *args).total_flops == pytest.approx(xla_flops(grad, *args), rel=0.05)


@pytest.mark.parametrize("differentiate", [jax.grad, jax.value_and_grad])
def test_a_gradient_is_the_forward_layers_with_one_backward_node_each(differentiate):
    forward = viz.trace(m.lenet_loss, m.LENET, m.IMAGES, m.LABELS)
    graph = check(viz.trace(differentiate(m.lenet_loss), m.LENET, m.IMAGES, m.LABELS))
    layers = [node for node in graph.layers if not node.is_backward]
    backward = [node for node in graph.layers if node.is_backward]
    assert [(n.name, n.op) for n in layers] == [(n.name, n.op) for n in forward.layers]
    assert sorted(n.name for n in backward) == sorted(f"{n.name} (backward)" for n in layers)
    assert {n.name: n.op for n in backward} == {f"{n.name} (backward)": f"{n.op} (backward)" for n in layers}
    assert graph.total_params == 129_068
    assert len(graph["conv1 (backward)"].outputs) == 2


def test_a_transformer_is_one_block_times_twelve():
    graph = check(m.traced("transformer"))
    assert len(graph.nodes) <= 22
    assert graph.scopes == ((("blocks ×12",), 12),)
    inside = [node for node in graph.layers if node.scope[:1] == ("blocks ×12",)]
    assert {node.repeat for node in inside} == {12}
    assert ops(graph).count("LayerNorm") == 3
    assert ops(graph).count("Attention") == 1
    full = check(viz.trace(m.transformer, m.transformer_params(12), m.TOKENS, repeats=False))
    assert len(full.layers) == 12 * len(inside) + len(graph.layers) - len(inside)
    assert (full.total_params, full.total_flops) == (graph.total_params, graph.total_flops)
    leaves = jax.tree.leaves(m.transformer_params(12))
    assert graph.total_params == sum(leaf.size for leaf in leaves)  # the table is used twice, and counted once


def test_the_gradient_of_a_transformer_repeats_too():
    graph = check(m.traced("transformer gradient"))
    assert len(graph.nodes) <= 44
    assert graph.scopes == ((("blocks ×12",), 12),)
    layers = {node.name for node in graph.layers if not node.is_backward and node.op != "add"}
    assert {f"{name} (backward)" for name in layers} <= {node.name for node in graph.nodes}


def test_a_scan_over_layers_is_a_cluster_whose_costs_are_those_of_all_layers():
    graph = check(m.traced("scan"))
    inside = [node for node in graph.layers if node.scope[:1] == ("scan ×12",)]
    unrolled = m.traced("transformer")
    assert graph["q"].flops == unrolled["q"].flops
    assert graph["q"].params == unrolled["q"].params == 12 * 64 * 64
    assert len(inside) == sum(node.repeat == 12 for node in unrolled.layers)


@pytest.mark.parametrize("build", [m.flax_transformer, m.haiku_transformer])  # Equinox: test_viz_names.py
def test_transformers_of_the_libraries(build):
    fn, args = build(3)
    graph = check(viz.trace(fn, *args))
    block = ["LayerNorm", *["FullyConnected"] * 3, "Attention", "FullyConnected", "add"]
    block += ["LayerNorm", "FullyConnected", "Activation", "FullyConnected", "add"]
    head = ["FullyConnected"] * (build is m.flax_transformer)
    assert [op for op in ops(graph) if op != "Flatten"] == [*block, *head]
    assert [node.detail for node in graph.layers if node.op == "Activation"] == ["gelu"]
    assert any(count == 3 for _, count in graph.scopes)
    assert len(graph.nodes) <= 18
    assert any("ttention" in part for node in graph.layers for part in node.scope)
    assert graph.total_params == sum(leaf.size for leaf in jax.tree.leaves(args[0]))


@pytest.mark.slow
def test_resnet50_of_nnx():
    fn, args = m.network("resnet")
    graph = check(m.traced("resnet"))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in args[:2]]
    assert [graph.total_params, graph.total_state] == sizes
    count = {op: sum(node.repeat for node in graph.layers if node.op == op) for op in set(ops(graph))}
    assert (count["Convolution"], count["BatchNorm"], count["Activation"], count["add"]) == (53, 53, 49, 16)
    assert (count["Pooling"], count["FullyConnected"], count["mean"]) == (1, 1, 1)
    assert sorted(times for _, times in graph.scopes) == [2, 2, 3, 5]
    closed = viz.trace(fn, *args, depth=0)
    assert [node.op for node in closed.layers[4:8]] == [f"layer{n}" for n in (1, 2, 3, 4)]
    assert len(closed.layers) == 10
    assert closed.total_flops == graph.total_flops


@pytest.mark.parametrize("build", [m.pmap_step, m.shard_map_step])
def test_a_training_step_shows_what_it_sends(build):
    step, args = build()
    graph = check(viz.trace(step, *args))
    (psum,) = [node for node in graph.layers if node.op == "psum"]
    assert psum.detail == "over data ×8, 516 kB"
    assert len([node for node in graph.layers if node.is_backward]) == 11
    assert graph.total_params == 129_068
    scope = ("pmap data=4",) if build is m.pmap_step else ("local", "shard_map data=4")
    assert {node.scope for node in graph.layers} == {scope}
    assert graph["conv1"].shape == (64, 26, 26, 20)  # one device's share


@pytest.mark.sampled(1)
def test_the_training_step_of_this_package(engine):
    def loss(params, batch, rng):
        return m.lenet_loss(params, batch["image"], batch["label"]), {}

    params, where = lenet.init(jax.random.key(0)), {"engine": engine, "devices": jax.devices()[:4]}
    state, step = train.start(params, optax.sgd(0.1), loss, **where)
    graph = check(viz.trace(step, state, {"image": m.IMAGES, "label": m.LABELS}))
    assert any(node.op == "psum" and node.detail.endswith("516 kB") for node in graph.layers)
    forward = viz.trace(m.lenet_loss, m.LENET, m.IMAGES, m.LABELS)
    assert sorted(node.kind for node in graph.layers if node.is_backward) == sorted(ops(forward))
    assert graph.total_params == 129_068
    assert len(graph.nodes) <= 36


def test_other_collectives_stand_out():
    def local(x):
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        return jax.lax.psum_scatter(gathered, "data", tiled=True)

    graph = viz.trace(on_mesh(local, jax.devices()[:4], P("data"), P("data")), m.Spec((32, 4), m.f32))
    sent = [(n.op, n.detail) for n in graph.layers]
    assert sent == [("all_gather", "over data, 128 B"), ("reduce_scatter", "over data, 512 B")]


@pytest.mark.parametrize(("dtype", "sent"), [(jnp.bfloat16, "64 B"), (jnp.int8, "32 B"), (jnp.float32, "128 B")])
def test_a_collective_counts_what_it_sends_not_what_was_converted(dtype, sent):
    fn = on_mesh(lambda x: jax.lax.psum(x.astype(dtype), "data"), jax.devices()[:4], P("data"))
    (psum,) = viz.trace(fn, m.Spec((32, 4), m.f32)).layers
    assert (psum.op, psum.detail) == ("psum", f"over data, {sent}")


def test_loops_branches_and_custom_gradients_are_clusters():
    @jax.custom_vjp
    def custom(x):
        return jnp.sin(x) * x

    custom.defvjp(lambda x: (custom(x), x), lambda x, g: (g * jnp.cos(x),))
    x = m.Spec((4, 4), m.f32)

    def scope(fn):
        return {node.scope for node in viz.trace(fn, x).layers}

    assert scope(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.tanh(c) @ c, x)) == {("while",)}
    assert ("cond", "branch 1") in scope(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.tanh, lambda x: x @ x, x))
    assert ("cond: inner", "branch 1") in scope(lambda x: jax.lax.cond(x[0, 0] > 0, _inner, lambda x: x, x))
    choices = [jnp.tanh, _inner, jnp.sin, jnp.cos]
    assert ("cond", "branch 1") in scope(lambda x: jax.lax.switch(x[0, 0].astype(int), choices, x))
    assert ("cond: inner or tanh", "branch 0") in scope(lambda x: jax.lax.switch(x[0, 0].astype(int), choices[:2], x))
    assert ("custom",) in scope(custom) | scope(lambda x: custom(x) @ x)
    nameless = jax.custom_vjp(lambda x: jnp.sin(x) * x)
    nameless.defvjp(lambda x: (nameless(x), x), lambda x, g: (g * jnp.cos(x),))
    assert ("custom_vjp",) in scope(lambda x: nameless(x) @ x)
    assert ("remat",) in scope(jax.grad(lambda x: jax.checkpoint(lambda x: jnp.tanh(x @ x) @ x)(x).sum()))
    assert ("inner",) in scope(lambda x: jax.jit(_inner)(x) @ x)


def _inner(x):
    return jnp.tanh(x) @ x


_inner.__name__ = "inner"


def test_a_function_that_is_inlined_is_no_cluster():
    inlined = jax.jit(_inner, inline=True)
    given, wanted = (viz.trace(lambda x, fn=fn: fn(x) @ x, m.Spec((4, 4), m.f32)) for fn in (inlined, _inner))
    assert {node.scope for node in given.layers} == {()}
    assert [(node.name, node.op, node.flops) for node in given.nodes] == [(n.name, n.op, n.flops) for n in wanted.nodes]


def portable(w, x):
    return jax.nn.relu(x @ w) @ w


def on_cpu(w, x):
    return jnp.sin(x @ w) @ w


def by_platform(w, x):
    return jax.lax.platform_dependent(w, x, cpu=on_cpu, default=portable)


@pytest.mark.parametrize(
    "change",
    [
        lambda fn: fn,
        lambda fn: jax.grad(lambda w, x: fn(w, x).sum(), argnums=(0, 1)),
        lambda fn: jax.grad(lambda w, x: jax.checkpoint(fn)(w, x).sum()),
        lambda fn: jax.vmap(fn, (None, 0)),
        lambda fn: lambda w, x: jax.lax.scan(lambda x, _: (fn(w, x), None), x, length=3)[0],
    ],
    ids=["plain", "grad", "remat", "vmap", "scan"],
)
def test_a_function_fast_on_cpus_for_platforms_is_drawn_by_its_default(change):
    args = m.Spec((4, 4), m.f32), m.Spec((4, 4), m.f32)
    given, wanted = (check(viz.trace(change(fn), *args)) for fn in (by_platform, portable))
    assert given.nodes == wanted.nodes
    assert given.edges == wanted.edges
    assert (given.total_params, given.total_flops) == (16, wanted.total_flops)
    assert given.equations == wanted.equations


def test_formulas_for_platforms_without_a_default_are_branches():
    args = m.Spec((4, 4), m.f32), m.Spec((4, 4), m.f32)
    graph = viz.trace(lambda w, x: jax.lax.platform_dependent(w, x, cpu=on_cpu, tpu=portable), *args)
    assert {node.scope[-1] for node in graph.layers} == {"branch cpu", "branch tpu", "cond"}


def test_named_scopes_and_depth():
    def fn(params, x):
        with jax.named_scope("encoder"):
            x = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
        with jax.named_scope("decoder"):
            return jnp.tanh(x @ params["c"])

    args = {name: m.Spec((4, 4), m.f32) for name in "abc"}, m.Spec((3, 4), m.f32)
    graph = viz.trace(fn, *args)
    assert [node.scope for node in graph.layers] == [("encoder",)] * 4 + [("decoder",)] * 2
    closed = check(viz.trace(fn, *args, depth=0))
    assert [(node.name, node.params) for node in closed.layers] == [("encoder", 32), ("decoder", 16)]


def test_equal_calls_side_by_side_and_in_a_row_stay_apart():
    def chained(x):
        for _ in range(2):
            x = jax.nn.softmax(x)
        return x

    x = m.Spec((3, 5), m.f32)
    assert ops(viz.trace(lambda x: [jax.nn.softmax(part) for part in x], x)).count("Softmax") == 3
    assert ops(viz.trace(chained, x)) == ["Softmax", "Softmax"]


def test_biases_on_either_side_and_shared_weights():
    def fn(params, x):
        x = params["b"][None] + x @ params["w"]
        return x @ params["w"]

    params = {"w": m.Spec((4, 4), m.f32), "b": m.Spec((4,), m.f32)}
    graph = check(viz.trace(fn, params, m.Spec((3, 4), m.f32)))
    assert [(node.op, node.params) for node in graph.layers] == [("FullyConnected", 20), ("FullyConnected", 0)]


def test_what_counts_as_a_parameter():
    captured = jnp.ones((3, 5))
    graph = viz.trace(lambda x: x @ captured, m.Spec((2, 3), m.f32))
    assert (graph.inputs[0].name, graph.total_params) == ("x", 15)
    both = m.Spec((3, 3), m.f32), m.Spec((3, 3), m.f32)
    assert viz.trace(jnp.dot, *both, params_argnums=1).layers[0].op == "FullyConnected"
    assert viz.trace(jnp.dot, *both, params_argnums=None).layers[0].op == "MatMul"
    noisy = viz.trace(lambda rng, x: x + jax.random.normal(rng, (3,)), jax.random.key(0), m.Spec((3,), m.f32))
    assert noisy.total_params == 0
    assert "Random" in ops(noisy)


def test_frozen_layers_have_parameters_and_a_momentum_has_none():
    """Layers without gradient before one with it. The momentum is nothing that the gradient depends on."""

    def step(params, momentum, x):
        features = jax.nn.relu(x @ params["frozen"])
        grads = jax.grad(lambda head: jnp.tanh(features @ head).sum())(params["head"])
        momentum = 0.9 * momentum + grads
        return params["head"] - 0.1 * momentum, momentum

    params = {"frozen": m.Spec((8, 4), m.f32), "head": m.Spec((4, 2), m.f32)}
    graph = check(viz.trace(step, params, params["head"], m.Spec((3, 8), m.f32), params_argnums=(0, 1)))
    assert graph.total_params == 8 * 4 + 4 * 2
    assert [node.params for node in graph.layers if node.op == "FullyConnected"] == [8 * 4, 4 * 2]


def _train_step(tx, loss):
    step = m.training_step(tx, lambda params, batch: loss(params, batch["image"], batch["label"]))
    return step, (m.LENET, jax.eval_shape(tx.init, m.LENET), {"image": m.IMAGES, "label": m.LABELS})


def test_an_optimizer_is_a_node_and_its_state_no_parameters():
    step, (params, opt_state, batch) = _train_step(optax.adam(1e-3), m.lenet_loss)
    graph = check(viz.trace(lambda state, batch: step(*state, batch), (params, opt_state), batch))
    (adam,) = [node for node in graph.layers if not node.is_backward][11:]
    assert (adam.name, adam.op, adam.detail) == ("Adam", "Adam", "8 arrays")
    assert len(adam.outputs) == 8 + 17
    assert graph.total_params == 129_068
    gradients = {f"{name} (backward)" for name in ("conv1", "conv2", "dense1", "dense2")}
    assert {edge.source for edge in graph.edges if edge.target == "Adam"} == gradients


def test_an_argument_is_one_input():
    fn, args = _train_step(optax.adam(1e-3), m.lenet_loss)
    graph = check(viz.trace(fn, *args, max_nodes=23))
    inputs = [(node.name, node.detail, node.shape, len(node.leaves)) for node in graph.inputs]
    assert inputs == [("opt_state", "17 arrays", (), 17), ("batch", "2 arrays", (), 2)]
    assert graph["batch"].leaves == ("batch['image']: float32[256,28,28,1]", "batch['label']: int32[256]")
    edges = [(edge.target, edge.label, edge.shape, edge.arrays) for edge in graph.edges if edge.source == "batch"]
    assert edges[:2] == [("conv1", "image", (256, 28, 28, 1), 1), ("loss0", "label", (256,), 1)]
    assert [edge.arrays for edge in graph.edges if edge.source == "opt_state"] == [17]
    assert len(graph.layers) == 23  # the limit counts layers alone


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSProp", "Lion", "Adafactor", "LAMB", "ScheduleFree"])
def test_an_optimizer_goes_by_its_name(name):
    params, x = {"w": m.Spec((4, 3), m.f32), "b": m.Spec((3,), m.f32)}, m.Spec((5, 4), m.f32)
    make = optax.contrib.schedule_free_adamw if name == "ScheduleFree" else getattr(optax, name.lower())
    tx = optax.chain(optax.clip_by_global_norm(1.0), make(1e-3))
    step, _ = _train_step(tx, lambda p, x, y: jnp.sum(jnp.tanh(x @ p["w"] + p["b"][None]) - y))
    batch = {"image": x, "label": m.Spec((5, 3), m.f32)}
    graph = check(viz.trace(step, params, jax.eval_shape(tx.init, params), batch))
    assert [(node.op, node.detail) for node in graph.layers if "array" in node.detail] == [(name, "2 arrays")]


def swish_of_mine(x):
    return x / (1 + jnp.exp(-x)) + jnp.abs(x)


def test_rules_of_the_user():
    x = m.Spec((8,), m.f32)

    def fn(x):
        return jnp.cos(swish_of_mine(x))

    assert ops(viz.trace(fn, x)) == ["swish_of_mine", "cos"]
    named = viz.trace(fn, x, rules=[Call("swish_of_mine", "Activation", "mine")])
    assert [(node.op, node.detail) for node in named.layers] == [("Activation", "mine"), ("cos", "")]

    def cosine(cells, cell):
        return Fold((cell,), "Cosine", "of one")

    graph = viz.trace(fn, x, rules=[Rule("cosine", frozenset(("cos",)), cosine)])
    assert graph.layers[-1].op == "Cosine"
    assert graph.layers[-1].detail == "of one"


def _calls(fn, x):
    """How many calls of functions a picture takes. A busy machine counts the same."""
    with cProfile.Profile() as profile:
        plot = viz.plot_network(fn, x)
        assert plot.source
    return sum(entry.callcount for entry in profile.getstats()), plot


@pytest.mark.sampled(1)
@pytest.mark.parametrize("build", [m.chain, m.tangle])
@pytest.mark.parametrize(("few", "many"), [(300, 1_200), pytest.param(1_000, 3_000, marks=pytest.mark.slow)])
def test_many_equations(build, few, many):
    x = m.Spec((4,), m.f32)
    (least, _), (most, plot) = _calls(build(few), x), _calls(build(many), x)
    assert most < 1.25 * many / few * least
    assert plot.network.equations >= many
    assert len(plot.network.layers) <= 200
    assert check(plot.network).total_flops == pytest.approx(viz.trace(build(many), x, max_nodes=None).total_flops)
    assert b"<svg" in plot.pipe("svg")


def test_an_update_of_many_arrays_is_called_by_its_kind():
    """Not "w", with which the names of both parameters begin."""

    def step(params, x):
        grads = jax.grad(lambda params: jnp.square(jnp.tanh(x @ params["w1"]) @ params["w2"]).sum())(params)
        return jax.tree.map(lambda param, grad: param - grad, params, grads)

    params = {"w1": m.Spec((8, 6), m.f32), "w2": m.Spec((6, 3), m.f32)}
    update = check(viz.trace(step, params, m.Spec((5, 8), m.f32))).layers[-1]
    assert (update.name, update.op, update.detail) == ("sub", "sub", "2 arrays")


def test_a_checkpointed_block_has_one_gradient_for_each_layer():
    """What remat computes again has its gradients beside it. What it does not is the layer of the first time."""

    @jax.checkpoint
    def block(params, x):
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    def loss(blocks, x):
        for params in blocks:
            x = block(params, x)
        return jnp.square(x).sum()

    blocks = [{"up": m.Spec((8, 32), m.f32), "down": m.Spec((32, 8), m.f32)}] * 4
    graph = check(viz.trace(jax.grad(loss), blocks, m.Spec((5, 8), m.f32), repeats=False))
    inside = [node for node in graph.layers if node.scope]
    gradients = [node for node in inside if node.is_backward]
    assert [node.kind for node in inside if not node.is_backward] == 4 * ["FullyConnected", "Activation"]
    assert [node.kind for node in gradients] == 4 * ["FullyConnected", "Activation", "FullyConnected"]
    assert [node.name for node in gradients[::3]] == [f"fullyconnected{n} (backward)" for n in (7, 5, 3, 1)]


def test_gradients_in_a_remat_are_of_what_it_computes_again():
    """The second derivative of a checkpointed layer, which is computed three times at one place."""

    def net(params, x):
        for w in params.values():
            x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x)
        return x.sum()

    def penalty(params, x):
        return jax.grad(lambda params: jnp.square(jax.grad(net, 1)(params, x)).sum())(params)

    params = {f"l{number}": m.Spec((8, 8), m.f32) for number in range(3)}
    graph = check(viz.trace(penalty, params, m.Spec((4, 8), m.f32), repeats=False))
    named = [node.name for node in graph.layers if node.is_backward and node.name.startswith("l")]
    assert named[:4] == [f"l{layer} (backward)" for layer in ("2", "0 2")] + ["l0 2 (backward) 2", "l0 3 (backward)"]
    assert named[4:] == ["l1 4 (backward)", "l2 3", "l0 2 (backward) 3", "l0 2 (backward) 4", "l1 (backward)"]


def test_the_remat_around_a_gradient_is_jaxs_own():
    region, user = Scope("remat", "region"), Scope("remat")  # a function of the user's may have the name
    assert backward._rematted((user, Scope("layer"))) == ()
    assert backward._rematted((Scope("net"), region, user)) == (Scope("net"), region)


def test_a_call_of_a_library_is_the_place_of_what_it_is_written_out_of():
    """What `jnp.linalg` computes has places of its own, and its gradient has that of the call."""

    def loss(params, x):
        return jnp.linalg.norm(x @ params["w"]) + (jnp.linalg.solve(params["a"], x.T) @ params["b"]).sum()

    params = {"w": m.Spec((8, 8), m.f32), "a": m.Spec((8, 8), m.f32), "b": m.Spec((4, 2), m.f32)}
    graph = check(viz.trace(jax.grad(loss), params, m.Spec((4, 8), m.f32)))
    kinds = {node.op for node in graph.layers}
    assert {"norm", "norm (backward)", "solve", "solve (backward)"} <= kinds


def test_nothing_is_run_and_no_memory_is_taken():
    huge = m.Spec((1 << 20, 1 << 20), m.f32)  # four terabytes
    graph = viz.trace(lambda w, x: x @ w, huge, m.Spec((8, 1 << 20), m.f32))
    assert graph.layers[0].params == 1 << 40
