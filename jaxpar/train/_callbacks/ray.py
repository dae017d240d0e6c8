"""The records and checkpoints of a run, reported to Ray Train."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import checkpoint, distributed
from ..._core import files
from .callback import Callback
from .history import Record


def to_ray() -> RayReport:
    """A callback of `fit` that reports records and checkpoints to Ray Train.

    All workers call `ray.train.report(metrics, checkpoint=...)` for each record, as soon as its checkpoint is on disk.
    Ray copies the checkpoint of worker 0, and `checkpoint.restore` reads the copy. Ray keeps metrics only with a
    checkpoint, so give `fit` a `checkpoint_dir`.

    When Ray restarts the workers, `fit` resumes from the newest checkpoint there. If the last reported one is missing,
    as on a new host, it is first copied back. An epoch that was saved but not reported is reported then.

    Outside a Ray Train worker the callback does nothing, so the same script runs anywhere, also without Ray.

    Example:
        >>> from jaxpar import train
        >>> report = train.to_ray()
        >>> # state, history = train.fit(..., checkpoint_dir="/shared/run", callbacks=report)
    """
    return RayReport()


class RayReport(Callback):
    """What `to_ray` returns."""

    def __init__(self) -> None:
        self._directory: checkpoint._AnyPath | None = None
        self._name = ""  # of the directory, in what is reported
        self._reported = -1  # the step of the last report
        self._missing: list[Record] = []  # records of earlier workers, which were not reported

    def before_resume(self, directory: checkpoint._AnyPath) -> None:
        """Put the checkpoint that was reported last into the directory, if it is not there."""
        # A worker begins in a directory of its Ray session. So a relative directory is another one in the next session,
        # and what was reported is found by the part that the user gave. An earlier jaxpar reported the absolute path.
        self._directory, self._name = directory, files.shown(directory)
        ray = distributed._ray_worker()
        if ray is None:
            return
        directory = _on_disk(directory)
        # Only those of this directory: a worker may run several `fit`s, and each reports its own.
        names = (self._name, str(directory))
        ours = [r for r in ray.get_all_reported_checkpoints() if r.metrics.get("checkpoint_dir") in names]
        if not ours:
            return
        last = max(ours, key=lambda reported: reported.metrics["step"])
        self._reported = last.metrics["step"]
        with last.checkpoint.as_directory() as copy:
            checkpoint._adopt(Path(copy), directory)

    def on_start(self, history: Sequence[Record]) -> None:
        """Find the records that were not reported. They are when all workers have begun."""
        self._missing = [record for record in history if record["step"] > self._reported]

    def on_saved(self, record: Record, written: Callable[[], checkpoint._AnyPath | None]) -> None:
        """Report a record. `written()` waits for its checkpoint, and gives the path in worker 0."""
        ray = distributed._ray_worker()
        if ray is not None:
            self._report_missing(ray)
            self._report(ray, record, written())

    def on_end(self, history: Sequence[Record]) -> None:
        """Report what is left where no step was to be made."""
        ray = distributed._ray_worker()
        if ray is not None and sys.exception() is None:
            self._report_missing(ray)

    def _report_missing(self, ray: Any) -> None:
        missing, self._missing = self._missing, []
        for record in missing:
            saved = None if self._directory is None else checkpoint._of_step(self._directory, record["step"])
            self._report(ray, record, saved)

    def _report(self, ray: Any, record: Record, path: checkpoint._AnyPath | None) -> None:
        metrics = {name: value for name, value in record.items() if value is not None}
        # So that `before_resume` of another call finds its own among all that the workers have reported.
        if self._directory is not None:
            metrics["checkpoint_dir"] = self._name
        with contextlib.ExitStack() as stack:
            saved = None
            if path is not None and ray.get_context().get_world_rank() == 0:
                saved = ray.Checkpoint.from_directory(stack.enter_context(checkpoint._whole_copy(_on_disk(path))))
            ray.report(metrics, checkpoint=saved)  # Ray has its copy on return
        self._reported = record["step"]


def _on_disk(path: checkpoint._AnyPath) -> Path:
    if isinstance(path, Path):
        return path
    raise ValueError(
        f"fit: checkpoint_dir is in a bucket ({path}), and train.to_ray hands checkpoints on to Ray as files; give a "
        "folder as checkpoint_dir, and the bucket to Ray, as storage_path of its RunConfig"
    )
