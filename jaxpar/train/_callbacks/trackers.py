"""The records of a run in Weights & Biases and in MLflow, each written by its own package."""

from __future__ import annotations

import importlib
import math
import time
from typing import Any

import jax

from ..._core import checks
from ..._core.calls import answers
from ..._core.text import say_news
from .history import History, Record
from .metrics_files import PathLike, Sink
from .monitor import metric_names
from .tensorboard import tag


@answers("train.to_wandb")
def to_wandb(project: str | None = None, **options: Any) -> WeightsAndBiases:
    """A callback of `fit` that writes the records to Weights & Biases.

    Metrics have the names `train/loss`, `eval/loss` and so on, and those of steps, by `on_step=board.on_step`,
    `step/loss`. The axis is the step. The run begins with the first record and ends with `fit`.

    Args:
        project, options: for `wandb.init`, such as `name="first"`, `mode="offline"`, `dir="runs"`. With `id="..."` and
            `resume="allow"`, a run of `fit` that is resumed goes on in the same run. Steps that it has already, and
            that are made again after a crash, are not written again. A line says so.

    Raises:
        ModuleNotFoundError: the package wandb is not installed.
        TypeError: a project that is no name.

    Example:
        board = train.to_wandb("numbers", mode="offline")
        state, history = train.fit(..., callbacks=board, on_step=board.on_step)
    """
    if project is not None and not isinstance(project, str):
        raise TypeError(f"train.to_wandb: project must be a name, got {checks.describe(project)}")
    return WeightsAndBiases(project, options)


@answers("to_mlflow")
def to_mlflow(
    experiment: str | None = None,
    *,
    tracking_uri: PathLike | None = None,
    run_name: str | None = None,
    run_id: str | None = None,
) -> MLflow:
    """A callback of `fit` that writes the records to MLflow.

    The names and the axis are those of `to_wandb`. Nothing global of MLflow is set or changed.

    Args:
        experiment: its name. It is made where it does not exist. None: MLflow's default experiment.
        tracking_uri: a server, or a database such as `sqlite:///runs.db`, which the whole package mlflow can write.
            None: what MLflow is set to.
        run_name: a name for the new run.
        run_id: go on in this run in place of a new one. `board.run_id` has it after the first record. Steps that the
            run has already, and that are made again after a crash, are not written again. A line says so.

    Raises:
        ModuleNotFoundError: MLflow is not installed. The package mlflow-skinny is enough.
        TypeError: an experiment that is no name.

    Example:
        board = train.to_mlflow("numbers", tracking_uri="sqlite:///runs.db")
        state, history = train.fit(..., callbacks=board, on_step=board.on_step)
    """
    if experiment is not None and not isinstance(experiment, str):
        raise TypeError(f"train.to_mlflow: experiment must be a name, got {checks.describe(experiment)}")
    return MLflow(experiment, tracking_uri, run_name, run_id)


class Tracker(Sink):
    """What writes numbers by step under names such as `train/loss`."""

    _has_said = False

    def _write(self, record: Record) -> None:
        self._log(record["step"], {tag(name): float(record[name]) for name in (*metric_names(record), *_also(record))})

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step as `step/loss` and so on: `fit(..., on_step=board.on_step)`."""
        if jax.process_index() == 0:
            self._log(step, {f"step/{name}": value for name, value in metrics.items()})

    def _log(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def _say_left_out(self, step: int, which: str) -> None:
        if not self._has_said:
            self._has_said = True
            say_news(f"{which} has step {step} already, which is not written again; another training takes another run")


class WeightsAndBiases(Tracker):
    """What `to_wandb` returns."""

    def __init__(self, project: str | None, options: dict[str, Any]):
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("to_wandb writes by the package wandb: pip install 'jaxpar[wandb]'") from error
        self._options = {"project": project, **options}
        self.run: Any = None

    def on_end(self, history: History) -> None:
        """End the run."""
        del history
        if self.run is not None:
            self.run.finish()
            self.run = None

    def _log(self, step: int, values: dict[str, float]) -> None:
        if self.run is None:
            self.run = self._wandb.init(**self._options)
        if step >= self.run.step:
            self.run.log(values, step=step)
        else:  # an earlier one was written before a crash
            self._say_left_out(step, f"to_wandb: run {self.run.id}")


class MLflow(Tracker):
    """What `to_mlflow` returns."""

    def __init__(self, experiment: str | None, uri: PathLike | None, run_name: str | None, run_id: str | None):
        try:
            mlflow: Any = importlib.import_module("mlflow")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("to_mlflow writes by the package mlflow: pip install 'jaxpar[mlflow]'") from error
        self._client: Any = mlflow.MlflowClient(tracking_uri=None if uri is None else str(uri))
        self._metric: Any = mlflow.entities.Metric
        self._experiment, self._run_name = experiment, run_name
        self.run_id: str | None = run_id
        self._is_open = False
        self._last: dict[str, int] | None = None  # step by name, of a run that was there before

    def on_end(self, history: History) -> None:
        """End the run."""
        del history
        if self._is_open:
            self._client.set_terminated(self.run_id)
            self._is_open = False

    def _log(self, step: int, values: dict[str, float]) -> None:
        if not self._is_open:
            self._open()
        now = int(time.time() * 1000)
        new = [name for name in values if step > self._last_step(name)]
        if len(new) < len(values):
            self._say_left_out(step, f"to_mlflow: run {self.run_id}")
        if new:
            self._client.log_batch(self.run_id, [self._metric(name, values[name], now, step) for name in new])

    def _last_step(self, name: str) -> int:
        """The last step that the run had of a metric before. -1: none."""
        if self._last is None:
            return -1
        if name not in self._last:
            steps = [metric.step for metric in self._client.get_metric_history(self.run_id, name)]
            self._last[name] = max(steps, default=-1)
        return self._last[name]

    def _open(self) -> None:
        if self.run_id is None:
            self.run_id = self._client.create_run(self._experiment_id(), run_name=self._run_name).info.run_id
        else:
            self._client.update_run(self.run_id, status="RUNNING")
            self._last = {}
        self._is_open = True

    def _experiment_id(self) -> str:
        if self._experiment is None:
            return "0"
        found = self._client.get_experiment_by_name(self._experiment)
        return self._client.create_experiment(self._experiment) if found is None else found.experiment_id


def _also(record: Record) -> list[str]:
    """What is no metric and is drawn all the same."""
    names = [name for name in record if name in ("seconds", "skipped") or name.endswith("_per_second")]
    return [name for name in names if record[name] is not None and math.isfinite(record[name])]
