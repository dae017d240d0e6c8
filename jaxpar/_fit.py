"""The training loop: epochs of batches through a step, with progress, metrics and checkpoints."""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from . import data
from ._evaluate import evaluate
from ._progress import Progress
from ._step import TrainState, TrainStep

Record = dict[str, Any]
_BEHIND = 8
_SHUFFLE = 0x5FFE1E  # what tells the random key of the order of examples from those of the steps


def fit(
    state: TrainState,
    step: TrainStep,
    train_data: data.Dataset,
    *,
    test_data: data.Dataset | None = None,
    apply_fn: Callable[[Any, jax.Array], jax.Array] | None = None,
    epochs: int,
    batch_size: int,
    progress: bool = True,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    checkpoint_every: int | None = None,
    keep: int = 3,
    metrics_file: str | os.PathLike[str] | None = None,
    callback: Callable[[TrainState, Record], Any] | None = None,
) -> tuple[TrainState, list[Record]]:
    """Trains for some epochs.

    The order of the examples follows from `state.rng` and the number of the step alone, so a run that is
    resumed goes on as if it had never stopped, and the number of devices does not change it. The host feeds the
    devices a few steps ahead and never waits for the step it has just begun.

    Args:
        state: from `create_state`; its memory is given to the new states, so go on with the one returned.
        step: from `make_train_step`.
        train_data: a `data.Dataset`; the examples that fill no whole batch at the end of an epoch are left out.
        test_data: where given, with `apply_fn`, evaluated after each epoch.
        apply_fn: as in `evaluate`.
        epochs: how many, from the step at which `state` is.
        batch_size: examples in a global batch.
        progress: a tqdm bar in a terminal or a notebook, and a line for each epoch.
        checkpoint_dir: where to keep checkpoints, by orbax; one after each epoch.
        resume: "auto" goes on from the latest checkpoint in `checkpoint_dir` if it is further than `state`;
            False ignores it; True insists on one.
        checkpoint_every: a checkpoint after so many steps too.
        keep: how many of the latest checkpoints stay.
        metrics_file: a file that gets the history as JSON lines, one after each epoch; written anew.
        callback: `callback(state, record)` after each epoch; do not keep the state, the next step takes it.

    Returns:
        (the trained state, a list with a dict for each epoch: `epoch` from 1, mean `loss` and whatever else the
        step reports, `accuracy` (None where it reports none), `test_loss` and `test_accuracy` (None without test
        data), `seconds` of training and `images_per_second`). A resumed run has the earlier epochs in it.

    Raises:
        ValueError: a data set without one whole batch, numbers below 1, `apply_fn` without `test_data` or the
            other way round; a checkpoint of another model, optimizer, batch size or size of data set.
        FileNotFoundError: `resume=True` and no checkpoint.
        OSError: a checkpoint that cannot be written; the earlier ones stay.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import data, kv, train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["image"] @ params["w"] - batch["label"]) ** 2).mean(), {}
        >>> lines = data.Dataset(np.ones((8, 2), np.float32), np.ones(8, np.float32))
        >>> state = train.create_state(kv.from_params({"w": jnp.zeros(2)}, optimizer=optax.sgd(0.1)), 0)
        >>> state, history = train.fit(
        ...     state, train.make_train_step(loss_fn), lines, epochs=2, batch_size=8, progress=False)
        >>> [round(record["loss"], 2) for record in history]
        [1.0, 0.36]
    """
    _check(train_data, test_data, apply_fn, epochs, batch_size, keep, checkpoint_every, resume)
    first = int(state.step)
    history: list[Record] = []
    under_way: dict[str, Any] = {}
    checkpoints = None
    if checkpoint_dir is not None:
        from . import checkpoint

        checkpoints = checkpoint.Manager(checkpoint_dir, keep=keep)
        found = checkpoints.restore_latest(state) if resume else None
        if found is None and resume is True:
            raise FileNotFoundError(f"fit: resume=True, but {checkpoint_dir} holds no checkpoint")
        if found is not None and int(found[0].step) > first:
            state, info = found
            if info:  # none where it was saved by `checkpoint.save`: no epoch of that state is known
                first, history, under_way = _resumed(info, batch_size, len(train_data))
            print(f"jaxpar: resumed from step {int(state.step)} in {checkpoint_dir}", file=sys.stderr)
    try:
        loop = _Loop(step, train_data, batch_size, first, epochs, progress, under_way)
        _write(metrics_file, history, "w")
        steps = loop.run(state)
        for state, done in steps:
            if done is not None:
                _evaluated(done, state, apply_fn, test_data, batch_size)
                loop.show(done)
                history.append(done)
                _write(metrics_file, [done], "a")
                if callback is not None:
                    callback(state, done)
            if checkpoints is not None and (done is not None or (checkpoint_every and loop.at % checkpoint_every == 0)):
                examples = {"batch_size": batch_size, "examples": len(train_data)}
                checkpoints.save(state, {"first": first, "history": history, **examples, **loop.unfinished()})
    finally:
        if checkpoints is not None:
            checkpoints.close()
    return state, history


class _Loop:
    """The steps of a run, with the metrics of the epoch they are in."""

    def __init__(
        self,
        step: TrainStep,
        dataset: data.Dataset,
        batch_size: int,
        first: int,
        epochs: int,
        progress: bool,
        under_way: dict[str, Any],
    ):
        self.step, self.dataset, self.batch_size, self.first = step, dataset, batch_size, first
        self.steps = data.num_batches(len(dataset), batch_size)
        self.epochs, self.at = epochs, first
        self.progress = Progress(progress, epochs, self.steps)
        self.sums: collections.Counter[str] = collections.Counter(under_way.get("sums", {}))
        self.counted, self.seconds = under_way.get("counted", 0), under_way.get("seconds", 0.0)
        self.waiting: collections.deque[dict[str, jax.Array]] = collections.deque()  # metrics that were not read yet
        self.started = 0.0

    def unfinished(self) -> dict[str, Any]:
        """What the record of an epoch that is under way needs of it; waits for the steps made so far."""
        if (self.at - self.first) % self.steps == 0:
            return {}
        self._count(0)
        seconds = self.seconds + time.perf_counter() - self.started
        return {"sums": dict(self.sums), "counted": self.counted, "seconds": seconds}

    def show(self, record: Record) -> None:
        self.progress.end(record)

    def run(self, state: TrainState) -> Iterator[tuple[TrainState, Record | None]]:
        """The state after each step, with a record where an epoch is over."""
        self.at = int(state.step)
        rng = jax.random.fold_in(state.rng, _SHUFFLE)
        last = self.first + self.epochs * self.steps
        batches = data.batches(
            self.dataset, self.batch_size, rng=rng, epochs=None, start=self.at, devices=state.store.devices
        )
        self._begin_epoch()
        try:
            while self.at < last:
                state, metrics = self.step(state, next(batches))
                self.at += 1
                self.waiting.append(metrics)
                over = (self.at - self.first) % self.steps == 0
                self._count(0 if over else _BEHIND)
                if not over:
                    yield state, None
                    continue
                self.seconds += time.perf_counter() - self.started
                yield state, self._record()
                self.sums.clear()
                self.counted, self.seconds = 0, 0.0
                self._begin_epoch()
        finally:
            self.progress.close()

    def _begin_epoch(self) -> None:
        epoch, done = divmod(self.at - self.first, self.steps)
        if epoch < self.epochs:
            self.progress.start(epoch + 1, done)
        self.started = time.perf_counter()

    def _count(self, behind: int) -> None:
        """Reads the metrics of all steps but the last few, which waits for these steps."""
        while len(self.waiting) > behind:
            read = {k: float(v) for k, v in self.waiting.popleft().items() if np.ndim(v) == 0}
            self.sums.update(read)
            self.counted += 1
            seconds = self.seconds + time.perf_counter() - self.started
            self.progress.step(read, self.counted * self.batch_size / seconds)

    def _record(self) -> Record:
        means = {k: v / self.counted for k, v in self.sums.items()}
        return {
            "epoch": (self.at - self.first) // self.steps,
            "accuracy": None,
            **means,
            "test_loss": None,
            "test_accuracy": None,
            "seconds": self.seconds,
            "images_per_second": self.counted * self.batch_size / self.seconds,
        }


def _resumed(info: dict[str, Any], batch_size: int, examples: int) -> tuple[int, list[Record], dict[str, Any]]:
    """The first step, the history and the unfinished epoch's sums; a run goes on with the batches it had."""
    then, now = (info["batch_size"], info["examples"]), (batch_size, examples)
    if then != now:
        raise ValueError(
            f"fit: the checkpoint is of a run with batches of {then[0]} out of {then[1]} examples, this one has "
            f"{now[0]} out of {now[1]}; use those again, or another checkpoint_dir, or resume=False"
        )
    return info["first"], info["history"], info


def _evaluated(record: Record, state: TrainState, apply_fn: Any, test_data: Any, batch_size: int) -> None:
    if test_data is not None:
        scores = evaluate(state, apply_fn, test_data, batch_size=batch_size)
        record["test_loss"], record["test_accuracy"] = scores["loss"], scores["accuracy"]


def _write(path: str | os.PathLike[str] | None, records: list[Record], mode: str) -> None:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, mode) as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def _check(train_data, test_data, apply_fn, epochs, batch_size, keep, checkpoint_every, resume) -> None:
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("keep", keep)):
        if value < 1:
            raise ValueError(f"fit: {name} must be 1 or more, got {value!r}")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"fit: checkpoint_every must be 1 or more, got {checkpoint_every!r}")
    if resume not in ("auto", True, False):
        raise ValueError(f"fit: resume must be 'auto', True or False, got {resume!r}")
    if (test_data is None) != (apply_fn is None):
        raise ValueError("fit: evaluation takes both test_data and apply_fn, got only one of them")
    if not data.num_batches(len(train_data), batch_size):
        raise ValueError(f"fit: {len(train_data)} examples make no whole batch of {batch_size}")
