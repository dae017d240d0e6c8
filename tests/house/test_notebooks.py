"""Every notebook runs from start to end, in a copy of its own, with this interpreter."""

import base64
import re
import runpy
import struct
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUN_NOTEBOOK = runpy.run_path(str(ROOT / "tools" / "run_notebooks.py"))["run"]


def _text(notebook):
    """What each cell printed or showed as text."""
    return [
        "".join(o.text if o.output_type == "stream" else o.get("data", {}).get("text/plain", "") for o in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


# Most of a minute each: notebooks 02 and 03 compile many programs, the others start and kill processes. 04 draws big
# networks; tests/viz and docs/viz.md have its calls.
LONG = "02 03 04 05 06 07 08 09 10".split()
# Each trains by code of a user, on 1 and 4 devices, and goes on after a kill.
KINDS = [path for path in NOTEBOOKS if path.stem[:2] in ("02", "06", "07", "08", "09")]
# Fewer examples than a reader trains on, in cells that write a script.
SHORTER = {
    "02": {
        "train[:2048]": "train[:768]",
        "test[:1000]": "test[:256]",
        "train[:10240]": "train[:640]",
        "images, epochs=epochs, batch_size=256": "images, epochs=epochs, batch_size=64",
        "checkpoint_every=20": "checkpoint_every=5",
        "step == 65": "step == 15",
    },
    "03": {"train[:2048]": "train[:512]", "test[:1000]": "test[:256]"},
    "05": {
        "train[:5120]": "train[:256]",
        "batch_size=256,\\n": "batch_size=64,\\n",
        "[:2560]": "[:512]",
        "epochs=2, batch_size=256": "epochs=2, batch_size=32",
    },
    "06": {
        "65 * 2048": "65 * 832",
        "windows[:1792]": "windows[:768]",
        "windows[1792:]": "windows[768:]",
        "windows[1800": "windows[800",
        "step == 45": "step == 20",
        "checkpoint_every=20": "checkpoint_every=8",
    },
    "10": {
        "train[:4096]": "train[:512]",
        "test[:2000]": "test[:256]",
        "BAD = 300": "BAD = 42",
        "keep_every=100": "keep_every=20",
    },
    "09": {"0, 20000)": "0, 2560)", "20000, 22000)": "20000, 20500)", "60, 1060)": "60, 560)"},
}
RUN = [pytest.param(p, marks=pytest.mark.slow if p.stem[:2] in LONG else ()) for p in NOTEBOOKS]


def _check_promises(path, texts):
    """1 and 4 devices have the same losses, and the run that was killed has gone on to the same bits."""
    # LeNet's first gradients are near zero. Adam makes steps of full size of them, and of their rounding.
    most = 1e-3 if path.stem.startswith("02") else 1e-4
    shown = "\n".join(texts)
    differences = [float(number) for number in re.findall(r"difference (?:in +\d+ steps: )?(\d\S*)", shown)]
    assert differences
    assert max(differences) < most
    assert "exit status -9 newest checkpoint killed/" in shown
    assert re.findall("(params|losses) equal, bit for bit: (.*)", shown) == [("params", "True"), ("losses", "True")]


def test_committed_runs_keep_what_they_promise():
    for path in KINDS:
        _check_promises(path, _text(nbformat.read(path, as_version=4)))


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    copy, text = tmp_path / path.name, path.read_text()
    for whole, part in SHORTER.get(path.stem[:2], {}).items():
        assert whole in text
        text = text.replace(whole, part)
    copy.write_text(text)
    monkeypatch.setenv("JAXPAR_NOTEBOOK_QUICK", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("JAX_NUM_CPU_DEVICES", "MPLBACKEND"):  # conftest's; a notebook sets its own
        monkeypatch.delenv(name, raising=False)
    notebook = RUN_NOTEBOOK(copy, timeout=300)  # raises where a cell does
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    if path in KINDS:
        _check_promises(path, _text(notebook))
    if path.stem == "01_kvstore":  # nothing in it depends on speed, luck or the number of epochs
        assert _text(notebook) == _text(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_whole_and_name_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    shown = "".join(str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", "")) for o in outputs)
    assert not [word for word in ("/home/", "/root/", "/tmp/", "/usr/", "site-packages") if word in shown]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_pictures_are_seen_in_a_notebook_that_is_not_trusted_and_are_small(path):
    """JupyterLab drops image/svg+xml there."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    shown = [output["data"] for cell in cells for output in cell.outputs if "data" in output]
    assert not [data for data in shown if "image/svg+xml" in data and "image/png" not in data]
    for picture in [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]:
        width, height = struct.unpack(">II", picture[16:24])
        assert picture.startswith(b"\x89PNG")
        assert (width <= 1000, height <= 2400, len(picture) <= 80_000) == (True, True, True)
