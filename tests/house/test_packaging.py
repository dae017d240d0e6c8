"""The wheel and the sdist: what is in them, what they say of themselves, what importing the package loads."""

import email.parser
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from launched import python

import jaxpar

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxpar").rglob("*.py")}
PAGE = {f"jaxpar/viz/_page/{name}" for name in ("page.html", "page.css", "page.js", "still.css")}
PAGE |= {f"jaxpar/viz/_page/{name}.js" for name in ("reading", "places", "drawing", "events", "still", "theme")}
PAGE |= {"jaxpar/train/notebook.mplstyle"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The names in the wheel, those in the sdist without its folder, and the wheel's metadata."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    assert wheel.name == f"jaxpar-{jaxpar.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        message = email.parser.Parser().parsestr(archive.read(metadata).decode())
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    return names, sources, message


def test_the_wheel_holds_the_package_and_nothing_else(built):
    names, _, _ = built
    info = f"jaxpar-{jaxpar.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == MODULES | PAGE | {"jaxpar/py.typed"}
    assert f"{info}licenses/LICENSE" in names


def test_the_sdist_holds_what_the_tests_need(built):
    _, sources, _ = built
    wanted = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "mkdocs.yml"}
    for folder, pattern in (("tests", "*.py"), ("docs", "*"), ("notebooks", "*.ipynb"), ("tools", "*.py")):
        wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob(pattern) if p.is_file()}
    left_behind = ("__pycache__", ".ipynb_checkpoints", ".ruff_cache")
    wanted = {name for name in wanted if not any(word in name for word in left_behind)}
    assert (wanted | MODULES | PAGE | {"jaxpar/py.typed"}) <= sources
    assert not [name for name in sources if re.search(r"__pycache__|\.ruff_cache|\.venv|^runs/|^site/|^dist/", name)]


def test_the_metadata(built):
    *_, metadata = built
    assert metadata["Name"] == "jaxpar"
    assert metadata["Version"] == jaxpar.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.15"}
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert len(metadata["Summary"]) < 120
    needed = [name for name in metadata.get_all("Requires-Dist") if "extra ==" not in name]
    assert sorted(needed) == sorted(PROJECT["dependencies"])
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])


def test_every_dependency_is_pinned_in_the_constraints():
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    named = {re.match(r"[\w.-]+", need)[0].lower().replace("_", "-") for group in groups for need in group}
    assert named <= {name.lower().replace("_", "-") for name in pinned}


def test_importing_adds_nothing_but_itself_to_importing_jax():
    """`import jaxpar` alone loads one module (test_house); here, all of its modules bring no other package."""
    program = (
        "import sys, jax, jax.numpy, jax.sharding, jax.extend.core; before = set(sys.modules); import jaxpar; "
        "[getattr(jaxpar, name) for name in dir(jaxpar)]; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    third = {name for name in python("-c", program).stdout.split() if name not in sys.stdlib_module_names}
    assert third <= {"jaxpar", "jax"}  # of jax, small modules that some versions load later
