"""Runs notebooks in place, so that what is committed is what the code prints today.

    python tools/run_notebooks.py notebooks/*.ipynb
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook at `path`, executed from its own folder by this interpreter's kernel; raises where a cell does."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # wall-clock times: they would differ on every run
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(run(Path(name)), name)
        print(f"ran {name}")
