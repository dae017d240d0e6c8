"""What a training step does on its devices: collectives, where they are, live memory, sharding, heat, the picture."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import viz_models as m
from hlo_text import program_from
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kv_model import collectives_in

from jaxpar import kv, parallel, train, viz
from jaxpar.models import lenet, transformer
from jaxpar.viz._graph import human
from jaxpar.viz._layout.net import Net
from jaxpar.viz._program import memory
from jaxpar.viz._program.hlo import program_of
from jaxpar.viz._program.sends import sends_of
from jaxpar.viz._read.raw import Raw, Value
from jaxpar.viz._step.places import Places

TX = optax.sgd(0.1, momentum=0.9)
WIDTH, LAYERS = 64, 3
DATA, BOTH = (("data",), (4,)), (("data", "model"), (2, 4))


def dense(params, x):
    return x @ params["w"] + params["b"][None]


def net(params, x):
    for number in range(LAYERS - 1):  # every layer has the same place in the program
        x = jax.nn.relu(dense(params[f"layer{number}"], x))
    return dense(params[f"layer{LAYERS - 1}"], x)


def loss_fn(params, batch):
    return ((net(params, batch["x"]) - batch["y"]) ** 2).mean()


def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def arguments(names=(), sizes=(), split=lambda leaf: P()):
    layer = {"w": np.ones((WIDTH, WIDTH), np.float32), "b": np.ones(WIDTH, np.float32)}
    params = {f"layer{number}": jax.tree.map(np.copy, layer) for number in range(LAYERS)}
    batch = {name: np.ones((32, WIDTH), np.float32) for name in "xy"}
    if not names:
        return params, TX.init(params), batch
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)
    put = functools.partial(jax.tree.map, lambda leaf: jax.device_put(leaf, NamedSharding(mesh, split(leaf))))
    return put(params), put(TX.init(params)), jax.device_put(batch, NamedSharding(mesh, P("data")))


def over_model(leaf):
    return P(None, "model") if leaf.ndim == 2 else P("model") if leaf.ndim else P()


STEPS = {
    "single": lambda: (step, arguments()),
    "data": lambda: (jax.jit(step, donate_argnums=(0, 1)), arguments(*DATA)),
    "fsdp": lambda: (jax.jit(step), arguments(*DATA, lambda leaf: P("data") if leaf.ndim else P())),
    "2x4": lambda: (jax.jit(step, donate_argnums=(0, 1)), arguments(*BOTH, over_model)),
}


@functools.cache
def plotted(name):
    fn, args = STEPS[name]()
    return viz.plot_step(fn, *args, title=name)


@functools.cache
def compiled(name):
    fn, args = STEPS[name]()
    return (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args).compile()


def sent(text, devices):
    """The name and the bytes of each collective in a text without loops, by other means than those tested."""
    return sorted(
        (name, {"all-gather": nbytes // devices, "reduce-scatter": nbytes * devices}.get(name, nbytes))
        for name, nbytes in collectives_in(text)
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "devices"), [("single", 1), ("data", 4), ("fsdp", 4), ("2x4", 4)])
def test_every_collective_of_the_program_is_there_once(name, devices):
    found = plotted(name).step.collectives
    assert sorted((one.kind, one.total_bytes) for one in found) == sent(compiled(name).as_text(), devices)
    assert bool(found) == (name != "single")
    names = [one.name for one in found]
    assert len(names) == len(set(names))


def test_gradients_are_summed_between_the_backward_pass_and_the_optimizer():
    graph = plotted("data").step
    names = [layer.name for layer in graph.layers if layer.params]
    assert len(names) == LAYERS
    gradients = [one for one in graph.collectives if one.phase == "gradients"]
    assert {one.axes for one in graph.collectives} == {("data",)}
    assert sorted({name for one in gradients for name in one.layers}) == sorted(names)
    sent, scalar = sum(one.bytes for one in graph.collectives), 4  # the loss
    assert sent == 4 * graph.total_params + scalar
    edges = [edge for edge in graph.edges if edge.phase == "gradients"]
    assert sorted(edge.source for edge in edges) == sorted(names)
    assert len(graph.optimizers) == 1


def test_split_parameters_are_gathered_for_the_layer_that_reads_them():
    graph = plotted("fsdp").step
    gathers = [one for one in graph.collectives if one.phase == "parameters"]
    names = {name for one in gathers for name in one.layers}
    by_layer = {name: sum(one.bytes for one in gathers if one.layers == (name,)) for name in names}
    each = (WIDTH * WIDTH + WIDTH) * 4 // 4  # a quarter of a layer
    assert by_layer == {layer.name: each for layer in graph.layers if layer.params}
    assert any(one.phase == "gradients" for one in graph.collectives)


def test_activations_are_exchanged_over_the_model_axis():
    graph = plotted("2x4").step
    phases = {phase: {one.axes for one in graph.collectives if one.phase == phase} for phase in ("forward", "backward")}
    assert phases == {"forward": {("model",)}, "backward": {("model",)}}
    assert ("data",) in {one.axes for one in graph.collectives if one.phase == "gradients"}
    layers = {name for one in graph.collectives if one.phase == "forward" for name in one.layers}
    assert len(layers) == LAYERS - 1
    assert (dict(graph.mesh), graph.devices) == ({"data": 2, "model": 4}, 8)


def test_how_arguments_and_edges_are_split():
    graph = plotted("2x4").step
    named = {argument.name: argument for argument in graph.arguments}
    weight = named["params['layer1']['w']"]
    assert (weight.shape, weight.local_shape, weight.spec) == ((64, 64), (64, 16), ("", "model"))
    assert named["batch['x']"].spec == ("data", "")
    known = {edge.spec for edge in graph.edges if edge.spec is not None}
    assert ("data", "model") in known
    for edge in graph.edges:
        if edge.local_shape is not None:
            assert all(whole % part == 0 for whole, part in zip(edge.shape, edge.local_shape, strict=True))
    assert {edge.spec for edge in plotted("data").step.edges if edge.spec} == {("data", "")}


def total(compiled):
    stats = compiled.memory_analysis()
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return kept + stats.temp_size_in_bytes


@pytest.mark.parametrize("name", STEPS)
def test_live_memory_is_that_of_the_compiler(name):
    memory = plotted(name).step.memory
    assert memory.total == total(compiled(name)) == memory.peak + memory.gaps
    assert memory.is_exact
    assert abs(memory.peak - total(compiled(name))) <= 0.02 * total(compiled(name))
    layers = plotted(name).step.layers
    peaks = [part.peak for layer in layers for part in (layer.forward, layer.backward) if part and part.peak]
    assert len(peaks) >= len(layers)
    assert max(peaks) <= memory.peak
    assert min(peaks) >= compiled(name).memory_analysis().argument_size_in_bytes


@pytest.mark.parametrize("engine", ["shard_map", *(pytest.param(e, marks=pytest.mark.slow) for e in ("pmap", "jit"))])
def test_every_engine(engine):
    params, _, batch = arguments()
    where = {"devices": jax.devices()[:4], "engine": engine}
    state, made = train.start(params, optax.sgd(0.1), lambda p, batch, rng: (loss_fn(p, batch), {}), **where)
    graph = viz.trace_step(made, state, batch)
    gradients = [one for one in graph.collectives if one.phase == "gradients"]
    assert {one.axes for one in gradients} == {("data",)}
    assert graph.devices == 4
    names = {layer.name for layer in graph.layers if layer.params}
    assert sum(one.total_bytes for one in gradients) >= 4 * graph.total_params
    assert {name for one in gradients for name in one.layers} == names
    assert len(graph.optimizers) == 1
    assert {layer.name for layer in graph.layers if layer.backward} >= names


def test_the_arguments_of_a_program_in_any_order():
    """The text has the parameters of a program in the order in which they run, not in that of their numbers."""
    lines = "".join(f'  p.{at} = f32[8]{{0}} parameter({at}), metadata={{op_name="parts[{at}]"}}\n' for at in (2, 0, 1))
    program = program_from(f"HloModule jit_step\n\nENTRY main {{\n{lines}  ROOT r = f32[8]{{0}} add(p.0, p.2)\n}}\n")
    raw = Raw(values=[Value((8,), "float32", 32, "weight", at, name) for at, name in enumerate("abc")])
    assert Places(program, Net(raw, [], {}), {}).arguments == {"p.0": "a", "p.1": "b", "p.2": "c"}


@pytest.mark.parametrize("name", STEPS)
def test_the_picture_has_three_columns_and_fits_a_screen(name):
    plot = plotted(name)
    drawn = [group.find(m.SVG + "title").text for group in m.groups(plot)]
    for layer in plot.step.layers:
        assert drawn.count(layer.name) == 1
        assert drawn.count(f"{layer.name} (backward)") == (layer.backward is not None)
    assert drawn.count("parameters") == 1
    assert float(re.search(rb'<svg width="(\d+)pt"', plot.pipe("svg"))[1]) < 1200
    for kind in {one.kind for one in plot.step.collectives}:
        assert kind in m.words(plot)
    assert isinstance(plot, viz.Plot)
    at = dict(re.findall(r'^\t"([^"]+)" \[pos="([\d.]+),', plot.source, re.M))
    last = plot.step.layers[-1].name
    columns = [float(at[box]) for box in (last, "parameters", f"{last} (backward)", plot.step.optimizers[-1].name)]
    assert columns == sorted(columns)


def test_the_devices_talk_at_the_wall_alone():
    """Gradients go into one sum beside their layers, one arrow leaves it; the loss and the metrics have names."""

    def with_accuracy(params, batch, rng):
        loss = loss_fn(params, batch)
        return loss, {"accuracy": (net(params, batch["x"]).argmax(-1) == 0).mean()}

    options = {"devices": jax.devices()[:4], "engine": "shard_map", "loss_scale": "dynamic"}
    state, made = train.start(arguments()[0], optax.adam(0.1), with_accuracy, **options)
    plot = viz.plot_step(made, state, arguments()[2])
    (one,) = plot.step.collectives
    assert (one.kind, one.phase, one.metrics) == ("all-reduce", "gradients", ("loss", "accuracy"))
    ends = re.findall(r'^\t"([^"]+)" -> "([^"]+)" ', plot.source, re.M)
    layers = [layer.name for layer in plot.step.layers if layer.params]
    assert {source for source, target in ends if target == "sums"} >= {f"{name} (backward)" for name in layers}
    assert "Adam" in {target for source, target in ends if source == "sums"}
    assert any(target == "results" for _, target in ends)
    words = m.words(plot)
    for shown in ("psum", "of gradients, loss, accuracy", "each of 4 devices"):
        assert shown in words
    for plumbing in ("slice", "Concat", "div", "is_finite"):  # of buckets, and of the check for NaN
        assert plumbing not in words


STEPS_OF_TRAIN = {
    "pmap": ({"engine": "pmap"}, ("psum", "of gradients, loss")),
    "jit": ({"engine": "jit"}, ("psum", "of gradients, loss")),
    "accumulate": ({"accumulate": 2}, ("psum", "of gradients, loss")),
    "compression": ({"compression": {"type": "2bit", "threshold": 0.5}}, ("all_to_all + all_gather", "compression")),
    "sharded": ({"kind": "sharded"}, ("psum_scatter", "of gradients")),
    "codes": (
        {"kind": "sharded", "compression": {"type": "2bit", "threshold": 0.5}},
        ("all_to_all", "of gradients", "compression"),
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", STEPS_OF_TRAIN)
def test_the_wall_of_each_kind_of_step(name):
    options, shown = STEPS_OF_TRAIN[name]
    where = {"devices": jax.devices()[:4], "engine": "shard_map", **options}
    state, made = train.start(arguments()[0], optax.adam(0.1), lambda p, batch, rng: (loss_fn(p, batch), {}), **where)
    plot = viz.plot_step(made, state, arguments()[2])
    words = m.words(plot)
    for text in (*shown, "loss", "each of 4 devices"):
        assert text in words
    ends = re.findall(r'^\t"([^"]+)" -> "([^"]+)" ', plot.source, re.M)
    layers = [layer.name for layer in plot.step.layers if layer.params]
    into_the_wall = {source for source, target in ends if target == "sums"}
    assert {f"{name} (backward)" for name in layers} <= into_the_wall
    assert {target for source, target in ends if source == "sums"} == {"Adam"}  # updates come out of it
    assert ("Adam", "parameters") in ends
    # The codes of compressed gradients go into it, from the box that makes them of residuals.
    others = {layer.name for layer in plot.step.optimizers} - {"Adam"}
    assert len(others & into_the_wall) == ("compression" in options)
    assert len(others) <= 3 * ("compression" in options)  # before each collective, and behind the last


def test_what_gathers_params_is_no_layer():
    """The params of kind "sharded" are gathered, and cut out of buckets: a layer is called as with any other kind."""
    options = {"devices": jax.devices()[:4], "kind": "sharded"}
    state, made = train.start(arguments()[0], optax.sgd(0.1), lambda p, batch, rng: (loss_fn(p, batch), {}), **options)
    graph = viz.trace_step(made, state, arguments()[2])
    names = [f"layer{number}" for number in range(LAYERS)]
    assert {layer.op for layer in graph.layers} == {"FullyConnected", "Activation", "Loss"}
    assert [(layer.name, layer.params) for layer in graph.layers if layer.params] == [
        (name, WIDTH * WIDTH + WIDTH) for name in names
    ]
    assert graph.total_params == LAYERS * (WIDTH * WIDTH + WIDTH)
    gathers = [one for one in graph.collectives if one.phase == "parameters"]
    assert {one.kind for one in gathers} == {"all-gather"}
    assert sum(one.bytes for one in gathers) == graph.total_params  # a quarter of them, in float32
    assert {name for one in gathers for name in one.layers} == set(names)
    # Each sum is of the layers whose gradients are in it, and none of a layer more.
    sums = [one for one in graph.collectives if one.kind == "reduce-scatter"]
    assert {one.phase for one in sums} == {"gradients"}
    assert sum(one.bytes for one in sums) == 4 * graph.total_params
    of_one = [one for one in (*gathers, *sums) if len(one.layers) == 1]
    full = WIDTH * WIDTH * 4
    assert {one.bytes * (4 if one.kind == "all-gather" else 1) for one in of_one} <= {full}


@pytest.mark.parametrize("engine", ["shard_map", pytest.param("jit", marks=pytest.mark.slow)])
def test_the_padding_of_rows_is_no_param(engine):
    """Kind "sharded" cuts 15 and 3 elements into four rows, of 4 and of 1."""
    params = {"odd": {"w": np.ones((5, 3), np.float32), "b": np.ones(3, np.float32)}}
    loss = lambda p, batch, rng: ((dense(p["odd"], batch) ** 2).mean(), {})  # noqa: E731
    where = {"devices": jax.devices()[:4], "kind": "sharded", "engine": engine}
    state, made = train.start(params, optax.adam(0.1), loss, **where)
    assert [value.size for value in state.store.values.values()] == [4, 16]
    plot = viz.plot_step(made, state, np.ones((8, 5), np.float32))
    assert [layer.params for layer in plot.step.layers if layer.params] == [18]
    assert plot.step.total_params == 18
    assert "18 params" in m.words(plot)
    graph = viz.trace(made, state, np.ones((8, 5), np.float32))
    assert graph.total_params == sum(node.params for node in graph.nodes) == 18
    assert sum(weight.params for weight in graph.weights if ".values[" in weight.name) == 18


@pytest.mark.parametrize("outer", [None, pytest.param(optax.sgd(0.7), marks=pytest.mark.slow)])
def test_the_end_of_a_round_of_local_steps_is_one_box_with_a_name(outer):
    """It was "cond", "sub" and "sub", and the psum of the params was one of gradients."""
    options = {"devices": jax.devices()[:4], "local_steps": 3, "outer_optimizer": outer}
    state, made = train.start(arguments()[0], optax.adam(0.1), lambda p, batch, rng: (loss_fn(p, batch), {}), **options)
    plot = viz.plot_step(made, state, arguments()[2])
    name = "mean of params every 3 steps" if outer is None else "outer update every 3 steps"
    assert [one.name for one in plot.step.optimizers] == ["Adam", name]
    sends = {(one.phase, one.layers) for one in plot.step.collectives if one.bytes > 4}
    assert sends == {("optimizer", (name,))}
    edges = [(edge.source, edge.target) for edge in plot.step.edges if edge.phase in ("gradients", "optimizer")]
    assert sorted(edges) == sorted([*((f"layer{number}", "Adam") for number in range(LAYERS)), ("Adam", name)])
    assert name in m.words(plot)
    returned = [line for line in plot.source.splitlines() if "the new parameters" in line]
    assert len(returned) == 1
    assert returned[0].strip().startswith(f'"{name}" -> "parameters"')


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"compression": {"type": "2bit", "threshold": 0.5}}, {"nonfinite": "skip"}])
def test_the_end_of_a_round_is_one_box_with_other_options_too(options):
    """The residuals of compressed params are in a scope of their own, and what skips a step comes behind the round."""
    options = {"devices": jax.devices()[:4], "local_steps": 3, **options}
    state, made = train.start(arguments()[0], optax.adam(0.1), lambda p, batch, rng: (loss_fn(p, batch), {}), **options)
    graph = viz.trace_step(made, state, arguments()[2])
    assert [one.name for one in graph.optimizers][:2] == ["Adam", "mean of params every 3 steps"]
    assert not any(one.name.startswith(("cond", "sub", "mean")) for one in graph.optimizers[2:])
    assert [(edge.source, edge.target) for edge in graph.edges if edge.phase == "optimizer"] == [
        ("Adam", "mean of params every 3 steps")
    ]


@pytest.mark.parametrize("tx", [optax.adam(0.1), pytest.param(optax.sgd(0.1), marks=pytest.mark.slow)])
def test_an_optimizer_that_is_given_the_gradients_of_an_earlier_step(tx):
    """It was "jaxpar.divide", which puts those of this step into the state, and the sum was of no layer."""
    options = {"devices": jax.devices()[:4], "kind": "dist_async", "staleness": 1}
    state, made = train.start(arguments()[0], tx, lambda p, batch, rng: (loss_fn(p, batch), {}), **options)
    plot = viz.plot_step(made, state, arguments()[2])
    (update,) = plot.step.optimizers
    assert update.name == update.op
    assert "of earlier gradients" in m.words(plot)
    layers = {f"layer{number}" for number in range(LAYERS)}
    assert {(e.source, e.target) for e in plot.step.edges if e.phase == "gradients"} == {
        (n, update.name) for n in layers
    }
    sends = [one for one in plot.step.collectives if one.phase == "gradients"]
    assert {name for one in sends for name in one.layers} == layers
    assert "dashed: " not in " ".join(m.words(plot))


@pytest.mark.parametrize("by_hand", [False, True])
def test_another_network_may_be_updated_by_earlier_gradients_beside(by_hand):
    """The gradients of the step go to their own optimizer, known or not."""
    tx = optax.adam(0.1)

    def step(params, opt_state, batch, other, other_state, earlier):
        changes, other_state = tx.update(earlier, other_state, other)
        other = optax.apply_updates(other, changes)
        gradients = jax.grad(loss_fn)(params, batch)
        if by_hand:
            params = jax.tree.map(lambda p, g: jnp.clip(p - 0.1 * jnp.tanh(g), -1, 1), params, gradients)
        else:
            changes, opt_state = tx.update(gradients, opt_state, params)
            params = optax.apply_updates(params, changes)
        return params, opt_state, other, other_state

    params, _, batch = arguments()
    graph = viz.trace_step(jax.jit(step), params, tx.init(params), batch, params, tx.init(params), params)
    assert not any("of earlier gradients" in one.detail for one in graph.optimizers)
    targets = {edge.target for edge in graph.edges if edge.phase == "gradients"}
    assert targets == {"Adam 2"} if not by_hand else targets and not targets & {"Adam", "Adam 2"}


NAMES = [f"layer{number}" for number in range(LAYERS)]


def made_step(batch=32, tx=None, loss=loss_fn, params=None, **options):
    """The arguments of `plot_step` for a step of `train.start` on four devices."""
    options = {"devices": jax.devices()[:4], **options}
    params = params or arguments()[0]
    state, made = train.start(params, tx or optax.adam(0.1), lambda p, b, rng: (loss(p, b), {}), **options)
    width = params["layer0"]["b"].size
    return made, state, {name: np.ones((batch, width), np.float32) for name in "xy"}


def small_params(width=16):
    """Params whose gradients are in one bucket."""
    layer = {"w": np.ones((width, width), np.float32), "b": np.ones(width, np.float32)}
    return {name: jax.tree.map(np.copy, layer) for name in NAMES}


def gradient_edges(graph):
    return {(edge.source, edge.target) for edge in graph.edges if edge.phase == "gradients"}


PHASES = "forward", "gradients"
LATE = {"kind": "dist_async", "staleness": 1}
GUARDED = {
    "late": {"nonfinite": "skip", **LATE},
    "stop": {"nonfinite": "stop"},
    "sharded": {"nonfinite": "skip", "kind": "sharded"},
    "dynamic": {"loss_scale": "dynamic"},
    "late, dynamic": {"loss_scale": "dynamic", **LATE},
    "reported": {"record": ("grad_norm", "update_norm")},
    "skip": {"nonfinite": "skip"},
    "late, clipped": {"grad_transform": optax.clip_by_global_norm(1.0), **LATE},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", GUARDED)
def test_what_chooses_checks_or_reports_is_no_update(name):
    """There was a box "jaxpar.finish_step" with the gradients of all layers, or "jaxpar.rotate_queue"."""
    plot = viz.plot_step(*made_step(**GUARDED[name]))
    assert [one.op for one in plot.step.optimizers] == ["Adam"]
    assert gradient_edges(plot.step) == {(layer, "Adam") for layer in NAMES}
    words = m.words(plot)
    assert "jaxpar." not in words
    assert ("of earlier gradients" in words) == name.startswith("late")
    # Whether all is finite goes to the results with the loss, and into no sum of gradients.
    sent = {phase: {n for one in plot.step.collectives if one.phase == phase for n in one.layers} for phase in PHASES}
    assert sent["gradients"] == set(NAMES)
    ends = re.findall(r'^\t"([^"]+)" -> "([^"]+)" ', plot.source, re.M)
    assert {source for source, target in ends if target == "sums"} == {f"{layer} (backward)" for layer in NAMES}
    if {"kind", "staleness"} & GUARDED[name].keys():
        assert sent["forward"] == {"loss0"}


@pytest.mark.parametrize("options", [{}, {"loss_scale": 8.0}, pytest.param({"engine": "jit"}, marks=pytest.mark.slow)])
def test_microbatches_of_one_example(options):
    """The gradient of a bias is that of the activation or of the loss behind it. The layer is meant."""
    graph = viz.trace_step(*made_step(8, accumulate=2, **options))
    assert {source for source, _ in gradient_edges(graph)} == set(NAMES)
    sums = [one for one in graph.collectives if one.phase == "gradients"]
    assert {layer for one in sums for layer in one.layers} == set(NAMES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"compute_dtype": jnp.bfloat16}, {}, {"accumulate": 2}, {"remat": True}])
def test_a_sum_that_is_fused_is_of_all_its_layers(options):
    """In bfloat16 it was of the last layer alone, which the fusion of all gradients goes by."""
    graph = viz.trace_step(*made_step(kind="sharded", params=small_params(), **options))
    sums = [one for one in graph.collectives if one.phase == "gradients"]
    assert [(one.bytes, set(one.layers)) for one in sums] == [(4 * graph.total_params, set(NAMES))]


def test_norms_that_are_reported_are_no_gradients():
    """Kind "sharded" sums the squares of shares, with the loss. The sum was called one of gradients."""
    graph = viz.trace_step(*made_step(kind="sharded", params=small_params(), record=("grad_norm", "update_norm")))
    assert [one.phase for one in graph.collectives if one.bytes < 100] == ["elsewhere"]


def test_an_optimizer_of_several_says_all():
    """A `multi_transform` of Adam and SGD was called Adam."""
    tx = optax.multi_transform({"a": optax.adam(0.1), "s": optax.sgd(0.1)}, dict(zip(NAMES, "aas", strict=True)))
    plot = viz.plot_step(*made_step(tx=tx))
    assert [(one.op, one.detail) for one in plot.step.optimizers] == [("Adam", "and SGD, 6 arrays")]
    assert "and SGD, 6 arrays" in m.words(plot)
    assert [one.detail for one in viz.trace_step(*made_step(tx=optax.contrib.muon(0.1))).optimizers] == ["6 arrays"]


def test_sophia_is_an_optimizer_with_a_name():
    tx = optax.contrib.sophia(0.1)

    def update(params, opt_state, batch):
        changes, opt_state = tx.update(
            jax.grad(loss_fn)(params, batch), opt_state, params, obj_fn=lambda p: loss_fn(p, batch)
        )
        return optax.apply_updates(params, changes), opt_state

    params, _, batch = arguments()
    graph = viz.trace_step(update, params, tx.init(params), batch)
    assert {one.op for one in graph.optimizers} == {"Sophia"}
    assert {source for source, _ in gradient_edges(graph)} == set(NAMES)


def test_the_name_of_a_loop_covers_no_box():
    """The frame of the microbatches had its name on the gradient of the loss."""
    plot = viz.plot_step(*made_step(accumulate=2, params=small_params()))
    boxes = re.findall(r'^\t"([^"]+)" \[pos="[-\d.]+,([-\d.]+)".* height="([\d.]+)"', plot.source, re.M)
    lowest = {name: float(y) - 36 * float(height) for name, y, height in boxes}
    highest = {name: float(y) + 36 * float(height) for name, y, height in boxes}
    (name,) = (name for name in lowest if name.startswith("name of "))
    assert lowest[name] >= highest["loss0 (backward)"]


def sends_of_programs(made, state, batch):
    """The kind and the bytes of each collective of all programs that the host starts."""
    programs = [part.traced.lower().compile() for part in made.parts(state, batch)[2]]
    sends = [send for compiled in programs for send in sends_of(program_of(compiled), {}, 4)]
    return sorted((send.kind, send.bytes * send.times) for send in sends)


VIRTUAL = [
    (4, 32, {}),
    (8, 64, {"nonfinite": "skip", "accumulate": 2}),
    (6, 48, {}),  # two shards on each of three devices
    (7, 56, {}),  # the third device has two that it cannot add
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("shards", "rows", "options"), VIRTUAL)
def test_a_step_over_virtual_shards_is_drawn_as_one_program(shards, rows, options):
    """It was an error, as the host starts several programs."""
    args = made_step(rows, virtual_shards=shards, **options)
    plot = viz.plot_step(*args)
    graph = plot.step
    assert sorted((one.kind, one.total_bytes) for one in graph.collectives) == sends_of_programs(*args)
    assert graph.devices == 4
    assert [layer.name for layer in graph.layers if layer.params] == NAMES
    assert [one.op for one in graph.optimizers] == ["Adam"]
    assert gradient_edges(graph) == {(name, "Adam") for name in NAMES}
    assert {name for one in graph.collectives if one.phase == "gradients" for name in one.layers} == set(NAMES)
    assert [edge.target for edge in graph.edges if edge.phase == "metrics"][:1] == ["loss"]
    assert graph.memory is None  # each program has its own
    assert viz.trace(*args).total_params == graph.total_params == LAYERS * (WIDTH * WIDTH + WIDTH)
    args[0](*args[1:])  # the state is still there


@pytest.mark.parametrize("option", [{"height": "memory"}, {"heat": "memory"}])
def test_the_memory_of_several_programs_is_not_drawn(option):
    with pytest.raises(ValueError, match=r"several programs of a step with virtual_shards .* train\.plan"):
        viz.plot_step(*made_step(virtual_shards=4), **option)


def test_a_profile_of_several_programs(tmp_path):
    with pytest.raises(ValueError, match="several programs for each step with virtual_shards"):
        viz.trace_step(*made_step(virtual_shards=4), profile=tmp_path)


def test_a_step_that_refuses_its_state_says_why():
    with pytest.raises(ValueError, match=r"kind 'local' keeps a value on one device; use kind 'device', or 'sharded'"):
        viz.plot_step(*made_step(kind="local", engine="jit"))


def mapped_step(params, opt_state, batch):
    loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(params, batch), "data")
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def stacked(tree, count=4):
    return jax.tree.map(lambda leaf: np.stack([leaf] * count), tree)


def test_params_that_pmap_is_given_as_copies_count_once(capsys):
    """The picture, the table and the totals had four times as many."""
    params, opt_state, batch = arguments()
    args = stacked(params), stacked(opt_state), {name: x.reshape(4, 8, WIDTH) for name, x in batch.items()}
    made, count = jax.pmap(mapped_step, "data", devices=jax.devices()[:4]), LAYERS * (WIDTH * WIDTH + WIDTH)
    plot = viz.plot_step(made, *args)
    assert plot.step.total_params == sum(layer.params for layer in plot.step.layers) == count
    assert f"{count:,} parameters on each of 4 devices" in m.words(plot)
    viz.print_summary(made, *args)
    table = capsys.readouterr().out
    assert f"Total params: {count:,} on each of 4 devices\nTrainable params: {count:,}\n" in table
    assert viz.trace(made, *args).copies == 4


def test_params_that_are_no_copies_are_counted_as_they_are():
    params, opt_state, batch = arguments()
    count = LAYERS * (WIDTH * WIDTH + WIDTH)
    batches = {name: x.reshape(4, 8, WIDTH) for name, x in batch.items()}

    def gathers(shares, batch):  # each device has a quarter of each param
        params = jax.tree.map(lambda x: jax.lax.all_gather(x, "data", tiled=True), shares)
        return jax.lax.pmean(jax.grad(loss_fn)(params, batch), "data")

    def scaled(params, scale, batch):  # one param is read outside of the map too
        return jnp.sum(scale["s"]) * jax.pmap(loss_fn, in_axes=(0, 0), devices=jax.devices()[:4])(params, batch)

    axes = (None, None, 0)
    once = viz.trace(jax.pmap(mapped_step, "data", in_axes=axes, devices=jax.devices()[:4]), params, opt_state, batches)
    shares = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), params)
    gathered = viz.trace(jax.pmap(gathers, "data", devices=jax.devices()[:4]), shares, batches)
    outside = viz.trace(scaled, stacked(params), {"s": np.ones((2, 3), np.float32)}, batches, params_argnums=(0, 1))
    assert [(graph.copies, graph.total_params) for graph in (once, gathered, outside)] == [
        (1, count),
        (1, count),
        (1, 4 * count + 6),
    ]


def test_arrays_of_the_host_go_where_the_map_over_devices_says():
    """The sum was "over 4 devices", without the axis, and each device had the whole batch."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    made = jax.shard_map(mapped_step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False)
    plot = viz.plot_step(made, *arguments())
    assert plot.step.mesh == (("data", 4),)
    assert {one.axes for one in plot.step.collectives} == {("data",)}
    named = {argument.name: (argument.local_shape, argument.spec) for argument in plot.step.arguments}
    assert named["batch['x']"] == ((8, WIDTH), ("data", ""))
    assert named["params['layer0']['w']"] == ((WIDTH, WIDTH), ("", ""))
    assert "over data=4" in m.words(plot)


def test_a_number_that_counts_steps_is_no_param():
    """A module with dropout makes its random keys of the number of the step, which was a param with a layer."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.drop = nnx.Linear(8, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(nnx.relu(self.first(x)))

    loss = lambda model, batch: (model(batch) ** 2).mean()  # noqa: E731
    state, made = train.start(Net(nnx.Rngs(0)), optax.adam(0.1), loss, devices=jax.devices()[:2])
    plot = viz.plot_step(made, state, np.ones((8, 8), np.float32))
    assert plot.step.total_params == sum(layer.params for layer in plot.step.layers) == 8 * 16 + 16
    assert {"random keys", "Random"} & {layer.op for layer in plot.step.layers}  # with and without jaxpar-cpu
    assert "jaxpar." not in m.words(plot)


@pytest.mark.parametrize("name", ["stop", "late", "sharded", "dynamic", "reported"])
def test_the_table_of_a_step_has_no_names_of_functions_of_jaxpar(name, capsys):
    viz.print_summary(*made_step(params=small_params(), **GUARDED[name]))
    assert not re.findall(r"jaxpar\.|finish_step|rotate_queue|to_rows", capsys.readouterr().out)


def test_rows_of_a_table_are_put_back_in_a_box_with_a_name():
    params = {"table": np.ones((50, 8), np.float32), "w": np.ones((8, 4), np.float32)}
    loss = lambda p, batch, rng: (((p["table"][batch] @ p["w"]) ** 2).mean(), {})  # noqa: E731
    options = {"devices": jax.devices()[:2], "row_sparse": ("table",)}
    state, made = train.start(params, optax.adam(0.1), loss, **options)
    plot = viz.plot_step(made, state, np.zeros((8,), np.int32))
    assert "rows into a table" in m.words(plot)


TWO_BITS = {"type": "2bit", "threshold": 0.5}
GRID = {  # the optimizer, what else there is, the options
    "local, momentum": ("SGD", TX, {"kind": "local", "accumulate": 2}),
    "pmap, lamb": ("LAMB", optax.lamb(0.1), {"engine": "pmap", "remat": True}),
    "sharded, adamw": ("AdamW", optax.adamw(0.1), {"kind": "sharded", "nonfinite": "stop", "accumulate": 2}),
    "jit, schedule free": ("ScheduleFree", optax.contrib.schedule_free_adamw(0.1), {"engine": "jit"}),
    "jit, muon": ("Muon", optax.contrib.muon(0.1), {"engine": "jit", "loss_scale": "dynamic"}),
    "jit, sharded, lion": ("Lion", optax.lion(0.1), {"engine": "jit", "kind": "sharded", "nonfinite": "skip"}),
    "multi steps": ("Adam", optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), {"nonfinite": "skip"}),
    "sgd, int8": ("SGD", optax.sgd(0.1), {"compression": {"type": "int8"}, "accumulate": 2}),
    "sharded, 1bit": ("Adam", optax.adam(0.1), {"compression": {"type": "1bit"}, "kind": "sharded"}),
    "local, bf16": ("Adam", optax.adam(0.1), {"compression": {"type": "bf16"}, "kind": "local"}),
    "2bit, skip": ("Adam", optax.adam(0.1), {"compression": TWO_BITS, "nonfinite": "skip", "remat": True}),
    "late": ("Adafactor", optax.adafactor(0.1), {"kind": "dist_async", "staleness": 1, "accumulate": 2}),
    "bfloat16": ("Adam", optax.adam(0.1), {"compute_dtype": jnp.bfloat16, "kind": "sharded", "record": ("grad_norm",)}),
    "one device": ("AdamW", optax.adamw(0.1), {"devices": jax.devices()[:1], "nonfinite": "stop", "accumulate": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_every_picture_of_a_step(name, capsys):
    """The step, as high as its bytes and with all open; its network, the page and the table."""
    optimizer, tx, options = GRID[name]
    args = made_step(tx=tx, params=small_params(), **options)
    count = LAYERS * (16 * 16 + 16)
    for shown in ({}, {"height": "memory", "limit": 10_000}, {"max_nodes": None, "repeats": False}, {"depth": 0}):
        plot = viz.plot_step(*args, **shown)
        graph, words = plot.step, m.words(plot)
        names = [layer.name for layer in graph.layers if layer.params]
        assert names == NAMES or (len(names) == 1 and shown == {"depth": 0})  # the loop of the microbatches
        assert graph.total_params == sum(layer.params for layer in graph.layers) == count
        assert [one.op for one in graph.optimizers if one.op != "compression"] == [optimizer]
        assert {source for source, _ in gradient_edges(graph)} == set(names)
        sent = {layer for one in graph.collectives if one.phase == "gradients" for layer in one.layers}
        assert sent == (set(names) if graph.devices > 1 else set())
        assert [edge.target for edge in graph.edges if edge.phase == "metrics"] == ["loss"]
        assert not re.findall(r"jaxpar\.|slice|Concat", words)
        assert ("live" in words) == (graph.memory is not None)
    network = viz.plot_network(*args)
    assert network.html()
    assert network.network.total_params == count
    viz.print_summary(*args, memory=True)
    table = capsys.readouterr().out
    assert f"Total params: {count}\nTrainable params: {count}\n" in table
    assert "jaxpar." not in table


def test_a_gradient_of_each_example_by_itself():
    def step(params, batch, key):
        def of_one(x, y):
            return jax.grad(loss_fn)(params, {"x": x[None], "y": y[None]})

        grads = jax.vmap(of_one)(batch["x"], batch["y"])
        keys = jax.random.split(key, len(jax.tree.leaves(grads)))
        noise = jax.tree.unflatten(jax.tree.structure(grads), list(keys))
        share = jnp.minimum(1, 1 / jax.vmap(optax.tree.norm)(grads))
        grads = jax.tree.map(lambda g, k: jnp.tensordot(share, g, 1) + jax.random.normal(k, g.shape[1:]), grads, noise)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params, _, batch = arguments()
    plot = viz.plot_step(step, params, batch, jax.random.key(0))
    assert gradient_edges(plot.step) == {(layer, plot.step.optimizers[0].name) for layer in NAMES}
    assert plot.pipe("svg")


def test_remat_of_the_whole_loss():
    """It was "computes no gradient", since no gradient reads what the forward pass computed."""
    graph = viz.trace_step(*made_step(remat=True))
    assert [layer.name for layer in graph.layers if layer.params] == NAMES
    assert [layer.op for layer in graph.layers][-1] == "Loss"
    assert all(layer.backward is not None for layer in graph.layers)
    assert all(layer.backward.again for layer in graph.layers)
    assert gradient_edges(graph) == {(layer, "Adam") for layer in NAMES}
    assert [(edge.source, edge.target) for edge in graph.edges if edge.phase == "metrics"] == [("loss0", "loss")]


def test_the_loss_of_local_steps_is_no_sum_of_gradients():
    """With `accumulate` the gradients went into a wall, dashed, where the devices sum only the loss."""
    plot = viz.plot_step(*made_step(local_steps=3, accumulate=2))
    assert [one.layers for one in plot.step.collectives if one.phase == "forward"] == [("loss0",)]
    assert "sums" not in re.findall(r'^\t"([^"]+)" \[', plot.source, re.M)


def test_a_running_mean_leaves_the_params_as_they_are():
    def average(params, opt_state, batch, mean):
        params, opt_state, loss = step(params, opt_state, batch)
        return params, opt_state, optax.incremental_update(params, mean, 0.1), loss

    params, opt_state, batch = arguments()
    plot = viz.plot_step(average, params, opt_state, batch, params)
    (mean,) = (one.name for one in plot.step.optimizers if one.op != "SGD")
    assert [(e.source, e.target) for e in plot.step.edges if e.phase == "elsewhere"] == [("SGD", mean)]
    ends = re.findall(r'^\t"([^"]+)" -> "([^"]+)" ', plot.source, re.M)
    assert [source for source, target in ends if target == "parameters"] == ["SGD"]
    assert ("SGD", mean) in ends


def test_two_passes_are_both_forward():
    """The second pass of a GAN reads what the first one has updated. It was no layer."""

    def both(maker, judge, x, z):
        def judged(judge, maker):
            return loss_fn(judge, {"x": net(maker, z), "y": x})

        grads = jax.grad(judged)(judge, maker)
        judge = jax.tree.map(lambda p, g: p - 0.1 * g, judge, grads)
        loss, grads = jax.value_and_grad(judged, 1)(judge, maker)
        return jax.tree.map(lambda p, g: p - 0.1 * g, maker, grads), judge, loss

    params, _, batch = arguments()
    graph = viz.trace_step(both, params, params, batch["x"], batch["x"], params_argnums=(0, 1))
    matrices = [layer for layer in graph.layers if layer.op in ("FullyConnected", "MatMul")]
    assert len(matrices) == 4 * LAYERS
    assert len([layer for layer in matrices if layer.backward]) == 3 * LAYERS  # none of the maker in the first pass
    assert [(edge.source, edge.target) for edge in graph.edges if edge.phase == "metrics"] == [
        (graph.layers[-1].name, "loss")
    ]


def test_a_step_that_is_skipped_by_hand():
    def skip(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, new_state = TX.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        is_finite = jnp.isfinite(optax.tree.norm(grads))
        return *jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, (params, opt_state)), loss

    graph = viz.trace_step(skip, *arguments())
    assert [one.op for one in graph.optimizers] == ["SGD"]
    assert gradient_edges(graph) == {(layer, "SGD") for layer in NAMES}


def test_updates_of_two_optimizers_that_are_added_later():
    """The one that was called first had lost the addition, and was beside a box "optimizer"."""

    def step(params, states, batch):
        grads = jax.grad(lambda p: loss_fn({**p[0], **p[1]}, batch))(params)
        first, first_state = both[0].update(grads[0], states[0], params[0])
        second, second_state = both[1].update(grads[1], states[1], params[1])
        new = [optax.apply_updates(params[0], first), optax.apply_updates(params[1], second)]
        return new, [first_state, second_state]

    both = optax.adam(0.1), TX
    params, _, batch = arguments()
    params = [{name: params[name] for name in NAMES[:2]}, {name: params[name] for name in NAMES[2:]}]
    graph = viz.trace_step(step, params, [tx.init(p) for tx, p in zip(both, params, strict=True)], batch)
    assert [one.name for one in graph.optimizers] == ["Adam", "SGD"]
    own = {(source.rpartition("/")[2], target) for source, target in gradient_edges(graph)}
    assert own == {("layer0", "Adam"), ("layer1", "Adam"), ("layer2", "SGD")}


def test_a_result_is_of_the_layers_that_it_is_computed_from():
    """The loss, the accuracy and a running mean are summed in one bucket. Each was of the layers of all."""

    def loss(params, batch, rng, mean):
        hidden = dense(params["layer0"], batch["x"])
        out = dense(params["layer1"], jax.nn.relu(hidden))
        loss = ((out - batch["y"]) ** 2).mean()
        return loss, {"largest": jnp.abs(out).mean()}, 0.9 * mean + 0.1 * hidden.mean(0)

    params = {name: arguments()[0][name] for name in NAMES[:2]}
    options = {"devices": jax.devices()[:4], "model_state": np.zeros(WIDTH, np.float32)}
    state, made = train.start(params, optax.adam(0.1), loss, **options)
    graph = viz.trace_step(made, state, arguments()[2])
    edges = {(edge.source, edge.target) for edge in graph.edges if edge.phase == "metrics"}
    assert edges == {("loss0", "loss"), ("layer1", "largest")}


@pytest.mark.parametrize("is_mapped", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_loss_that_the_devices_average_is_the_loss(is_mapped):
    """It was "output[2]"."""

    def local(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    args, devices = arguments(), jax.devices()[:4]
    if is_mapped:
        made = jax.pmap(local, "data", devices=devices)
        args = jax.tree.map(lambda leaf: np.stack([leaf] * 4), args)
    else:
        mesh = Mesh(np.array(devices), ("data",))
        made = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False)
    graph = viz.trace_step(made, *args)
    assert [edge.target for edge in graph.edges if edge.phase == "metrics"] == ["loss"]


def test_the_state_of_an_optimizer_in_one_tree_with_its_module_is_no_param():
    """The variables of Flax that came out had another name than those that went in, and all counted as params."""
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    definition, state = nnx.split((layer, nnx.Optimizer(layer, optax.adam(0.1), wrt=nnx.Param)))

    def step(state, x, y):
        layer, optimizer = nnx.merge(definition, state)
        loss, grads = nnx.value_and_grad(lambda layer: ((layer(x) - y) ** 2).mean())(layer)
        optimizer.update(layer, grads)
        return nnx.state((layer, optimizer)), loss

    graph = viz.trace_step(step, state, np.ones((2, 8), np.float32), np.ones((2, 4), np.float32))
    assert graph.total_params == 8 * 4 + 4
    assert [(edge.source, edge.target) for edge in graph.edges if edge.phase == "metrics"] == [("loss0", "loss")]


def test_an_optimizer_around_another_goes_by_its_name():
    graph = viz.trace_step(*made_step(tx=optax.lookahead(optax.sgd(0.1), 5, 0.5)))
    assert [one.op for one in graph.optimizers] == ["Lookahead"]


def test_params_of_a_pass_between_are_not_the_new_ones():
    """Sharpness-aware minimization: the second pass is of params that the first one has moved."""

    def step(params, batch):
        first = jax.grad(loss_fn)(params, batch)
        moved = jax.tree.map(lambda p, g: p + 0.1 * g, params, first)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(moved, batch))

    params, _, batch = arguments()
    plot = viz.plot_step(step, params, batch)
    assert [one.op for one in plot.step.optimizers] == ["moved params", "sub"]
    returned = re.findall(r'^\t"([^"]+)" -> "parameters" .*the new parameters', plot.source, re.M)
    assert returned == ["sub"]
    moved = re.findall(r'^\t"([^"]+)" -> "parameters" .*the moved parameters', plot.source, re.M)
    assert moved == [plot.step.optimizers[0].name]
    graph = viz.trace_step(step, params, batch)
    assert len([layer for layer in graph.layers if layer.op == "Loss"]) == 2
    # The first pass moves the params, which the second one reads.
    (mover, update), second = (one.name for one in graph.optimizers), [one.name for one in graph.layers[-9:]]
    assert {(source, target) for source, target in gradient_edges(graph) if target == mover} == {
        (name, mover) for name in NAMES
    }
    assert {source for source, target in gradient_edges(graph) if target == update} <= set(second)
    reads = [(edge.source, edge.target) for edge in graph.edges if edge.phase == "parameters"]
    assert reads == [(mover, name) for name in second if name.startswith(("matmul", "add"))]


@pytest.mark.parametrize("is_mapped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_second_pass_of_sam_is_of_moved_params(is_mapped):
    """The loss was "output[2]", and nothing led from the first pass to the second one."""
    inner = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    tx = optax.contrib.sam(optax.adam(0.1), inner, sync_period=2, opaque_mode=True)

    def update(params, opt_state, batch):
        def gradient(params, _=0):
            grads = jax.grad(loss_fn)(params, batch)
            return jax.lax.pmean(grads, "data") if is_mapped else grads

        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        loss, grads = jax.lax.pmean((loss, grads), "data") if is_mapped else (loss, grads)
        changes, opt_state = tx.update(grads, opt_state, params, grad_fn=gradient)
        return optax.apply_updates(params, changes), opt_state, loss

    params, _, batch = arguments()
    if is_mapped:
        mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
        update = jax.shard_map(update, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False)
    plot = viz.plot_step(update, params, tx.init(params), batch)
    mover, adam = (one.name for one in plot.step.optimizers)
    assert (plot.step[mover].op, adam) == ("moved params", "Adam")
    edges = gradient_edges(plot.step)
    assert {source for source, target in edges if target == mover} == set(NAMES)
    assert {source for source, target in edges if target == adam}.isdisjoint(NAMES)
    sums = [one.layers for one in plot.step.collectives if one.phase == "gradients"]
    assert len(sums) == 2 * is_mapped
    assert all(set(layers) == set(NAMES) or set(layers).isdisjoint(NAMES) for layers in sums)
    assert "loss" in [edge.target for edge in plot.step.edges if edge.phase == "metrics"]
    assert "moved params" in m.words(plot)


def test_the_inner_update_of_maml_is_no_update_of_the_params():
    def step(params, opt_state, batch):
        def adapted(params):
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params, batch))

        grads = jax.grad(lambda params: loss_fn(adapted(params), batch))(params)
        changes, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    plot = viz.plot_step(step, *arguments())
    assert [(one.op, one.detail) for one in plot.step.optimizers] == [("moved params", "6 arrays"), ("SGD", "6 arrays")]
    mover = plot.step.optimizers[0].name
    # The gradients of gradients of two layers were drawn as copies of one, which the other layer lacked.
    assert {(name, mover) for name in NAMES} | {(name, "SGD") for name in NAMES} <= gradient_edges(plot.step)
    ends = re.findall(r'^\t"([^"]+)" -> "parameters" .*the new parameters', plot.source, re.M)
    assert ends == ["SGD"]


def test_two_conditions_behind_an_update_are_two_boxes():
    def grown(params):
        return jax.tree.map(lambda w: w * 2 + 1, params)

    def step(params, opt_state, batch, number):
        params, opt_state, _ = globals()["step"](params, opt_state, batch)
        often = jax.lax.cond(number % 2 == 0, lambda p: jax.tree.map(jnp.tanh, p), lambda p: p, params)
        seldom = jax.lax.cond(number % 9 == 0, grown, lambda p: p, params)
        return often, seldom, opt_state

    graph = viz.trace_step(step, *arguments(), np.int32(1))
    conditions = [edge.target for edge in graph.edges if edge.phase == "optimizer"]
    assert sorted(conditions) == ["cond", "cond: grown"]
    assert {edge.source for edge in graph.edges if edge.phase == "optimizer"} == {"SGD"}
    assert [graph[name].detail for name in ("cond", "cond: grown")] == ["tanh", "2 layers"]
    assert "on a condition" in m.words(viz.plot_step(step, *arguments(), np.int32(1)))


def test_params_that_are_gathered_behind_an_update_are_no_gradients():
    """ZeRO by hand: each device updates its share of a weight, and then gathers the others."""

    def local(p, x):
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p) ** 2))(p)
        share = jax.lax.psum_scatter(grads, "data", tiled=True)
        own = jax.lax.dynamic_slice_in_dim(p, jax.lax.axis_index("data") * 16, 16)
        updates, _ = TX.update(share, TX.init(own), own)
        return jax.lax.all_gather(optax.apply_updates(own, updates), "data", tiled=True)

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    graph = viz.trace_step(step, np.ones((WIDTH, WIDTH), np.float32), np.ones((32, WIDTH), np.float32))
    phases = {one.kind: one.phase for one in graph.collectives}
    assert phases == {"reduce-scatter": "gradients", "all-gather": "optimizer"}


def test_sums_before_a_transform_are_each_of_its_layer():
    """Kind "sharded" gathers what it has summed for `grad_transform`, which reads the gradients of all layers."""
    options = {"kind": "sharded", "grad_transform": optax.clip_by_global_norm(1.0), "devices": jax.devices()[:4]}
    state, made = train.start(arguments()[0], optax.adam(0.1), lambda p, b, rng: (loss_fn(p, b), {}), **options)
    graph = viz.trace_step(made, state, arguments()[2])
    sums = [one for one in graph.collectives if one.phase == "gradients"]
    assert {one.kind for one in sums} == {"reduce-scatter", "all-gather"}
    weights = {"reduce-scatter": WIDTH * WIDTH * 4, "all-gather": WIDTH * WIDTH}
    of_weights = sorted((one.kind, *one.layers) for one in sums if one.bytes == weights[one.kind])
    assert of_weights == sorted((kind, f"layer{number}") for kind in weights for number in range(LAYERS))
    assert [one.op for one in graph.optimizers] == ["Adam"]  # and no box for the number of a device


@pytest.mark.slow
def test_params_that_the_compiler_gathers_are_those_of_the_layer():
    """The engine jit hands whole arrays to its program, which names them otherwise, and XLA fuses what reads them."""
    options = {"devices": jax.devices()[:4], "kind": "sharded", "engine": "jit"}
    state, made = train.start(arguments()[0], optax.adam(0.1), lambda p, batch, rng: (loss_fn(p, batch), {}), **options)
    graph = viz.trace_step(made, state, arguments()[2])
    assert graph.total_params == LAYERS * (WIDTH * WIDTH + WIDTH)  # and not what Adam remembers of them
    layers = {layer.name for layer in graph.layers if layer.params}
    gathers = [one for one in graph.collectives if one.phase == "parameters"]
    assert sum(one.bytes for one in gathers) == LAYERS * WIDTH * WIDTH  # a quarter of the weights, in float32
    assert {name for one in gathers for name in one.layers} == layers


def test_a_metric_is_no_part_of_the_loss():
    """The engine jit sums the loss and the metrics of all devices in one line."""

    def with_accuracy(params, batch, rng):
        return loss_fn(params, batch), {"accuracy": (net(params, batch["x"]).argmax(-1) == 0).mean()}

    state, made = train.start(arguments()[0], TX, with_accuracy, devices=jax.devices()[:4], engine="jit")
    graph = viz.trace_step(made, state, arguments()[2])
    assert [layer.name for layer in graph.layers if layer.op not in ("FullyConnected", "Activation")] == ["loss0"]


@pytest.mark.slow
def test_a_gradient_that_is_in_no_named_sum_does_not_pass_the_wall():
    """On CPUs the convolutions of LeNet are written for one platform and compiled for another."""
    made, args = lenet_step("jit")
    plot = viz.plot_step(made, *args)
    ends = re.findall(r'^\t"([^"]+)" -> "([^"]+)" (.*)', plot.source, re.M)
    layers = {f"{layer.name} (backward)" for layer in plot.step.layers if layer.params}
    assert layers <= {source for source, target, _ in ends if target == "sums"}
    assert {target for source, target, _ in ends if source in layers} <= layers | {"sums"} | {
        f"{layer.name} (backward)" for layer in plot.step.layers
    }
    named = {f"{name} (backward)" for one in plot.step.collectives if one.phase == "gradients" for name in one.layers}
    dashed = {source for source, target, look in ends if target == "sums" and "dashed" in look}
    assert dashed == layers - named
    if dashed:
        assert "of dashed gradients" in m.words(plot)


def test_a_step_of_many_layers_is_one_screen():
    """It was 1,600 points high. Closed blocks say what is sent for them."""
    split = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    block = {f"dense{at}": {name: put(np.ones(size, np.float32)) for name, size in split.items()} for at in range(8)}

    def loss(params, x):
        for name, block in params.items():
            with jax.named_scope(name):
                for at in range(8):
                    x = jnp.tanh(dense(block[f"dense{at}"], x))
        return jnp.square(x).mean()

    def update(params, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

    args = {"first": block, "second": block}, put(np.ones((32, WIDTH), np.float32))
    plot = viz.plot_step(jax.jit(update), *args, repeats=False)
    width, height = map(float, re.search(rb'<svg width="(\d+)pt" height="(\d+)pt"', plot.pipe("svg")).groups())
    assert (width < 1600, height < 1125) == (True, True), [layer.name for layer in plot.step.layers]
    assert len(plot.step.layers) < len(viz.trace_step(jax.jit(update), *args, repeats=False).layers)
    assert plot.step.total_params == 16 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.slow
def test_lenet_of_kind_sharded_is_one_screen_with_the_names_of_its_layers():
    """Its params are cut into rows. It was 15 boxes without names, 1,784 pixels high."""
    options = {"devices": jax.devices()[:4], "kind": "sharded", "optimizer": optax.sgd(0.1)}
    state = train.create_state(kv.from_params(lenet.init(jax.random.key(0)), **options), 0)
    step = train.make_train_step(train.classification_loss(lenet.apply))
    batch = {"image": np.zeros((64, 28, 28, 1), np.float32), "label": np.zeros(64, np.int32)}
    plot = viz.plot_step(step, state, batch)
    assert [layer.name for layer in plot.step.layers if layer.params] == ["conv1", "conv2", "dense1", "dense2"]
    assert len(plot.step.layers) == 11
    assert float(re.search(rb'<svg width="\d+pt" height="(\d+)pt"', plot.pipe("svg"))[1]) < 1125
    # Biases and the smallest weights are in one bucket. Each of their layers says that it waits for it.
    words = m.words(plot)
    assert "all-gather together" in words
    assert "with conv1" in words


def test_layers_without_a_gradient_are_rows_too():
    """A frozen network before the trained one, as of a GAN's discriminator, was 1,479 points high."""
    split = {"w": np.ones((WIDTH, WIDTH), np.float32), "b": np.ones(WIDTH, np.float32)}
    frozen = {name: {f"dense{at}": split for at in range(4)} for name in ("first", "second", "third")}

    def loss(params, x):
        for name, block in frozen.items():
            with jax.named_scope(name):
                for part in block.values():
                    x = jnp.tanh(dense(part, x))
        return jnp.square(dense(params["head"], jax.lax.stop_gradient(x))).mean()

    def update(params, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

    plot = viz.plot_step(update, {"head": split}, np.ones((32, WIDTH), np.float32), repeats=False)
    assert len(plot.step.layers) <= 12, [layer.name for layer in plot.step.layers]
    assert float(re.search(rb'<svg width="\d+pt" height="(\d+)pt"', plot.pipe("svg"))[1]) < 1125


def as_high_as_their_bytes(plot):
    """The live bytes of each box of a layer that has some. The heights are theirs, in one scale."""
    heights = dict(re.findall(r'^\t"([^"]+)" \[pos=.* height="([\d.]+)"', plot.source, re.M))
    parts = {one.name: one.forward for one in plot.step.layers}
    parts |= {one.name + " (backward)": one.backward for one in plot.step.layers if one.backward}
    boxes = {name: part.peak for name, part in parts.items() if part.peak is not None}
    scales = [float(heights[name]) / peak for name, peak in boxes.items()]
    np.testing.assert_allclose(scales, scales[0], rtol=0.01)
    return boxes


def test_boxes_as_high_as_the_bytes_that_are_live_and_what_remat_computes_again():
    def layer(x, w):
        return jax.nn.gelu(x @ w)

    def made(params, x):
        def loss(params):
            hidden = x
            for name in sorted(params):
                hidden = jax.checkpoint(layer)(hidden, params[name])
            return (hidden**2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    params = {f"l{number}": np.ones((16, 16), np.float32) for number in range(3)}
    args = params, np.ones((512, 16), np.float32)
    plot = viz.plot_step(made, *args, repeats=False, height="memory", limit=100_000)
    layers = [layer for layer in plot.step.layers if layer.params]
    assert [layer.name for layer in layers] == [*params]
    assert all(layer.backward is not None and layer.backward.again for layer in layers)
    assert not any(layer.forward.again for layer in layers)
    assert plot.step.memory.total == total(jax.jit(made).lower(*args).compile())
    boxes = as_high_as_their_bytes(plot)
    assert len(boxes) >= 2
    red = re.findall(r'^\t"([^"]+)" .*fillcolor="#d7301f"', plot.source, re.M)
    assert {name for name in red if name in boxes} == {name for name, peak in boxes.items() if peak > 100_000}
    assert "computed again (remat)" in m.words(plot)


def test_a_picture_of_live_bytes_is_one_screen():
    """Boxes are lower there, and a low one has fewer lines. Each is as high as its bytes all the same."""

    def made(params, x):
        loss = lambda params: (functools.reduce(lambda x, w: jax.nn.gelu(x @ w), params, x) ** 2).mean()  # noqa: E731
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    params = [np.ones((64, 64), np.float32)] * 3
    plot = viz.plot_step(made, params, np.ones((2048, 64), np.float32), repeats=False, height="memory")
    assert float(re.search(rb'<svg width="\d+pt" height="(\d+)pt"', plot.pipe("svg"))[1]) <= 1125
    boxes = as_high_as_their_bytes(plot)
    assert len(boxes) >= 8
    for name, peak in boxes.items():
        assert human(peak, "B") in re.search(rf'^\t"{re.escape(name)}" .*', plot.source, re.M)[0]


def test_heat_by_seconds_by_intensity_and_by_memory():
    fn, args = STEPS["single"]()
    seconds = {"layer0": 0.002, "layer0 (backward)": 0.003}
    plot = viz.plot_step(fn, *args, heat=seconds)
    layer = plot.step["layer0"]
    assert (layer.forward.seconds, layer.backward.seconds, plot.step["layer1"].forward.seconds) == (0.002, 0.003, None)
    assert "2 ms" in plot.source
    assert layer.forward.flops_per_byte == layer.forward.flops / layer.forward.bytes
    with pytest.raises(ValueError, match="a layer 'layer_0', which the step lacks; did you mean layer0"):
        viz.plot_step(fn, *args, heat={"layer_0": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize(("heat", "shown"), [("flop/byte", "FLOP/B"), ("memory", "live")])
def test_heat_of_the_program(heat, shown):
    fn, args = STEPS["single"]()
    assert shown in viz.plot_step(fn, *args, heat=heat).source


@pytest.mark.slow
def test_heat_from_a_profile(tmp_path):
    fn, (params, opt_state, batch) = STEPS["data"]()
    params, opt_state, _ = jax.block_until_ready(fn(params, opt_state, batch))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):  # one after the other: emulated devices wait for each other in their collectives
            params, opt_state, _ = jax.block_until_ready(fn(params, opt_state, batch))
    graph = viz.trace_step(fn, params, opt_state, batch, profile=str(tmp_path))
    for layer in graph.layers:
        if layer.params:
            assert 0 < layer.forward.seconds < 10
            assert 0 < layer.backward.seconds < 10
    assert graph.optimizers[0].forward.seconds > 0


@pytest.fixture
def cache(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path / "cache"), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("is_run", [False, True])
def test_a_program_that_was_compiled_from_other_lines(is_run, tmp_path):
    """What jax's cache of programs gives has the lines of the source that it was compiled from."""
    source = """
import jax
def layer(params, x):
    return x @ params["w"] + params["b"][None]
def loss(params, x):
    for _ in range(2):
        x = jax.nn.relu(layer(params, x))
    return (x**2).mean()
def step(params, x):
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, jax.grad(loss)(params, x))
"""
    params, x = {"w": np.ones((6, 6), np.float32), "b": np.ones(6, np.float32)}, np.ones((5, 6), np.float32)
    graphs = []
    for lines in (0, 50):
        file, names = tmp_path / f"after_{lines}.py", {}
        file.write_text("\n" * lines + source)
        exec(compile(file.read_text(), str(file), "exec"), names)
        fn = jax.jit(names["step"])
        if is_run:
            fn(params, x)
        graphs.append(viz.trace_step(fn, params, x))
    peaks = [[layer.forward.peak for layer in graph.layers] for graph in graphs]
    assert peaks[0][0] is not None
    assert peaks[0] == peaks[1]


def test_a_directory_without_a_profile(tmp_path):
    fn, args = STEPS["single"]()
    with pytest.raises(ValueError, match=r"there is no profile \(\*\.xplane\.pb\)"):
        viz.trace_step(fn, *args, profile=str(tmp_path))


def test_a_layer_that_a_step_lacks():
    with pytest.raises(KeyError, match=r"'layer9'.*layer0"):
        plotted("single").step["layer9"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("split", [P("data"), P()])
def test_the_gradient_of_every_layer_is_sent_at_the_layer(split):
    """XLA joins all gradients in one collective, and each device goes on with its own part of them."""

    def attend(params, x):
        q, k, v = (x @ params[name] for name in "qkv")
        return x + jax.nn.softmax(q @ k.mT) @ v @ params["o"]

    fsdp_step = m.training_step(optax.adamw(0.1), lambda p, x: (attend(p[1], attend(p[0], x)) ** 2).mean())
    mesh = Mesh(np.array(jax.devices()), ("data",))
    put = functools.partial(jax.tree.map, lambda x: jax.device_put(x, NamedSharding(mesh, split if x.ndim else P())))
    params = [{name: np.ones((WIDTH, WIDTH), np.float32) for name in "qkvo"} for _ in range(2)]
    x = jax.device_put(np.ones((16, 8, WIDTH), np.float32), NamedSharding(mesh, P("data")))
    graph = viz.trace_step(fsdp_step, put(params), put(optax.adamw(0.1).init(params)), x, repeats=False)
    sent = {name for one in graph.collectives if one.phase == "gradients" for name in one.layers}
    assert sent == {layer.name for layer in graph.layers if layer.params}
    assert len(sent) == 8


def lenet_step(engine="shard_map", tx=None):
    def loss(params, batch, rng):
        return m.lenet_loss(params, batch["image"], batch["label"]), {}

    params = lenet.init(jax.random.key(0))
    state, made = train.start(params, tx or optax.adam(1e-3), loss, devices=jax.devices()[:4], engine=engine)
    return made, (state, {"image": np.zeros((64, 28, 28, 1), np.float32), "label": np.zeros(64, np.int32)})


def transformer_step():
    config = transformer.Config(layers=12, width=64, heads=4, vocabulary=256, positions=16)
    fsdp = parallel.fsdp(("data", "model"), min_size=1, stacked_dims=1)
    rule = parallel.sharding_rules(transformer.TENSOR_PARALLEL, then=fsdp)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    params = transformer.init(jax.random.key(0), config)
    store = kv.from_params(params, optimizer=optax.adam(1e-3), mesh=mesh, sharding=rule)
    made = train.make_train_step(lambda p, b, rng: (transformer.loss(p, b["tokens"]), {}), axis_name=("data",))
    return made, (train.create_state(store, 0), {"tokens": np.zeros((8, config.positions + 1), np.int32)})


def resnet_step():
    def conv(w, x):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def resnet(params, x):
        x = jax.nn.relu(conv(params["stem"], x))
        for block in params["blocks"]:
            x = jax.nn.relu(x + conv(block["b"], jax.nn.relu(conv(block["a"], x))))
        return x.mean((1, 2)) @ params["out"]

    def update(params, batch):
        loss = lambda p: ((resnet(p, batch["image"]) - batch["y"]) ** 2).mean()  # noqa: E731
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    weights = lambda *shape: np.ones(shape, np.float32)  # noqa: E731
    blocks = [{"a": weights(3, 3, 16, 16), "b": weights(3, 3, 16, 16)} for _ in range(4)]
    params = {"stem": weights(3, 3, 3, 16), "blocks": blocks, "out": weights(16, 10)}
    return jax.jit(update), (params, {"image": weights(16, 16, 16, 3), "y": weights(16, 10)})


@pytest.mark.slow
@pytest.mark.parametrize("make", [lenet_step, transformer_step, resnet_step])
def test_larger_steps(make):
    made, args = make()
    plot = viz.plot_step(made, *args)
    graph = plot.step
    assert graph.memory.total == total(made.lower(*args).compile())
    assert graph.memory.is_exact
    assert float(re.search(rb'<svg width="(\d+)pt"', plot.pipe("svg"))[1]) < 1440
    if graph.devices > 1:
        assert any(one.phase == "gradients" for one in graph.collectives)
    if make is transformer_step:
        assert {one.times for one in graph.collectives} == {1, 12}
        assert any("×12" in part for layer in graph.layers for part in layer.scope)


def test_the_page_of_a_step_shows_the_step(tmp_path):
    plot = plotted("data")
    with open(plot.save(tmp_path / "step.html"), encoding="utf-8") as file:
        page = file.read()
    assert "all-reduce" in page.replace("&#45;", "-")
    assert page == plot.html()
    assert plot._repr_mimebundle_()["text/html"].startswith("<iframe data-jaxpar title='")


# ---- live memory: what is live, the gaps that the compiler leaves, and what is said where it does not tell


def places(compiled):
    """The places of temporaries with the times of their values: [start, end, first, last]."""
    program = program_of(compiled)
    buffers, values = memory._buffers(program, compiled.memory_analysis().serialized_buffer_assignment_proto)
    lives = memory._Lives(program, values)
    spans = sorted((one.start, one.end, lives.first(one), lives.last(one)) for one in buffers)
    merged = []  # a value in a loop has several names and one place
    for span in spans:
        if merged and merged[-1][:2] == [*span[:2]] and span[2] <= merged[-1][3] + 1:
            merged[-1][3] = max(merged[-1][3], span[3])
        else:
            merged.append([*span])
    return merged


def placed(values, order):
    """The size of an allocation with these values, each in the smallest hole that is free while it lives."""
    taken = []
    for start, end, first, last in sorted(values, key=order):
        size, holes, covered = end - start, [], 0
        for left, right, _, _ in sorted(one for one in taken if one[2] <= last and first <= one[3]):
            if left - covered >= size:
                holes.append((left - covered, covered))
            covered = max(covered, -(-right // 64) * 64)
        at = min(holes)[1] if holes else covered
        taken.append((at, at + size, first, last))
    return max(right for _, right, _, _ in taken)


def by_size(value):
    return value[0] - value[1], value[2] - value[3], value[2]


def by_time(value):
    return value[2] - value[3], value[0] - value[1], value[2]


LENETS = [(engine, tx) for engine in ("jit", "shard_map") for tx in (optax.sgd(0.1), optax.adam(1e-3))]


@pytest.mark.slow
@pytest.mark.parametrize("make", [transformer_step, *(functools.partial(lenet_step, *options) for options in LENETS)])
def test_what_is_not_live_are_gaps_of_the_placement(make):
    """The times of values that `memory_of` finds, placed by XLA's two orders, need what XLA sets aside."""
    made, args = make()
    compiled = made.lower(*args).compile()
    found, _ = memory.memory_of(program_of(compiled), compiled)
    assert found.is_exact
    assert found.total == total(compiled) == found.peak + found.gaps
    kept = found.total - compiled.memory_analysis().temp_size_in_bytes
    sizes = [kept + placed(places(compiled), order) for order in (by_size, by_time)]
    assert min(abs(size - found.total) for size in sizes) <= 0.02 * found.total
    assert min(sizes) >= found.peak


@pytest.fixture(scope="module")
def program():
    return jax.jit(step).lower(*arguments()).compile()


def test_a_value_is_live_from_the_instruction_that_fills_it_to_its_last_reader(program):
    text = program_of(program)
    names = list(text.computations[text.entry].instructions)
    _, live = memory.memory_of(text, program)
    stats = program.memory_analysis()
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    buffers, _ = memory._buffers(text, stats.serialized_buffer_assignment_proto)
    for time, name in enumerate(names):
        covered = np.zeros(stats.temp_size_in_bytes, bool)
        for one in buffers:
            if names.index(one.name) <= time <= last_reader(text, names, one.name):
                covered[one.start : one.end] = True
        assert live[name] == kept + covered.sum()


def last_reader(text, names, name):
    """Of the text, without loops: views are read in place of what they show."""
    last = names.index(name)
    for other in names:
        if name in text[other].operands:
            is_view = text[other].opcode in ("bitcast", "tuple", "get-tuple-element")
            last = max(last, last_reader(text, names, other) if is_view else names.index(other))
    return last


def test_a_place_of_no_known_instruction_is_not_exact(program):
    read = program_of(program)
    read.names = {number: f"{name}.other" for number, name in read.names.items()}
    assert not memory.memory_of(read, program)[0].is_exact


def test_two_values_in_one_place_at_one_time_are_not_exact(program, monkeypatch):
    monkeypatch.setattr(memory._Lives, "last", lambda lives, buffer: len(lives.order))
    assert not memory.memory_of(program_of(program), program)[0].is_exact


def test_a_backend_that_tells_no_places(program):
    stats = program.memory_analysis()
    names = ("argument", "output", "alias", "temp")
    told = {f"{name}_size_in_bytes": getattr(stats, f"{name}_size_in_bytes") for name in names}
    silent = types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(**told))
    found, live = memory.memory_of(program_of(program), silent)
    assert (found.total, found.peak, found.gaps, found.is_exact) == (total(program), total(program), 0, False)
    assert live == {}


LOOP = """HloModule loop, is_scheduled=true

%asks (at: (s32[], f32[4])) -> pred[] {
  %at = (s32[], f32[4]) parameter(0)
  %n = s32[] get-tuple-element(%at), index=0
  ROOT %more = pred[] compare(%n, %n), direction=LT
}

%does (was: (s32[], f32[4])) -> (s32[], f32[4]) {
  %was = (s32[], f32[4]) parameter(0)
  %m = s32[] get-tuple-element(%was), index=0
  %x = f32[4] get-tuple-element(%was), index=1
  %y = f32[4] negate(%x)
  %z = f32[4] exponential(%y)
  ROOT %next = (s32[], f32[4]) tuple(%m, %z)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  %i = s32[] constant(0)
  %a = f32[4] sine(%p)
  %both = (s32[], f32[4]) tuple(%i, %a)
  %while = (s32[], f32[4]) while(%both), condition=%asks, body=%does
  %b = f32[4] get-tuple-element(%while), index=1
  ROOT %c = f32[4] cosine(%b)
}
"""


def test_what_a_loop_carries_is_free_between_its_last_reader_and_its_next_value():
    values = {(name, 1) for name in ("at", "was", "while")} | {(name, None) for name in "payzc"}
    lives = memory._Lives(program_from(LOOP), values)

    def lifetime(name, index=None):
        buffer = memory._Buffer(0, 0, 16, name, index)
        return lives.order[lives.first(buffer)], lives.order[lives.last(buffer)]

    assert lifetime("a") == ("a", "while")
    assert lifetime("at", 1) == ("at", "more")
    assert lifetime("was", 1) == ("was", "y")  # its place may hold something else here
    assert lifetime("z") == ("z", "next")
    assert lifetime("while", 1) == ("next", "c")


def test_what_a_loop_hands_on_unchanged_is_live_in_all_of_it():
    unchanged = LOOP.replace("tuple(%m, %z)", "tuple(%m, %x)")
    lives = memory._Lives(program_from(unchanged), {(name, None) for name in "payzc"})
    last = lives.last(memory._Buffer(0, 0, 16, "a", None))
    assert lives.order[last] == "c"
