"""The gallery of the documentation: pictures as their maker draws them, readable on a screen, with right numbers."""

import re
import shutil
from pathlib import Path

import gallery
import pytest
from gallery import checks

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = DOCS / "pictures" / "gallery"
PAGE = (DOCS / "gallery.md").read_text()


def texts(svg):
    """The words in a picture; where they stand may differ between versions of Graphviz."""
    return sorted(re.findall(r">([^<>\n]+)</text>", svg))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")
@pytest.mark.parametrize("name", gallery.MODELS)
def test_a_picture_can_be_read_and_its_numbers_are_right(name):
    found, svg = checks.faults(name)
    assert found == []
    kept = (PICTURES / f"{name}.svg").read_text()
    assert texts(svg) == texts(kept), f"run python docs/pictures/make_gallery.py {name}"


def test_the_page_has_every_network_with_its_parameters():
    numbers = {}
    for section in PAGE.split("\n## ")[1:]:
        (name,) = re.findall(r"\(pictures/gallery/(\w+)\.svg\)", section)
        numbers[name] = int(re.search(r"([\d,]+) parameters", section)[1].replace(",", ""))
    assert numbers == {name: model.params for name, model in gallery.MODELS.items()}
    assert {path.stem for path in PICTURES.iterdir()} == set(gallery.MODELS)


def test_what_counts_as_a_fault():
    """The checks see what they are there for."""
    label = '<g class="node"><title>conv1</title><text font-size="12">{}</text></g>'
    picture = '<svg xmlns="http://www.w3.org/2000/svg" width="{}pt">{}</svg>'
    assert list(checks.faults_of_picture(picture.format(900, label.format("Convolution")))) == []
    assert list(checks.faults_of_picture(picture.format(900, label.format("…")))) == ["nameless box 'conv1': ['…']"]
    assert list(checks.faults_of_picture(picture.format(900, label.format("7")))) == ["nameless box 'conv1': ['7']"]
    assert list(checks.faults_of_picture(picture.format(900, label.format("mul") * 69))) == ["69 nodes drawn"]
    wide = list(checks.faults_of_picture(picture.format(2400, label.format("mul"))))
    assert wide == ["2400 pt wide", "1 labels under 8 pt on a screen of 1280 px"]
