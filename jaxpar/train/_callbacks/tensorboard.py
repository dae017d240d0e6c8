"""The records of a run as event files of TensorBoard, written by its own package."""

from __future__ import annotations

import io
import socket
import time
from pathlib import Path
from typing import Any

import jax

from ..._core import files
from ..._core.calls import answers
from .history import Record
from .metrics_files import PathLike, Sink, explain_errors


@answers("to_tensorboard")
def to_tensorboard(directory: PathLike) -> TensorBoard:
    """A callback of `fit` that writes event files for TensorBoard.

    Metrics of the training have the tags `train/loss`, `train/accuracy` and so on. Those of an evaluation have
    `test/loss` or `eval/loss`, and those of steps, by `on_step=board.on_step`, `step/loss`. The axis is the step.

    A run that makes steps again, after a crash, replaces what earlier files in the directory have of them.

    Args:
        directory: one for each run. Look at it with `tensorboard --logdir` or, in a notebook, `%load_ext tensorboard`
            and `%tensorboard --logdir DIRECTORY`.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.
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
        # tensorboard's own EventFileWriter writes in a thread, so a full disk is an error much later, and loads
        # TensorFlow where it is installed. Its messages and its records need neither.
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "to_tensorboard writes event files by the package tensorboard: pip install 'jaxpar[tensorboard]'"
            ) from error
        self.directory: Path = Path(directory)
        self._messages: Any = event_pb2
        self._writer: Any = RecordWriter
        self._file: Path | None = None

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step as `step/loss` and so on. The directory may be the one of the epochs."""
        if jax.process_index() == 0:
            self._write_scalars(step, {f"step/{name}": value for name, value in metrics.items()})

    def _write(self, record: Record) -> None:
        numbers = {
            tag(name): float(value)
            for name, value in record.items()
            if name not in ("step", "epoch") and isinstance(value, int | float) and not isinstance(value, bool)
        }
        self._write_scalars(record["step"], numbers)

    def _write_scalars(self, step: int, values: dict[str, float]) -> None:
        now = time.time()
        with explain_errors(self.directory):
            if self._file is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                # TensorBoard reads the files in the order of their names.
                file = self.directory / f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}"
                # A start at a step makes TensorBoard drop what earlier files have from that step on.
                files.append(file, self._records({"file_version": "brain.Event:2"}, self._start(now, step)))
                self._file = file
            summary = {"value": [{"tag": tag, "simple_value": value} for tag, value in values.items()]}
            files.append(self._file, self._records({"wall_time": now, "step": step, "summary": summary}))

    def _start(self, now: float, step: int) -> dict[str, Any]:
        return {"wall_time": now, "step": step, "session_log": {"status": self._messages.SessionLog.START}}

    def _records(self, *events: dict[str, Any]) -> bytes:
        """The events as they are in a file."""
        content = io.BytesIO()
        for event in events:
            self._writer(content).write(self._messages.Event(**event).SerializeToString())
        return content.getvalue()


def tag(name: str) -> str:
    """The name of a value with the data that it is of.

    >>> tag("loss"), tag("test_loss"), tag("eval_loss")
    ('train/loss', 'test/loss', 'eval/loss')
    """
    return f"{name[:4]}/{name[5:]}" if name.startswith(("test_", "eval_")) else f"train/{name}"
