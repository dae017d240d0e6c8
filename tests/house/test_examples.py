"""The scripts of examples/ and the tasks of docs/coming_from.md: the same on one and on four devices, and after a kill.

CI runs three of each so, and the others once. Before a release all of them are run so.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launched import environment

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
RUN = ROOT / "tests/example_run.py"
KILL_AFTER = {"sweep": 6}  # in its second run; the others within their first
# Their noise belongs to a share of the batch, and the shares are fixed.
SAME_BITS = {"vae", "actor_critic", "sweep"}


# The tasks that a page has beside Keras: {title: (data, program in jaxpar, program in Keras)}.
_, _, TEXT = (ROOT / "docs" / "coming_from.md").read_text().partition("\n## Ten tasks beside Keras\n")
TABLE, *SECTIONS = re.split("^### ", TEXT.partition("\n## ")[0], flags=re.MULTILINE)
TASKS = {
    section.partition("\n")[0]: re.findall("^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    for section in SECTIONS
}
# As the page has them.
IMPORTS = "import equinox as eqx, jax, jax.numpy as jnp, jaxpar as jp, numpy as np, optax\nfrom flax import nnx\n"


def run(script, folder, devices, *kill_after, epochs=4):
    """With so many epochs at most of each call of `fit`: what a script learns is for its readers."""
    folder.mkdir(exist_ok=True)
    env = environment(JAX_NUM_CPU_DEVICES=str(devices))
    command = [sys.executable, str(RUN), str(script), str(epochs), *map(str, kill_after)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def result(done):
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    return printed, json.loads(last)


# Noise of a share of the batch, gradients of examples that see each other, a loop of its own.
KILLED = ("vae", "simclr", "sweep", "Mostly without labels", "A recommender from choices", "Survival")


@pytest.mark.slow
@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.stem not in KILLED], ids=lambda path: path.stem)
def test_a_script_runs(script, tmp_path):
    printed, found = result(run(script, tmp_path / "four", 4, epochs=2))
    assert printed
    assert found["devices"] == 4
    assert np.isfinite(found["numbers"]).all()


@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=pytest.mark.slow if s.stem in KILLED else pytest.mark.release) for s in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_a_script_gives_the_same_on_any_number_of_devices_and_after_a_kill(script, tmp_path):
    compare(script, tmp_path)


@pytest.mark.parametrize(
    "title",
    [pytest.param(t, marks=pytest.mark.slow if t in KILLED else pytest.mark.release) for t in TASKS],
)
def test_a_task_of_the_page_gives_the_same_on_any_number_of_devices_and_after_a_kill(title, tmp_path):
    data, program, _ = TASKS[title]
    script = tmp_path / "task.py"
    script.write_text(IMPORTS + data + program)
    compare(script, tmp_path)


def test_the_lines_of_a_task_are_those_of_the_table():
    rows = re.findall(r"^\| \[(.+)\]\(#.+\) \| (\d+) \| (\d+) \|", TABLE, re.MULTILINE)
    counted = [(t, *(str(sum(map(bool, map(str.strip, p.splitlines())))) for p in TASKS[t][1:])) for t in TASKS]
    assert len(rows) == 10
    assert rows == counted


def compare(script, tmp_path):
    printed, one = result(run(script, tmp_path / "one", 1))
    whole, undisturbed = (printed, one) if script.stem in SAME_BITS else result(run(script, tmp_path / "four", 4))
    killed = run(script, tmp_path / "killed", 4, KILL_AFTER.get(script.stem, 3))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again, four = result(run(script, tmp_path / "killed", 4))
    assert (one["devices"], four["devices"]) == (1, 4)
    assert (four["digest"], again[-1]) == (undisturbed["digest"], whole[-1])
    np.testing.assert_allclose(one["numbers"], four["numbers"], rtol=1e-4)
