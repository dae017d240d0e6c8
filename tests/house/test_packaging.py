"""The wheel and the sdist: what is in them, what they say of themselves, what importing the package loads."""

import email.parser
import os
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
REPOSITORY = "https://example.org/owner/jaxpar"  # where a release would come from
PAGE = {f"jaxpar/viz/_page/{name}" for name in ("page.html", "page.css", "page.js", "still.css")}
PAGE |= {f"jaxpar/viz/_page/{name}.js" for name in ("reading", "places", "drawing", "events", "still", "theme")}
PAGE |= {"jaxpar/train/notebook.mplstyle"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The names in the wheel, those in the sdist without its folder, and the wheel's metadata."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    environment = {**os.environ, "JAXPAR_REPOSITORY": REPOSITORY}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment)
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
    assert {f"{info}licenses/LICENSE", f"{info}licenses/NOTICE"} <= names


def test_the_sdist_holds_what_builds_the_wheel_and_nothing_else(built):
    _, sources, _ = built
    papers = {"README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "NOTICE"}
    build = {"pyproject.toml", "tools/pypi.py", ".gitignore", "PKG-INFO"}
    assert sources == MODULES | PAGE | {"jaxpar/py.typed"} | papers | build


def test_the_metadata(built):
    *_, metadata = built
    assert metadata["Name"] == "jaxpar"
    assert metadata["Version"] == jaxpar.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert [url for url in metadata.get_all("Project-URL") if REPOSITORY not in url] == []
    assert len(metadata["Summary"]) < 120
    needed = [name for name in metadata.get_all("Requires-Dist") if "extra ==" not in name]
    assert sorted(needed) == sorted(PROJECT["dependencies"])
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])


def test_readme_on_pypi_has_whole_addresses(built):
    """A picture is the file itself, and a page what shows it. All else is the README."""
    *_, metadata = built
    text, tag = metadata.get_payload(), f"v{jaxpar.__version__}"
    pictures = f"{REPOSITORY}/raw/{tag}/docs/pictures"
    assert f'srcset="{pictures}/step_dark.svg"' in text
    assert f'src="{pictures}/step.svg"' in text
    assert f"]({pictures}/training.png)" in text
    assert f"[the tutorial]({REPOSITORY}/blob/{tag}/docs/tutorial.md)" in text
    targets = re.findall(r'\]\(([^)]+)|src(?:set)?="([^"]+)', text)
    assert [target for pair in targets for target in pair if target and not target.startswith("https://")] == []
    relative = text.replace(f"{REPOSITORY}/raw/{tag}/", "").replace(f"{REPOSITORY}/blob/{tag}/", "")
    assert relative == (ROOT / "README.md").read_text()


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
