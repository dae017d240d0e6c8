"""What is wrong with a picture of the gallery: too wide, too small, nameless boxes, walls of ovals, wrong numbers."""

import re
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from functools import partial
from unittest import mock

import jax

from gallery import FIRST_LEVEL, MODELS, make, unet
from jaxpar import viz

SVG = "{http://www.w3.org/2000/svg}"
WIDEST, SCREEN, POINTS_OF_A_PIXEL = 1200, 1280, 0.75
SMALLEST_LABEL = 8.0
MOST_INPUTS = 8
MOST_NODES = FIRST_LEVEL + MOST_INPUTS
NAMELESS = re.compile(r"|…|\.\.\.|<lambda>|lambda|fn|f|[\d .…]+|(×\s*\d+\s*)+")


def draw(name):
    """The plot of a network, and its SVG."""
    fn, args, options = make(name)
    with jax.numpy_rank_promotion("allow"):  # as users have it
        plot = viz.plot_network(fn, *args, **options)
    return plot, plot.pipe("svg", encoding="utf-8")


def unrolled(loop):
    return lambda *args, **options: loop(*args, **{**options, "unroll": True})


@contextmanager
def unrolled_loops():
    """XLA would count the body of a loop once."""
    with (
        mock.patch("jax.lax.scan", unrolled(jax.lax.scan)),
        mock.patch("jax.lax.fori_loop", unrolled(jax.lax.fori_loop)),
    ):
        yield


def cost_analysis(fn, args):
    """XLA's FLOPs for a GPU: for a CPU, convolutions have other formulas."""
    with jax.numpy_rank_promotion("allow"), unrolled_loops():
        traced = jax.jit(fn).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).cost_analysis()["flops"]


def xla_flops(name):
    """What XLA counts, with each loop as often as it runs."""
    fn, args, _ = make(name)
    if name == "diffusion_sampler":
        one, two = (cost_analysis(partial(unet.sample, steps=steps), args) for steps in (1, 2))
        return one + (unet.STEPS - 1) * (two - one)
    return cost_analysis(fn, args)


def faults_of_picture(svg):
    """What is wrong with the layout."""
    root = ET.fromstring(svg)
    width = float(root.get("width").removesuffix("pt"))
    nodes = [group for group in root.iter(SVG + "g") if group.get("class") == "node"]
    if width > WIDEST:
        yield f"{width:.0f} pt wide"
    scale = min(1.0, SCREEN * POINTS_OF_A_PIXEL / width)
    small = 0
    for node in nodes:
        texts = list(node.iter(SVG + "text"))
        words = [(text.text or "").strip() for text in texts]
        if all(map(NAMELESS.fullmatch, words[:1])):
            yield f"nameless box {node.find(SVG + 'title').text!r}: {words}"
        small += not texts or max(float(text.get("font-size")) for text in texts) * scale < SMALLEST_LABEL
    if small:
        yield f"{small} labels under {SMALLEST_LABEL:g} pt on a screen of {SCREEN} px"
    if len(nodes) > MOST_NODES:
        yield f"{len(nodes)} nodes drawn"


def faults_of_graph(name, graph, flops):
    """What is wrong with names and numbers."""
    _, args, _ = make(name)
    if len(graph.inputs) > min(MOST_INPUTS, len(args)):
        yield f"{len(graph.inputs)} ovals for {len(args)} arguments"
    for node in graph.nodes:
        if NAMELESS.fullmatch(node.name) or NAMELESS.fullmatch(node.kind):
            yield f"a node without a name: {node.name!r} ({node.op!r})"
    if graph.total_params != MODELS[name].params:
        yield f"{graph.total_params:,} parameters, there are {MODELS[name].params:,}"
    if abs(graph.total_flops - flops) > 0.02 * flops:
        yield f"{graph.total_flops:.4g} FLOPs, XLA counts {flops:.4g} ({graph.total_flops / flops - 1:+.1%})"


def faults(name):
    """All that is wrong with one picture, and its SVG."""
    plot, svg = draw(name)
    return [*faults_of_picture(svg), *faults_of_graph(name, plot.network, xla_flops(name))], svg
