"""Every Python block of the documentation runs as it stands, page by page, and every link leads somewhere.

A page is one namespace, its ```python blocks run in their order, in an empty directory. Data sets are cut to their
first 256 examples (a page says `epochs=5` and means it, but not here), and a page sees eight emulated devices. A
block with `<!-- not run: why -->` in the line before it is not run. What an ```output block
holds is what the Python block before it printed.
"""

import dataclasses
import gc
import importlib
import inspect
import re
import runpy
import shutil
import sys
import types
from pathlib import Path

import jax
import pytest

import jaxpar
from jaxpar import data
from jaxpar.data._load import DEBIAN_DIR

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
PICTURES = ROOT / "docs" / "pictures"
OF_PAGES = {"two_moons.svg"}  # drawn by the code of a page
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*$")
# Pages that compile for one to 26 seconds: the second row runs them.
NAMES = (
    "a_run_is_a_value async checkpoints cluster coming_from compression data engines evaluate first_model from_mxnet "
    "own_loops plan questions recipes same_bits seeing_a_run training tutorial viz your_model"
)
LONG = tuple(f"docs/{name}.md" for name in NAMES.split())
EXAMPLES = 256
needs_data = pytest.mark.skipif(
    not DEBIAN_DIR.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)


@dataclasses.dataclass
class Block:
    page: Path
    line: int
    text: str
    excuse: str | None
    output: str | None = None


def blocks(page):
    source = page.read_text()
    found = []
    for fence in FENCE.finditer(source):
        before = source[: fence.start()]
        text = re.sub(f"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE)
        if fence["language"] == "python":
            excuse = NOT_RUN.search(before.rstrip("\n").rpartition("\n")[2])
            found.append(Block(page, before.count("\n") + 2, text, excuse and excuse[1]))
        elif fence["language"] == "output":
            found[-1].output = text
    return found


def name(page):
    return str(page.relative_to(ROOT))


def steady(printed):
    """Without what differs between machines in a line of `fit`: its times, and digits after the second."""
    digits = r"(\.\d\d)\d+|[\d.,]+ (s|examples/s)"
    return re.sub("^epoch .*$", lambda line: re.sub(digits, r"\1", line[0]), printed, flags=re.MULTILINE)


def cut(load):
    """`data.load` of the first examples of a split."""

    def load_some(name="fashion_mnist", split="train", **options):
        return load(name, split if "[" in split else f"{split}[:{EXAMPLES}]", **options)

    return load_some


def marks(page):
    data_marks = [needs_data, pytest.mark.data] if "data.load(" in page.read_text() else []
    return [*data_marks, pytest.mark.slow] if name(page) in LONG else data_marks


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks(page)) for page in PAGES if any(not block.excuse for block in blocks(page))],
    ids=name,
)
@pytest.mark.usefixtures("quick_collections")
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "load", cut(data.load))
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with jax.numpy_rank_promotion("allow"):  # as readers have it
        for block in blocks(page):
            if not block.excuse:
                # Lines are numbered as in the page, so that a traceback names the line to mend.
                exec(compile("\n" * (block.line - 1) + block.text, name(page), "exec"), vars(module))
                printed = steady(capsys.readouterr().out)
                assert block.output is None or steady(block.output) == printed, f"{name(page)}:{block.line}"
    for picture in OF_PAGES & {path.name for path in tmp_path.iterdir()}:
        assert texts(tmp_path / picture) == texts(PICTURES / picture), f"keep the {picture} that {name(page)} draws"
    vars(module).clear()
    gc.collect()


def test_a_page_that_counts_on_several_devices_makes_them():
    """The tests have eight. On a reader's laptop JAX has one, and the page would print other numbers, or fail."""
    counts_on_several = re.compile(r"len\(jax\.devices\(\)\)|jax\.devices\(\)\[(?!:1\])")
    without = []
    for page in PAGES:
        makes_them = False
        for block in blocks(page):
            makes_them |= "use_cpu_devices(" in block.text
            if counts_on_several.search(block.text) and not makes_them and not block.excuse:
                without.append(f"{name(page)}:{block.line}")
    assert not without


def test_what_counts_as_a_block(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n\n<!-- not run: too long -->\n```python\nb\n```\n"
        "- list\n\n    ```python\n    c = 1\n    ```\n\n    ```output\n    1\n    ```\n\n```bash\nd\n```\n"
    )
    assert [(b.line, b.text, b.excuse, b.output) for b in blocks(page)] == [
        (2, "a = 1\n", None, None),
        (7, "b\n", "too long", None),
        (12, "c = 1\n", None, "1\n"),
    ]


# What fits beside two columns of links in a window of 1280 pixels; docs/.ruff.toml has it too.
WIDEST = 96


def test_code_fits_its_page():
    wide = []
    for page in PAGES[1:]:
        for fence in FENCE.finditer(page.read_text()):
            if fence["language"] not in ("text", "output"):  # the site folds those
                wide += [f"{name(page)}: {line}" for line in fence["text"].splitlines() if len(line) > WIDEST]
    assert not wide


def anchors(page):
    """The anchors of a page's headings, as both GitHub and MkDocs make them for plain words."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                dead.append(f"{name(page)}: {target}")
    assert not dead


def test_each_feature_in_the_table_has_a_test():
    """A row ends with a link to a test that there is, where jaxpar has the feature."""
    page = ROOT / "docs" / "coming_from.md"
    table = page.read_text().partition("| | jaxpar | Keras | Lightning | Accelerate | tested by |\n")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    assert len(rows) > 20
    for feature, ours, *_, test in rows:
        if ours == "no":
            assert not test, feature
            continue
        name, path = re.fullmatch(r"\[`(\w+)`\]\(\.\./(tests/\S+\.py)\)", test).groups()
        assert f"\ndef test_{name}(" in (ROOT / path).read_text(), feature


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")
def test_the_pictures_are_what_their_script_draws(tmp_path):
    runpy.run_path(str(PICTURES / "make.py"))["main"](tmp_path)
    kept = {path.name: texts(path) for path in PICTURES.glob("*.svg") if path.name not in OF_PAGES}
    del kept["rooms.svg"]  # drawn by tools/draw_rooms.py
    drawn = {path.name: texts(path) for path in tmp_path.iterdir()}
    if jax.__version_info__ < (0, 11):
        # The pictures are of the newest jax. There XLA keeps less of a step with remat.
        del drawn["memory_remat.svg"], kept["memory_remat.svg"]
    assert drawn == kept, "run python docs/pictures/make.py"


def texts(picture):
    """The words in a picture. Places may differ between versions of Graphviz, and live bytes between those of jax."""
    found = sorted(re.findall(r">([^<>\n]+)</text>", picture.read_text()))
    return [text for text in found if not text.endswith(" live")]


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"(\S+\.md)\b", config.partition("\nnav:")[2]))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}


def public_modules():
    """Each module that a user may name: those of the package, and the models."""
    names = [name for name in dir(jaxpar.models) if inspect.ismodule(getattr(jaxpar.models, name))]
    models = [f"jaxpar.models.{name}" for name in names if not name.startswith("_")]
    return [*(f"jaxpar.{name}" for name in jaxpar._MODULES), *models]


def test_tab_shows_what_the_reference_has():
    """`dir` of each public module is the API alone, and the reference has all of it."""
    page = "".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
    listed = dict(re.findall(r"^::: (jaxpar[\w.]*)\n    options: \{members: \[(.*?)\]", page, re.MULTILINE))
    shown = {
        module: {name for name in dir(importlib.import_module(module)) if not name.startswith("_")}
        for module in public_modules()
    }
    of_models = {module.rpartition(".")[2] for module in shown if module.startswith("jaxpar.models.")}
    shown["jaxpar.models"] -= of_models  # each has a page
    assert shown == {module: set(names.split(", ")) for module, names in listed.items()}
    assert {name for name in dir(jaxpar) if not name.startswith("_")} == set(jaxpar._MODULES)
