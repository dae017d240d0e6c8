"""Runs notebooks in place, so that what is committed is what the code prints today.

python tools/run_notebooks.py notebooks/*.ipynb
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

KERNEL = "python3"


@contextmanager
def this_interpreter() -> Iterator[None]:
    """The kernel `python3` is this interpreter, whatever kernels are installed on the machine."""
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "Python 3", "language": "python"}
    before = os.environ.get("JUPYTER_PATH")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "kernels", KERNEL)
        place.mkdir(parents=True)
        (place / "kernel.json").write_text(json.dumps(spec))
        os.environ["JUPYTER_PATH"] = folder if before is None else os.pathsep.join([folder, before])
        try:
            yield
        finally:
            if before is None:
                del os.environ["JUPYTER_PATH"]
            else:
                os.environ["JUPYTER_PATH"] = before


def run(path: Path, *, timeout: int = 1800) -> nbformat.NotebookNode:
    """The notebook at `path` with new outputs, executed from its own folder by this interpreter.

    Args:
        path: an .ipynb file; it is not changed.
        timeout: seconds a cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.resolve().parent)}}
    with this_interpreter():
        NotebookClient(notebook, timeout=timeout, kernel_name=KERNEL, resources=resources).execute()
    return tidied(notebook)


def tidied(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what is no result: wall-clock times, widgets, the traces of progress bars. Pictures become smaller."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            shown = [output for output in cell.outputs if not _is_widget(output)]
            cell.outputs = [output for output in map(_tidied_output, _joined(shown)) if output is not None]
    return notebook


def _is_widget(output: nbformat.NotebookNode) -> bool:
    return "application/vnd.jupyter.widget-view+json" in output.get("data", {})


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """One stream in a row: where a long text is cut depends on the moment."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _tidied_output(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    if "image/png" in output.get("data", {}):
        output.data["image/png"] = small_png(output.data["image/png"])
    if output.output_type == "stream":
        # A carriage return begins the line anew; what stood there before was seen for a moment.
        output.text = "\n".join(line.rpartition("\r")[2] for line in output.text.split("\n"))
        return output if output.text else None
    return output


def small_png(text: str) -> str:
    """The picture, in base64, with a palette of 256 colours: a third of the bytes, and the eye sees no difference.

    A picture with transparent parts, or one that becomes no smaller, stays as it is.
    """
    picture = Image.open(io.BytesIO(base64.b64decode(text)))
    if picture.mode == "RGBA" and picture.getextrema()[3][0] == 0:
        return text
    buffer = io.BytesIO()
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return min(text, base64.b64encode(buffer.getvalue()).decode(), key=len)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(run(Path(name)), name)
        print(f"ran {name}")
