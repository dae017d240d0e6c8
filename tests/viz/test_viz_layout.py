"""What large networks become: regions as scopes, names in boxes, loops, blocks that begin where a person would cut."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import viz_models as m
from test_viz_trace import check

from jaxpar import viz
from jaxpar.viz._trace import whole

CONV = partial(jax.lax.conv_general_dilated, padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def convolve(w, x, stride=1):
    return jax.nn.relu(CONV(x, w, (stride, stride)))


def dense_net(join):
    """Two dense blocks of six and twelve layers, whose widths grow, so that nothing repeats."""
    params, width = {"stem": {"w": m.Spec((3, 3, 3, 8), m.f32)}}, 8
    for block, count in enumerate((6, 12)):
        for layer in range(count):
            sizes = {"w1": (1, 1, width, 16), "w2": (3, 3, 16, 4)}
            params[f"conv{block}_block{layer}"] = {name: m.Spec(size, m.f32) for name, size in sizes.items()}
            width += 4

    def apply(params, x):
        x = convolve(params["stem"]["w"], x)
        for block, count in enumerate((6, 12)):
            parts = [x]
            for layer in range(count):
                one = params[f"conv{block}_block{layer}"]
                new = convolve(one["w2"], convolve(one["w1"], x))
                parts = [*parts, new] if join == "list" else [x, new]
                x = jnp.concatenate(parts, -1)
        return x.mean((1, 2))

    return apply, params, m.Spec((2, 16, 16, 3), m.f32)


def test_regions_above_the_limit_have_the_names_of_their_parameters():
    graph = check(viz.trace(*dense_net("chain"), max_nodes=40))
    blocks = [*(f"conv0_block{n}" for n in range(6)), *(f"conv1_block{n}" for n in range(12))]
    assert [node.name for node in graph.layers] == ["stem", *blocks, "mean0"]
    assert {node.detail for node in graph.layers if node.name in blocks} == {"5 layers"}


@pytest.mark.parametrize("join", ["list", "chain"])
def test_dense_blocks_close_whole(join):
    graph = check(viz.trace(*dense_net(join), max_nodes=8))
    assert [node.name for node in graph.layers] == ["stem", "conv0_block0-5", "conv1_block0-11", "mean0"]
    assert graph["conv1_block0-11"].detail.endswith(" layers")
    assert graph.total_flops == viz.trace(*dense_net(join), max_nodes=None).total_flops


def test_regions_without_names_say_what_is_in_them():
    def fn(x):
        for width in range(30, 0, -1):
            x = x[:, :width] + jnp.tanh(jnp.sin(x[:, :width]) @ jnp.ones((width, width)))
        return x

    graph = check(viz.trace(fn, m.Spec((2, 40), m.f32), max_nodes=35))
    names = [node.op for node in graph.layers]
    assert 10 <= len(names) <= 35
    assert not any("..." in name or "…" in name for name in names)
    assert any(re.fullmatch(r"(\d+ )?\w+ \+ \d+", name) for name in names)


def test_a_mask_for_all_blocks_does_not_hide_them():
    def fn(params, x, mask):
        kept = mask > 0
        for n in range(20):
            y = jnp.where(kept, x[:, : 30 - n] @ params[f"b{n}"]["w"], 0.0)
            x = x[:, : 30 - n] + jnp.tanh(y @ params[f"b{n}"]["v"])
        return x

    sizes = [30 - n for n in range(20)]
    params = {f"b{n}": {name: m.Spec((size, size), m.f32) for name in "wv"} for n, size in enumerate(sizes)}
    graph = check(viz.trace(fn, params, m.Spec((2, 30), m.f32), m.Spec((2, 1), m.f32), max_nodes=30))
    assert [node.name for node in graph.layers if re.fullmatch(r"b\d+", node.name)] == [f"b{n}" for n in range(20)]


def test_the_whole_net_has_regions_as_scopes_and_loses_nothing():
    fn, params, x = dense_net("chain")
    grad = jax.grad(lambda params, x: fn(params, x).sum())
    plain, graph = viz.trace(grad, params, x, max_nodes=None), check(whole(grad, params, x))
    assert [(n.name, n.op, n.flops) for n in graph.nodes] == [(n.name, n.op, n.flops) for n in plain.nodes]
    assert graph["conv0_block3/w2"].scope == ("conv0_block3",)
    assert graph["conv0_block3/w2 (backward)"].scope == ("conv0_block3",)
    children = {}
    for node in (node for node in graph.layers if not node.is_backward):
        for depth in range(len(node.scope) + 1):
            children.setdefault(node.scope[:depth], set()).add((*node.scope, node.name)[: depth + 1])
    assert max(map(len, children.values())) <= 24


def test_a_gradient_closes_with_its_layers():
    fn, args = m.network("gradient")
    graph = check(viz.trace(fn, *args, max_nodes=6))
    assert [node.name for node in graph.layers] == [
        "conv1-2", "dense1-2", "dense1-2 (backward)", "conv1-2 (backward)"
    ]  # fmt: skip
