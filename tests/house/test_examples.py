"""The scripts of examples/: short, the same on one and on four devices, and the same after they were killed."""

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launched import environment

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
MOST_STATEMENTS = 12
RUN = ROOT / "tests/example_run.py"
KILL_AFTER = {"sweep": 15}  # in its second run; the others within their first
# Their noise belongs to a share of the batch, and the shares are fixed.
SAME_BITS = {"vae", "actor_critic", "sweep"}

every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def run(script, folder, devices, *kill_after):
    folder.mkdir(exist_ok=True)
    env = environment(JAX_NUM_CPU_DEVICES=str(devices))
    command = [sys.executable, str(RUN), str(script), *map(str, kill_after)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def result(done):
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    return printed, json.loads(last)


def names_jp(node):
    return any(isinstance(n, ast.Name) and n.id == "jp" for n in ast.walk(node))


def statements(tree):
    """The innermost statements of a script that name `jp`."""
    inner = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and names_jp(node)]
    return [n for n in inner if not any(isinstance(m, ast.stmt) and m is not n and names_jp(m) for m in ast.walk(n))]


@every_script
def test_a_script_is_short(script):
    assert len(statements(ast.parse(script.read_text()))) <= MOST_STATEMENTS


def test_there_are_twelve():
    assert len(SCRIPTS) == 12


@pytest.mark.slow
@every_script
def test_a_script_gives_the_same_on_any_number_of_devices_and_after_a_kill(script, tmp_path):
    printed, one = result(run(script, tmp_path / "one", 1))
    whole, undisturbed = (printed, one) if script.stem in SAME_BITS else result(run(script, tmp_path / "four", 4))
    killed = run(script, tmp_path / "killed", 4, KILL_AFTER.get(script.stem, 3))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again, four = result(run(script, tmp_path / "killed", 4))
    assert (one["devices"], four["devices"]) == (1, 4)
    assert (four["digest"], again[-1]) == (undisturbed["digest"], whole[-1])
    np.testing.assert_allclose(one["numbers"], four["numbers"], rtol=1e-4)
