"""The gallery of the documentation: pictures as their maker draws them, readable on a screen, with right numbers."""

import re
import shutil
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from unittest import mock

import gallery
import jax
import pytest
from gallery import unet
from viz_models import SVG, xla_flops

from jaxpar import viz

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = DOCS / "pictures" / "gallery"
PAGE = (DOCS / "gallery.md").read_text()
POINTS_OF_A_PIXEL, LEAST_SCALE = 0.75, 0.6
WIDEST, HIGHEST = (pixels * POINTS_OF_A_PIXEL / LEAST_SCALE for pixels in (1280, 900))
MOST_INPUTS = 8
MOST_NODES = 40
NAMELESS = re.compile(r"|…|\.\.\.|<lambda>|lambda|fn|f|[\d .…]+|(×\s*\d+\s*)+")


def texts(svg):
    """The words in a picture; where they stand may differ between versions of Graphviz."""
    return sorted(re.findall(r">([^<>\n]+)</text>", svg))


def unrolled(loop):
    return lambda *args, **options: loop(*args, **{**options, "unroll": True})


def flops_of(fn, args):
    """What XLA counts, with loops unrolled: it would count their bodies once."""
    with (
        jax.numpy_rank_promotion("allow"),  # as users have it
        mock.patch("jax.lax.scan", unrolled(jax.lax.scan)),
        mock.patch("jax.lax.fori_loop", unrolled(jax.lax.fori_loop)),
    ):
        return xla_flops(fn, *args)


def flops_of_network(name):
    fn, args, _ = gallery.make(name)
    if name == "diffusion_sampler":
        one, two = (flops_of(partial(unet.sample, steps=steps), args) for steps in (1, 2))
        return one + (unet.STEPS - 1) * (two - one)
    return flops_of(fn, args)


def faults_of_picture(svg):
    """What is wrong with the layout."""
    root = ET.fromstring(svg)
    width, height = (float(root.get(name).removesuffix("pt")) for name in ("width", "height"))
    nodes = [group for group in root.iter(SVG + "g") if group.get("class") == "node"]
    if width > WIDEST or height > HIGHEST:
        yield f"{width:.0f} × {height:.0f} pt"
    for node in nodes:
        words = [(label.text or "").strip() for label in node.iter(SVG + "text")]
        if all(map(NAMELESS.fullmatch, words[:1])):
            yield f"nameless box {node.find(SVG + 'title').text!r}: {words}"
    if len(nodes) > MOST_NODES:
        yield f"{len(nodes)} nodes drawn"


def faults_of_graph(graph, args, params, flops):
    """What is wrong with names and numbers."""
    if len(graph.inputs) > min(MOST_INPUTS, len(args)):
        yield f"{len(graph.inputs)} ovals for {len(args)} arguments"
    for node in graph.nodes:
        if NAMELESS.fullmatch(node.name) or NAMELESS.fullmatch(node.kind):
            yield f"a node without a name: {node.name!r} ({node.op!r})"
    if graph.total_params != params:
        yield f"{graph.total_params:,} parameters, there are {params:,}"
    if abs(graph.total_flops - flops) > 0.02 * flops:
        yield f"{graph.total_flops:.4g} FLOPs, XLA counts {flops:.4g} ({graph.total_flops / flops - 1:+.1%})"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")
@pytest.mark.parametrize("name", gallery.MODELS)
def test_a_picture_can_be_read_and_its_numbers_are_right(name):
    fn, args, options = gallery.make(name)
    with jax.numpy_rank_promotion("allow"):
        plot = viz.plot_network(fn, *args, **options)
    svg = plot.pipe("svg", encoding="utf-8")
    assert list(faults_of_picture(svg)) == []
    flops = flops_of_network(name)
    assert list(faults_of_graph(plot.network, args, gallery.MODELS[name].params, flops)) == []
    kept = (PICTURES / f"{name}.svg").read_text()
    assert texts(svg) == texts(kept), f"run python docs/pictures/make_gallery.py {name}"


def test_the_page_has_every_network_with_its_parameters():
    numbers = {}
    for section in PAGE.partition("\n## Steps and runs")[0].split("\n## ")[1:]:
        (name,) = re.findall(r"\(pictures/gallery/(\w+)\.svg\)", section)
        numbers[name] = int(re.search(r"([\d,]+) parameters", section)[1].replace(",", ""))
    assert numbers == {name: model.params for name, model in gallery.MODELS.items()}
    assert {path.stem for path in PICTURES.iterdir()} == set(gallery.MODELS)


def test_what_counts_as_a_fault():
    """The checks see what they are there for."""
    label = '<g class="node"><title>conv1</title><text font-size="12">{}</text></g>'
    picture = '<svg xmlns="http://www.w3.org/2000/svg" width="{}pt" height="{}pt">{}</svg>'
    assert list(faults_of_picture(picture.format(900, 1100, label.format("Convolution")))) == []
    assert list(faults_of_picture(picture.format(900, 1100, label.format("…")))) == ["nameless box 'conv1': ['…']"]
    assert list(faults_of_picture(picture.format(900, 1100, label.format("7")))) == ["nameless box 'conv1': ['7']"]
    assert list(faults_of_picture(picture.format(900, 1100, label.format("mul") * 69))) == ["69 nodes drawn"]
    assert list(faults_of_picture(picture.format(2400, 800, label.format("mul")))) == ["2400 × 800 pt"]
    assert list(faults_of_picture(picture.format(900, 1200, label.format("mul")))) == ["900 × 1200 pt"]
