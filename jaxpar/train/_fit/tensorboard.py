"""The records of a run as event files for TensorBoard, a callback of `fit`."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import jax

from . import event_file
from .metrics_files import PathLike, Record, Sink, append, named


def to_tensorboard(directory: PathLike) -> TensorBoard:
    """A sink that writes TensorBoard's event files, without TensorFlow or TensorBoard.

    Numbers of the training are called `train/loss`, `train/accuracy` and so on, those of the test data
    `test/loss`, `test/accuracy`, and those of steps, by `on_step=sink.on_step`, `step/loss`. The axis is the step.

    Args:
        directory: one for each run; look at them with `tensorboard --logdir` or, in a notebook,
            `%load_ext tensorboard` and `%tensorboard --logdir DIRECTORY`.

    Raises:
        OSError: when it is called: nothing can be written there.

    Example:
        >>> import os, tempfile, types
        >>> directory = tempfile.mkdtemp()
        >>> to_tensorboard(directory)(types.SimpleNamespace(step=3), {"epoch": 1, "loss": 0.5})
        >>> [name[:20] for name in os.listdir(directory)]
        ['events.out.tfevents.']
    """
    return TensorBoard(directory)


class TensorBoard(Sink):
    """What `to_tensorboard` returns."""

    def __init__(self, directory: PathLike):
        self.directory: Path = Path(directory)
        self._file: Path | None = None

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of a step as `step/loss` and so on; beside the epochs, if you like."""
        if jax.process_index() == 0:
            self._scalars(step, {f"step/{name}": value for name, value in metrics.items()})

    def _write(self, record: Record) -> None:
        tagged = {_tag(name): value for name, value in record.items() if name not in ("step", "epoch", "interrupted")}
        self._scalars(record["step"], {tag: value for tag, value in tagged.items() if isinstance(value, int | float)})

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        now = time.time()
        with named(self.directory):
            if self._file is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                # TensorBoard reads the files in the order of their names.
                file = self.directory / f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}"
                append(file, event_file.header(now, step))
                self._file = file
            append(self._file, event_file.scalars(now, step, values))


def _tag(name: str) -> str:
    return name.replace("test_", "test/", 1) if name.startswith("test_") else f"train/{name}"
