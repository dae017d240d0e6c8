"""The records of a run, written elsewhere: JSON lines, TensorBoard, Weights & Biases, MLflow.

Each is a `Logger`: `log(step, metrics)` and `close()`. A new place is a subclass with `_write`, and where it needs them
with `_open`, `_write_media` and `_close`. To `fit` a logger is a function of (state, record) with three hooks beside.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._core import checks, files
from ..._core.text import say_news
from .._step.state import TrainState
from .history import SPEEDS, History, Record, import_for, metric_names
from .media import Image, Media, Text, png

PathLike = str | os.PathLike[str]
_SCALARS = (jax.Array, np.ndarray, np.generic)  # of a loop of the user's own. `fit` gives numbers of Python
_WANDB_AXIS = "fit/step"
_EVENTS = re.compile(r"events\.out\.tfevents\..+\.([0-9a-f]{16}|own)-(\d+)")
_MLFLOW_WORDS = ("databricks", "databricks-uc", "uc")  # its tracking URIs that are neither addresses nor paths


class Logger:
    """A callback of `fit` that writes each record, in process 0. Its `on_step` writes the metrics of each step."""

    _place: Path | None = None  # a file or a directory, for errors
    _of_steps = "step/"  # before the names of the metrics of steps
    _is_open = False
    _has_said = False  # that the place has a step already
    _id: str | None = None  # of the run of `fit`. None in a loop of the user's own
    _resumed = False  # whether that run goes on from a checkpoint

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write numbers of a step, and images and texts, by their names. The place is opened before the first ones."""
        if jax.process_index() != 0:  # all processes have the same numbers, and would each write them
            return
        media = {name: value for name, value in metrics.items() if isinstance(value, Media)}
        metrics = {
            name: value.item() if isinstance(value, _SCALARS) else value
            for name, value in metrics.items()
            if name not in media
        }
        with contextlib.nullcontext() if self._place is None else explain_errors(self._place):
            if not self._is_open:
                self._open(step)
                self._is_open = True
            if metrics:
                self._write(step, metrics)
            if media:
                self._write_media(step, media)

    def close(self) -> None:
        """Close the place. What is logged later opens it again."""
        if self._is_open:
            self._is_open = False  # first: a place that fails here is not closed once more
            self._close()

    # What a place does. A run that goes on after a crash makes some steps again. So that nothing is there twice,
    # `_open` drops what the place has from its step on, or `_write` leaves out what is there.

    def _open(self, step: int) -> None:
        """Open the place for a run that writes from `step` on."""

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _write_media(self, step: int, media: Mapping[str, Media]) -> None:
        """Write images and texts, by names such as `eval/samples`. A place that has none leaves them out."""

    def _close(self) -> None:
        """End the run at the place."""

    def _row(self, record: Record) -> Mapping[str, Any]:
        """The numbers of a record, by names such as `train/loss`."""
        also = [name for name in ("seconds", "skipped", "bad_records", *SPEEDS) if record.get(name) is not None]
        return {tag(name): float(record[name]) for name in (*metric_names(record), *also)}

    def _say_known(self, run: str, step: int) -> None:
        """Report, once, that a run has this step already."""
        if not self._has_said:
            self._has_said = True
            say_news(f"{run} already has step {step}, which is not written again; use a new run for another training")

    # What `fit` calls.

    def __call__(self, state: TrainState, record: Record) -> None:
        """Write the record of an epoch: `callback(state, record)`."""
        self.log(record["step"] if "step" in record else int(state.step), self._row(record))

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step as `step/loss` and so on: `fit(..., on_step=logger.on_step)`."""
        self.log(step, {f"{self._of_steps}{name}": value for name, value in metrics.items()})

    def on_media(self, step: int, media: Mapping[str, Media]) -> None:
        """Write the images and texts of an evaluation, before its record."""
        self.log(step, {tag(name): value for name, value in media.items()})

    def on_run(self, identity: str, resumed: bool) -> None:
        """Learn which run it is: what another one wrote stays."""
        self._id, self._resumed = identity, resumed

    def on_end(self, history: History) -> None:
        """Close the place. Another run opens it again."""
        self.close()
        self._id, self._resumed = None, False


@contextlib.contextmanager
def explain_errors(path: Path, what: str = "metrics") -> Generator[None]:
    """A block whose `OSError` says what cannot be written, where, and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"{what} cannot be written to {path} ({reason}); choose another place or make room") from error


def tag(name: str) -> str:
    """The name of a value with the data that it is of: train/loss, test/loss, eval/loss."""
    return f"{name[:4]}/{name[5:]}" if name.startswith(("test_", "eval_")) else f"train/{name}"


# Files.


def to_jsonl(path: PathLike) -> JsonLines:
    """A callback of `fit` that writes each record as a JSON line.

    Args:
        path: a file. Missing parent directories are created. A run that goes on drops its own lines of later steps.
            Lines of other runs stay before those of this run, and a line on standard output reports them. Which run
            wrote which lines is in a hidden file beside it.

    Raises:
        OSError: raised by `fit`: the file cannot be written. Earlier lines stay unchanged.
        ValueError: the path ends in .csv. Raised by `fit`: the file has other content.

    Example:
        >>> import pathlib, tempfile, types
        >>> path = tempfile.mkdtemp() + "/metrics.jsonl"
        >>> to_jsonl(path)(types.SimpleNamespace(step=3), {"epoch": 1, "loss": float("nan"), "accuracy": None})
        >>> print(pathlib.Path(path).read_text(), end="")
        {"step": 3, "epoch": 1, "loss": "NaN", "accuracy": null}
    """
    return JsonLines(path)


class _Line(NamedTuple):
    text: bytes
    step: int
    owner: str  # the run that wrote it. "" where that is not known


class JsonLines(Logger):
    """What `to_jsonl` returns."""

    _of_steps = ""

    def __init__(self, path: PathLike):
        self.path: Path = files.as_path(path, "to_jsonl: path")
        if self.path.suffix.lower() in (".csv", ".tsv"):
            raise ValueError(
                f"to_jsonl: {path} must end in .jsonl, for JSON lines; a table is train.to_pandas(history).to_csv(path)"
            )
        self._place = self.path

    def _row(self, record: Record) -> Mapping[str, Any]:
        return record

    def _open(self, step: int) -> None:
        self._begin(step, [])

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        files.append(self.path, _lines([{**metrics} if "step" in metrics else {"step": step, **metrics}]))

    def _begin(self, step: int, records: Sequence[Record]) -> None:
        """Drop the lines of this run from `step` on, and append these records. The lines of other runs stay."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self.path.is_file() and not self.path.is_dir():  # /dev/stdout, a pipe
            files.append(self.path, _lines(records))
            return

        # The lines that are there, each with its step and the run that wrote it. A crash may have cut the last one. A
        # hidden file has [[position in bytes, run], ...], one for each place where the lines of a run begin.
        owners_path = self.path.with_name(f".{self.path.name}.runs")
        content = self.path.read_bytes() if self.path.is_file() else b""
        try:
            owner_from = {int(position): str(run) for position, run in json.loads(owners_path.read_bytes())}
        except (OSError, ValueError, TypeError, RecursionError):  # then who wrote the lines is not known
            owner_from = {}
        lines: list[_Line] = []
        position, owner = 0, ""
        try:
            for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
                owner = owner_from.get(position, owner)
                lines.append(_Line(line, int(json.loads(line)["step"]), owner))
                position += len(line)
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self.path} has lines that are not JSON records with a step; choose another file, such as "
                "metrics.jsonl"
            ) from None

        # Which of them are of this run. Of lines without an owner only their steps are known: who begins after the
        # first of them goes on with them.
        goes_on = self._resumed or step > min((line.step for line in lines), default=step)

        def is_own(line: _Line) -> bool:
            return goes_on if not line.owner or self._id is None else line.owner == self._id

        kept = [line for line in lines if not is_own(line) or line.step < step]
        if jax.process_index() == 0 and not all(map(is_own, lines)):
            say_news(f"{self.path} has the records of another run; those of this run follow them")
        elif len(kept) < len(lines) and not self._resumed and self._id is not None:
            count = len(lines) - len(kept)
            say_news(f"{self.path} has {count} records of an earlier call of this run, which are replaced")

        # First who owns what: after a crash in between it is right for all lines before the first that is dropped. What
        # follows the lines that are kept is of this run.
        if self._id is not None:
            begins: list[tuple[int, str]] = []
            position = 0
            for line in [*kept, _Line(b"", step, self._id)]:
                if not begins or begins[-1][1] != line.owner:
                    begins.append((position, line.owner))
                position += len(line.text)
            files.replace(owners_path, json.dumps(begins).encode() + b"\n")
        files.replace(self.path, b"".join(line.text for line in kept) + _lines(records))


class MetricsFile(JsonLines):
    """The file of `fit(metrics_file=)`: it gets the whole history of this run, once."""

    def on_start(self, history: History) -> None:
        """Write the epochs before this call of `fit`, in the place of what this run wrote before."""
        if jax.process_index() == 0:
            with explain_errors(self.path):
                self._begin(-1, history)
            self._is_open = True


def _lines(records: Sequence[Record]) -> bytes:
    return "".join(json.dumps(_strict(record), allow_nan=False) + "\n" for record in records).encode()


def _strict(value: object) -> Any:
    """The value with words for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_tensorboard(directory: PathLike) -> TensorBoard:
    """A callback of `fit` that writes event files for TensorBoard.

    Metrics have tags such as `train/loss`, `test/loss` and `eval/loss`. With `on_step=board.on_step`, metrics of steps
    have tags such as `step/loss`. The axis is the step. The values of steps that a run repeats after a crash replace
    those of earlier files.

    Args:
        directory: one directory for each run.

    Raises:
        ModuleNotFoundError: tensorboard is not installed. OSError: raised by `fit`: the directory is not writable.

    Example:
        >>> import os, tempfile, types
        >>> directory = tempfile.mkdtemp()
        >>> to_tensorboard(directory)(types.SimpleNamespace(step=3), {"epoch": 1, "loss": 0.5})
        >>> [name[:20] for name in os.listdir(directory)]
        ['events.out.tfevents.']
    """
    return TensorBoard(directory)


class TensorBoard(Logger):
    """What `to_tensorboard` returns."""

    def __init__(self, directory: PathLike):
        # tensorboard's own EventFileWriter writes in a thread, so a full disk is an error much later, and loads
        # TensorFlow where it is installed. Its messages and its records need neither.
        package = "'jaxpar[tensorboard]'"
        self._messages: Any = import_for("to_tensorboard", "tensorboard.compat.proto.event_pb2", package)
        writer = import_for("to_tensorboard", "tensorboard.summary.writer.record_writer", package)
        self._writer: Any = writer.RecordWriter
        self.directory: Path = files.as_path(directory, "to_tensorboard: directory")
        self._place = self._file = self.directory

    def _open(self, step: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # Whether the run that begins at this step wrote all event files that are there.
        matches = [_EVENTS.fullmatch(path.name) for path in self.directory.glob("events.out.tfevents.*")]
        if self._id is None:  # a loop of the user's own: who begins later than the first goes on
            first = min((int(match[2]) for match in matches if match), default=-1)
            goes_on = None not in matches and first < step
        else:  # None: a file of another program, or of an earlier jaxpar
            goes_on = all(self._resumed if match is None else match[1] == self._id for match in matches)
        if not goes_on:
            say_news(
                f"{self.directory} has the events of another run, which TensorBoard shows too; give each run its own"
            )

        # TensorBoard reads the files in the order of their names. A start at a step makes it drop what earlier files
        # have from that step on, those of other runs too.
        now = time.time()
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{self._id or 'own'}-{step}"
        self._file = self.directory / name
        start = {"wall_time": now, "step": step, "session_log": {"status": self._messages.SessionLog.START}}
        files.append(self._file, self._records({"file_version": "brain.Event:2"}, *([start] if goes_on else [])))

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        summary = {"value": [{"tag": name, "simple_value": value} for name, value in metrics.items()]}
        files.append(self._file, self._records({"wall_time": time.time(), "step": step, "summary": summary}))

    def _write_media(self, step: int, media: Mapping[str, Media]) -> None:
        values = list[dict[str, Any]]()
        for name, shown in media.items():
            if isinstance(shown, Image):
                for i, pixels in enumerate(shown.pixels()):
                    height, width, channels = pixels.shape
                    image = {"height": height, "width": width, "colorspace": channels}
                    values.append({"tag": f"{name}/{i}", "image": {**image, "encoded_image_string": png(pixels)}})
            elif isinstance(shown, Text):
                texts = [text.encode() for text in shown.texts()]
                tensor = {"dtype": "DT_STRING", "string_val": texts, "tensor_shape": {"dim": [{"size": len(texts)}]}}
                values.append({"tag": name, "metadata": {"plugin_data": {"plugin_name": "text"}}, "tensor": tensor})
        event = {"wall_time": time.time(), "step": step, "summary": {"value": values}}
        files.append(self._file, self._records(event))

    def _records(self, *events: dict[str, Any]) -> bytes:
        """The events as they are in a file."""
        content = io.BytesIO()
        for event in events:
            self._writer(content).write(self._messages.Event(**event).SerializeToString())
        return content.getvalue()


# Trackers.


def to_wandb(project: str | None = None, **options: Any) -> WeightsAndBiases:
    """A callback of `fit` that writes the records to Weights & Biases.

    It needs the package wandb. Names and axis are as in `to_tensorboard`. The run begins with the first record and ends
    with `fit`. If a run of your own is open, `to_wandb()` without arguments logs into it, with the axis `fit/step`, and
    leaves it open. With arguments, a run beside it is opened.

    Args:
        project, options: arguments of `wandb.init`, such as `name="first"`, `mode="offline"`, `dir="runs"`. With
            `id="..."` and `resume="allow"`, a resumed `fit` continues the same run. Steps that the run already has are
            not written again, and one line reports that.

    Example:
        board = train.to_wandb("numbers", mode="offline")
        state, history = train.fit(..., callbacks=board, on_step=board.on_step)
    """
    if project is not None:
        checks.text(project, "train.to_wandb", "project")
    return WeightsAndBiases(project, options)


class WeightsAndBiases(Logger):
    """What `to_wandb` returns."""

    _is_users = False  # whether the user opened the run

    def __init__(self, project: str | None, options: dict[str, Any]):
        self._wandb: Any = import_for("to_wandb", "wandb", "'jaxpar[wandb]'")
        self._options = {"project": project, **options}
        if options.get("dir") is not None:
            self._options["dir"] = str(files.as_path(options["dir"], "to_wandb: dir"))
        self.run: Any = None

    def _open(self, step: int) -> None:
        # `wandb.init` gives back a run of the user's that is open, whatever the options say.
        open_run = getattr(self._wandb, "run", None)
        options = {name: value for name, value in self._options.items() if value is not None}
        self._is_users = open_run is not None and (not options or open_run.id == options.get("id"))
        if self._is_users:
            self.run = open_run
            # It counts its steps itself, so those of `fit` are a metric of their own, and the axis of the others.
            for names in ("train/*", "test/*", "eval/*", f"{self._of_steps}*"):
                self.run.define_metric(names, step_metric=_WANDB_AXIS)
        elif open_run is None:
            self.run = self._wandb.init(**self._options)
        else:
            self.run = self._wandb.init(**{"reinit": "create_new", **self._options})
            if self.run is open_run:
                raise RuntimeError(
                    f"to_wandb: run {open_run.id} is open, and this wandb gave it back in place of a new one; call "
                    "wandb.finish() before, or give no options"
                )

    def _write_media(self, step: int, media: Mapping[str, Media]) -> None:
        logged: dict[str, Any] = {}
        for name, shown in media.items():
            if isinstance(shown, Image):
                # wandb takes a grey image without an axis of channels.
                pixels = [image[..., 0] if image.shape[2] == 1 else image for image in shown.pixels()]
                logged[name] = [self._wandb.Image(image) for image in pixels]
            elif isinstance(shown, Text):
                logged[name] = self._wandb.Table(columns=["text"], data=[[text] for text in shown.texts()])
        self._write(step, logged)

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        # wandb drops what is logged for a step before its last one, and only warns of it.
        if self._is_users:
            self.run.log({**metrics, _WANDB_AXIS: step})
        elif step >= self.run.step:
            self.run.log({**metrics}, step=step)
        else:
            self._say_known(f"to_wandb: run {self.run.id}", step)

    def _close(self) -> None:
        if not self._is_users:  # who opened it closes it
            self.run.finish()
        self.run = None


def to_mlflow(
    experiment: str | None = None,
    *,
    tracking_uri: PathLike | None = None,
    run_name: str | None = None,
    run_id: str | None = None,
) -> MLflow:
    """A callback of `fit` that writes the records to MLflow.

    It needs the package mlflow, or mlflow-skinny. Names and axis are as in `to_tensorboard`. MLflow's global settings
    stay unchanged.

    Args:
        experiment: the name of the experiment, which is created if needed. None: MLflow's default experiment.
        tracking_uri: a server, or a database such as `sqlite:///runs.db`, which needs the full package mlflow. None:
            MLflow's setting.
        run_name: a name for the new run.
        run_id: the run to continue, as in `to_wandb`, in place of a new one. It is in `board.run_id` after a record.

    Example:
        board = train.to_mlflow("numbers", tracking_uri="sqlite:///runs.db")
        state, history = train.fit(..., callbacks=board, on_step=board.on_step)
    """
    if experiment is not None:
        checks.text(experiment, "train.to_mlflow", "experiment")
    return MLflow(experiment, tracking_uri, run_name, run_id)


class MLflow(Logger):
    """What `to_mlflow` returns."""

    def __init__(self, experiment: str | None, uri: PathLike | None, run_name: str | None, run_id: str | None):
        mlflow = import_for("to_mlflow", "mlflow", "'jaxpar[mlflow]'")
        if uri is not None and ":" not in str(uri) and uri not in _MLFLOW_WORDS:  # MLflow takes a folder too
            uri = files.as_path(uri, "to_mlflow: tracking_uri").as_uri()
        self._client: Any = mlflow.MlflowClient(tracking_uri=None if uri is None else str(uri))
        self._metric: Any = mlflow.entities.Metric
        self._experiment, self._new_name = experiment, run_name
        self.run_id: str | None = run_id
        # The last step that the run had of each metric, where the run was there before.
        self._last_steps: dict[str, int] | None = None

    def _open(self, step: int) -> None:
        if self.run_id is None:
            experiment = "0"
            if self._experiment is not None:
                existing = self._client.get_experiment_by_name(self._experiment)
                experiment = existing.experiment_id if existing else self._client.create_experiment(self._experiment)
            self.run_id = self._client.create_run(experiment, run_name=self._new_name).info.run_id
        else:
            self._client.update_run(self.run_id, status="RUNNING")
            self._last_steps = {}

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        # MLflow keeps both of two values of one step. So those that the run had are asked for, once for each metric.
        if self._last_steps is not None:
            for name in metrics.keys() - self._last_steps.keys():
                steps = [metric.step for metric in self._client.get_metric_history(self.run_id, name)]
                self._last_steps[name] = max(steps, default=-1)
        last_steps = self._last_steps or {}
        new = {name: value for name, value in metrics.items() if step > last_steps.get(name, -1)}
        if len(new) < len(metrics):
            self._say_known(f"to_mlflow: run {self.run_id}", step)
        now = int(time.time() * 1000)  # milliseconds, as MLflow counts
        if new:
            self._client.log_batch(self.run_id, [self._metric(name, value, now, step) for name, value in new.items()])

    def _write_media(self, step: int, media: Mapping[str, Media]) -> None:
        # Under the names of files, so that a step that a run repeats after a crash replaces what it wrote.
        for name, shown in media.items():
            if isinstance(shown, Image):
                for i, pixels in enumerate(shown.pixels()):
                    pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
                    self._client.log_image(self.run_id, pixels, f"{name}/{step:08}_{i}.png")
            elif isinstance(shown, Text):
                text = "\n\n".join(shown.texts())
                self._client.log_text(self.run_id, text, f"{name}/{step:08}.txt")

    def _close(self) -> None:
        self._client.set_terminated(self.run_id)
