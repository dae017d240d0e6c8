"""The programs of steps are those that were written down: a change of one is meant, and its commit says why.

`python tools/programs.py --pairs tests/house/programs/jax-VERSION.json` writes them down again.
"""

import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "programs.py"))
WRITTEN = Path(__file__).parent / "programs" / f"jax-{importlib.metadata.version('jax')}.json"


def test_any_two_choices_meet():
    met = TOOL["_count_pairs"](TOOL["pairs"]())
    for pair, number in TOOL["_count_pairs"](TOOL["all_cases"]()).items():
        assert met[pair] >= min(2, number), pair
    assert met.total() < 60 * 15


@pytest.mark.slow
@pytest.mark.skipif(not WRITTEN.exists(), reason=f"no programs of {WRITTEN.stem} are written down")
def test_the_programs_are_those_written_down(tmp_path):
    """On another processor XLA may fuse other operations, so there only what is sent and donated is compared."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tools" / "programs.py", "--pairs", tmp_path / "found.json"]
    subprocess.run(command, env=env, check=True)
    old, new = (json.loads(file.read_text()) for file in (WRITTEN, tmp_path / "found.json"))
    if old.pop("processor") != new.pop("processor"):
        for records in (old, new):
            for record in records.values():
                for field in ("text", "operations", "bits"):
                    record.pop(field, None)
    assert old.keys() == new.keys()
    assert not TOOL["differences"](old, new)
