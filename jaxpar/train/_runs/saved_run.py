"""A run that `fit` saved, as a value: any of its steps, the batch of a step, its metrics, a fork.

A step is computed again from the last checkpoint before it, by what `fit` itself runs: the same step,
the same source of data, the same random keys. So it has the bits of the run, where these can be had again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import itertools
import math
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import checkpoint, data as data_room, kv, updaters
from ..._core import checks, files
from ..._core.arrays import PyTree
from ..._core.text import plural
from ..._core.transfers import allows_transfers
from ..._core.updater import Updater
from ..._devices import mesh, processes
from ..._store.store import trained_keys
from .._callbacks.fingerprint import fingerprint
from .._callbacks.history import History, Record
from .._fit import certificate
from .._fit.clock import Clock
from .._fit.identity import describe, differences
from .._fit.progress import Epoch, Metrics
from .._fit.run import FitOptions, Run, shuffle_key
from .._fit.saved import RunInfo, has_good_info, template
from .._fit.steps import own_steps
from .._step.loss import by_name
from .._step.state import TrainState, carries, check_is_state, leaf_shardings, shapes_on
from .._step.train_step import TrainStep

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class SavedState:
    """A checkpoint of a run."""

    step: int
    path: Path
    info: RunInfo


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SavedRun:
    """A run in a directory. `train.open` makes it. Nothing is trained by looking at it, and nothing is written.

    A run unpacks as what `fit` takes first: its last saved state, the step and the data. So
    `fit(*run, epochs=20, checkpoint_dir=run.directory)` goes on with it.

    Attributes:
        directory: the directory of its checkpoints.
        history: the records of its epochs, as `fit` returned them.
        checkpoints: {step: path}, in the order of the steps.
        left_out: the numbers of the steps that made no update.
        forked_from: (directory, step) of the run that it left, or None.
        made_by: what decided its numbers, as its last checkpoint says: versions, processor, devices, and short hashes
            of the model's shapes, data, seed, optimizer, loss and step. Empty if an earlier jaxpar saved it.
        step, data: as given to `train.open`. `step` leaves out what the run left out.
    """

    directory: Path
    history: History
    left_out: frozenset[int]
    forked_from: tuple[str, int] | None
    made_by: Mapping[str, Any]
    step: TrainStep | None
    data: Any
    _saved: tuple[SavedState, ...]  # in the order of the steps
    _like: TrainState | None  # a state of this run, for its structure and devices only
    _certificate: Mapping[int, str]  # hashes of states, by step

    @property
    def checkpoints(self) -> dict[int, Path]:
        return {saved.step: saved.path for saved in self._saved}

    @property
    def last_step(self) -> int:
        """The number of the step of the last checkpoint."""
        return self._saved[-1].step

    @property
    def not_exact(self) -> str:
        """Why computed states may differ from those of the run in their last bits. "" if they have the same bits."""
        if not self.made_by:
            return "an earlier jaxpar saved it, and does not say what computed it"
        if self._like is None:
            return "no step was given"
        return certificate.difference(dict(self.made_by), certificate.header_of(self.step, self._like))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.at(self.last_step), self.step, self.data))

    @allows_transfers
    def at(self, step: int) -> TrainState:
        """The state after a step of the run, computed again from the last checkpoint before it.

        Steps after the last checkpoint are those that the run would have made. If `fit` wrote a certificate, the states
        on the way are compared with it.

        Args:
            step: the number of the step. The first step is 1, and 0 is the state that `fit` was given.

        Raises:
            ValueError: there is no good checkpoint at or before this step, or `train.open` was not given the step or
                the data; the data cannot be read again; a state has other bits than the certificate says.

        Example:
            >>> import tempfile, numpy as np, optax
            >>> import jax.numpy as jnp
            >>> from jaxpar import train
            >>> def loss_fn(params, batch, rng):
            ...     return ((batch["x"] * params["w"] - batch["y"]) ** 2).mean(), {}
            >>> data = {"x": np.ones(64, np.float32), "y": np.ones(64, np.float32)}
            >>> directory = tempfile.mkdtemp()
            >>> state, step = train.start({"w": jnp.zeros(())}, optax.sgd(0.25), loss_fn)
            >>> state, history = train.fit(
            ...     state, step, data, epochs=1, batch_size=8, progress=False, checkpoint_dir=directory, keep_every=4)
            >>> run = train.open(directory, step, data)
            >>> [float(run.at(n).params["w"]) for n in (0, 1, 2, 8)]
            [0.0, 0.5, 0.75, 0.99609375]
        """
        number = checks.whole_number(step, "run.at", "the step", least=0)
        state, saved = self._restored("run.at", number)
        with contextlib.closing(self._compute("run.at", state, saved, number)) as made:
            for _, computed, _, _ in made:
                state = computed
        return state

    @allows_transfers
    def batch(self, step: int) -> PyTree:
        """The batch of a step, on the devices of the step. No step is made.

        Raises:
            ValueError: as of `at`.
        """
        number = checks.whole_number(step, "run.batch", "the step")
        state, saved = self._restored("run.batch", number - 1)
        return next(self._batches("run.batch", state, saved, number - 1))

    @allows_transfers
    def metrics(self, first: int, last: int) -> list[dict[str, float]]:
        """The metrics of the steps from `first` to `last`, computed again, one dict for each step.

        Returns:
            Dicts of `step`, what the step reports, such as `loss`; `grad_norm`, as `record=` of `make_train_step` has
            it; and `update_norm`, the norm of the change of the trained params. There is no `grad_norm` of a step that
            was left out, and of one that is a function of your own.

        Raises:
            ValueError: as of `at`.
        """
        first = checks.whole_number(first, "run.metrics", "first")
        last = checks.whole_number(last, "run.metrics", "last", least=first)
        state, saved = self._restored("run.metrics", first - 1)
        step, _ = self._needed("run.metrics")
        batches = self._batches("run.metrics", state, saved, saved.step)
        # The norm is by a step beside that of the run, whose program stays as it is, and so its bits.
        norm_step = with_options(step, record=("grad_norm",)) if isinstance(step, TrainStep) else None
        rows: list[dict[str, float]] = []
        for number in range(saved.step + 1, last + 1):
            # From the checkpoint up to the first step that is asked for, steps are only made.
            batch = next(batches)
            if number < first:
                state, _ = step(state, batch)
                continue
            before, kept = _trained(state), mesh.own_copies(state)  # copies, since a step takes the arrays of the state
            state, metrics = step(state, batch)
            changes = jax.tree.map(lambda new, old: new - old, _trained(state), before)
            values = {name: float(value) for name, value in by_name(metrics).items() if not np.ndim(value)}
            if norm_step is not None and number not in self.left_out and "grad_norm" not in values:
                with warnings.catch_warnings(action="ignore"):  # the run has warned
                    values["grad_norm"] = float(norm_step(kept, batch)[1]["grad_norm"])
            values.setdefault("update_norm", float(jnp.sqrt(_sum_of_squares(changes))))
            rows.append({"step": number, **values})
        return rows

    @allows_transfers
    def fork(
        self,
        directory: str | os.PathLike[str],
        at: int,
        *,
        optimizer: optax.GradientTransformation | Updater | None = None,
        without: Iterable[int] = (),
    ) -> SavedRun:
        """Another run, which leaves this one after a step. `fit` trains it.

            fork = run.fork("runs/lenet-b", at=1300, without=[1371])
            state, history = train.fit(*fork, epochs=20, checkpoint_dir=fork.directory)

        Args:
            directory: a directory without checkpoints, for those of the fork. It gets the state after step `at`. If it
                has those of this very fork, they stay, and `fit` goes on from the last one.
            at: the number of the step.
            optimizer: another optimizer, whose state begins anew. None: the same one goes on.
            without: the numbers of later steps that make no update. What comes after such a step is as in a run that
                makes all updates: the batches and the random keys stay where they are. The fork makes the updates of
                later steps that this run leaves out, unless they are given here.

        Raises:
            FileExistsError: the directory has checkpoints of another run or fork.
            ValueError: a step in `without` is not after `at`; and as of `at()`.
        """
        # 1. What is asked for, checked before any step is made.
        target = files.as_path(directory, "run.fork: directory")
        number = checks.whole_number(at, "run.fork", "at", least=0)
        left_out = sorted(checks.whole_number(n, "run.fork", "a step in without") for n in without)
        if left_out and left_out[0] <= number:
            raise ValueError(
                f"run.fork: step {left_out[0]} in without is not after step {number}, where the fork begins; give an "
                "earlier at="
            )

        def look_into_target() -> str | None:
            listed, _ = checkpoint._newest_first(target)
            info: dict[str, Any] = listed[0][1].get("info", {}) if listed else {}
            if listed and info.get("forked_from") != [str(self.directory), number]:
                raise FileExistsError(f"run.fork: {target} has checkpoints already; give another directory")
            return info.get("run", "") if listed else None

        name_there = processes.ask_first(look_into_target, FileExistsError)  # of a fork that is there already
        step, _ = self._needed("run.fork")
        if not isinstance(step, TrainStep):
            raise TypeError(
                "run.fork: the step is a function of your own; only one of make_train_step leaves out steps"
            )

        # 2. The state where the fork begins, with what `fit` would have known of its run there: where the data are, and
        #    the sums of the epoch under way.
        state, saved = self._restored("run.fork", number)
        info, clock, epoch = saved.info, None, Epoch()
        epoch.sums.update(info.sums or {})
        epoch.counted, epoch.seconds = info.counted or 0, info.seconds or 0.0
        place = info.place
        # The steps of an epoch that has no record yet count in its record, as in a run that was never stopped.
        source = data_room.as_source(self.data)
        with contextlib.closing(self._compute("run.fork", state, saved, number, source)) as made:
            for clock, computed, metrics, rows in made:
                state = computed
                number_made = 1 if rows is None else len(rows)
                if clock.is_between_epochs or clock.steps_of_epoch == number_made:
                    epoch = Epoch()  # one that is over has its record, and one that begins has no sums yet
                if not clock.is_between_epochs:
                    epoch.unread.append((metrics, rows))
                    for each in itertools.chain.from_iterable(epoch.read(0)):
                        epoch.sums.update({"skipped": 1} if each.get("skipped", 0.0) > 0 else each)
                        epoch.counted += 1
                place = data_room._place_in(source)

        # 3. What is other in the fork: the optimizer, and which steps make no update.
        if optimizer is not None:
            state = dataclasses.replace(state, store=kv.set_optimizer(state.store, optimizer))
        left_out = sorted({n for n in self.left_out if n <= number} | set(left_out))
        step = step.without(left_out)
        # Averages of optax and the guard's notes stay with the state. What describes the run is that of the fork.
        state = step.complete(state)
        step.like = shapes_on(state, leaf_shardings(state))

        # 4. A checkpoint of it in the new directory, from which `fit` goes on. If this very fork is there already, a
        #    cell of a notebook ran again, and its last checkpoint is the one to go on from. What callbacks remember is
        #    only known where the run saved it. The record of an epoch that was cut short is no record of the fork.
        history = [record for record in self.history if record["step"] <= number and not record.get("interrupted")]
        made_by = {**certificate.header_of(step, state), **describe(self._call(state, step, number + 1), state)}
        ragged = info.epochs_over is not None and clock is not None
        forked = dataclasses.replace(
            info,
            rates=updaters.learning_rates(state),
            ended_by=None,
            limit=None,
            stopped=False,
            interrupted=True,  # so that a call of `fit` with this very state goes on with this run
            callbacks=info.callbacks if number == saved.step else None,
            run=fingerprint(info.run, number, left_out, made_by),
            sums=dict(epoch.sums) if epoch.counted else None,
            counted=epoch.counted or None,
            seconds=epoch.seconds if epoch.counted else None,
            epochs_over=clock.epochs_over if ragged and clock is not None else info.epochs_over,
            epoch_began=clock.epoch_starts[-1] if ragged and clock is not None else info.epoch_began,
            place=place,
            history=None,
            made_by=made_by,
            left_out=left_out or None,
            forked_from=[str(self.directory), number],
            certificate=None,
        )
        if name_there is None:
            manager = checkpoint.Manager(target)
            with contextlib.closing(manager):
                manager._save(state, forked.to_json(), kept=True, records=history)
        elif not processes.ask_first(lambda: name_there == forked.run):  # it was saved by process 0, and has its name
            raise FileExistsError(
                f"run.fork: {target} has checkpoints of another fork, which differs in the optimizer, the steps that "
                "it leaves out, or what computed it; give another directory"
            )
        return open(target, step, self.data, state=state)

    def to_dict(self) -> dict[str, Any]:
        """What is known of the run without computing, in values of JSON."""
        return {
            "directory": str(self.directory),
            "checkpoints": {step: str(path) for step, path in self.checkpoints.items()},
            "left_out": sorted(self.left_out),
            "forked_from": None if self.forked_from is None else list(self.forked_from),
            "branches": [str(path) for path in self.branches],
            "made_by": dict(self.made_by),
            "history": [dict(record) for record in self.history],
        }

    @property
    def branches(self) -> list[Path]:
        """The forks of this run in the directories beside its own."""
        return list(self._branches())

    def _branches(self) -> dict[Path, int]:
        """The forks, with the steps after which they left."""
        # Beside them may be anything, so only what has a manifest is looked at.
        manifests = self.directory.parent.glob(f"*/*/{checkpoint._MANIFEST}")
        branches = dict[Path, int]()
        for path in sorted({manifest.parents[1] for manifest in manifests} - {self.directory}):
            listed, _ = checkpoint._newest_first(path)
            for _, manifest in listed:
                match manifest.get("info", {}).get("forked_from"):
                    case [str(parent), int(step)] if parent == str(self.directory):
                        branches[path] = step
                    case _:
                        pass
        return branches

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        made_by = ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in self.made_by.items() if name != "certificate"
        )
        lines = [*self._lines(), *([f"made by: {made_by}"] if made_by else [])]
        text = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
        return f"<div>{self._picture()}{text}{self.history._repr_html_() if self.history else ''}</div>"

    def _picture(self) -> str:
        """The curve of the loss as SVG, over marks of the checkpoints, of the steps left out and of the branches."""
        losses = [
            (record["step"], record["loss"]) for record in self.history if math.isfinite(record.get("loss", math.nan))
        ]
        least, most = min((y for _, y in losses), default=0.0), max((y for _, y in losses), default=0.0)
        # A spike that is drawn to its size leaves nothing of the rest.
        scale = math.log if least > 0 and most > 20 * least else float
        last = max([self.last_step, *(step for step, _ in losses), 1])
        left, width, top, height = 8, 464, 22, 96

        def x(step: int) -> str:
            return f"{left + width * step / last:.1f}"

        def y(loss: float) -> str:
            share = (scale(most) - scale(loss)) / ((scale(most) - scale(least)) or 1)
            return f"{top + height * share:.1f}"

        def mark(step: int, begin: int, end: int, look: str, title: str) -> str:
            place = f'x1="{x(step)}" x2="{x(step)}" y1="{begin}" y2="{end}"'
            return f"<line {place} {look}><title>{html.escape(title)}</title></line>"

        bottom = top + height
        points = " ".join(f"{x(step)},{y(loss)}" for step, loss in losses)
        dots = [
            f'<circle cx="{x(step)}" cy="{y(loss)}" r="2"><title>step {step}: {loss:.4g}</title></circle>'
            for step, loss in losses
        ]
        shapes = [
            f'<polyline points="{points}" fill="none" stroke="#4878a8" stroke-width="1.5"/>',
            f'<g fill="#4878a8">{"".join(dots)}</g>',
            *(
                mark(n, bottom + 8, bottom + 18, 'stroke="currentColor"', f"checkpoint of step {n}")
                for n in self.checkpoints
            ),
            *(mark(n, top, bottom, 'stroke="#c44"', f"step {n} is left out") for n in sorted(self.left_out)),
        ]
        for path, step in self._branches().items():
            shapes.append(
                mark(
                    step,
                    top,
                    bottom + 18,
                    'stroke="#2a2" stroke-dasharray="3"',
                    f"{path.name} leaves after step {step}",
                )
            )
            shapes.append(f'<text x="{x(step)}" y="{top + 10}" fill="#2a2">{html.escape(path.name)}</text>')
        title = (
            f"loss {most:.4g} to {least:.4g}{', by its logarithm' * (scale is math.log)}, steps 0 to {last}; marks "
            "below: checkpoints"
            if losses
            else f"steps 0 to {last}"
        )
        return (
            f'<svg viewBox="0 0 {width + 2 * left} {bottom + 22}" width="{width + 2 * left}" font-size="11" '
            f'font-family="sans-serif"><text x="{left}" y="12" fill="currentColor">{title}</text>'
            f"{''.join(shapes)}</svg>"
        )

    def _lines(self) -> list[str]:
        steps = [saved.step for saved in self._saved]
        shown = ", ".join(map(str, steps if len(steps) <= 8 else [*steps[:3], "...", *steps[-3:]]))
        lines = [
            f"run in {files.shown(self.directory)}: {plural(len(self.history), 'record')}, "
            f"{plural(len(steps), 'checkpoint')} of step{'s' if len(steps) > 1 else ''} {shown}"
        ]
        if self.left_out:
            lines.append(
                f"left out: step{'s' if len(self.left_out) > 1 else ''} {', '.join(map(str, sorted(self.left_out)))}"
            )
        if self.forked_from is not None:
            lines.append(f"forked from {self.forked_from[0]} after step {self.forked_from[1]}")
        if branches := self.branches:
            lines.append(f"branches: {', '.join(files.shown(path) for path in branches)}")
        if self._like is not None:
            why = self.not_exact
            lines.append(f"computed states: to rounding ({why})" if why else "computed states: the bits of the run")
        return lines

    def _nearest(self, caller: str, step: int) -> SavedState:
        earlier = [saved for saved in self._saved if saved.step <= step]
        if not earlier:
            raise ValueError(
                f"{caller}: {files.shown(self.directory)} has no checkpoint at or before step {step}; its first one is "
                f"of step {self._saved[0].step}. A run with fit(keep_every=...) keeps that of its first state"
            )
        return earlier[-1]

    def _restored(self, caller: str, step: int) -> tuple[TrainState, SavedState]:
        """The state of the last good checkpoint at or before a step."""
        if self._like is None:
            raise ValueError(
                f"{caller}: what the run was made with is not in its checkpoints; give train.open(directory, step, "
                "data), with the step that train.start made, or with state= beside one of make_train_step"
            )
        # One that is damaged costs the steps from the one before it.
        nearest, damage = self._nearest(caller, step), ""
        for saved in reversed(self._saved[: self._saved.index(nearest) + 1]):
            try:
                return checkpoint.restore(saved.path, self._like), saved
            except checkpoint.CheckpointError as error:
                damage = damage or str(error)
        raise checkpoint.CheckpointError(damage)

    def _needed(self, caller: str) -> tuple[TrainStep, data_room.Source]:
        if self.step is None or self.data is None:
            raise ValueError(f"{caller}: the step and the data are needed; give train.open(directory, step, data)")
        return self.step, data_room.as_source(self.data)

    def _go_to(self, caller: str, source: data_room.Source, saved: SavedState) -> None:
        """Set the data to where they were after a checkpoint. `ValueError` for what cannot go back."""
        if saved.info.place is None and getattr(source, "is_read_once", False):
            raise ValueError(
                f"{caller}: the data can be read only once, and nothing says where they were after step {saved.step}; "
                "give fit an iterator with get_state and set_state, a list, or a function of the epoch"
            )
        data_room._go_to(source, saved.info.place)

    def _batches(
        self, caller: str, state: TrainState, saved: SavedState, start: int, placed: bool = True
    ) -> Iterator[PyTree]:
        """The batches of the steps after `start`, which is not before the checkpoint, on the step's devices or one."""
        step, source = self._needed(caller)
        self._go_to(caller, source, saved)
        # An iterator knows its place where a checkpoint was saved. All other data are asked for a batch by its number.
        first = start if saved.info.place is None else saved.step
        sharding = step.batch_sharding(state) if isinstance(step, TrainStep) else None
        shards = getattr(step, "virtual_shards", None)
        options = data_room._batch_options(source, state.store.devices, sharding, shards) if placed else {}
        key, batch_size = shuffle_key(state.rng), saved.info.batch_size
        batches = iter(source.batches(batch_size, rng=key, epochs=None, start=first, **options))
        return itertools.islice(batches, start - first, None)

    def _hashes(self, start: int, end: int) -> list[str]:
        """The hashes of the states after the steps from `start` + 1 to `end`, made one by one."""
        state, step = self.at(start), self._needed("train.compare")[0]
        batches = self._batches("train.compare", state, self._nearest("train.compare", start), start)
        hashes: list[str] = []
        for batch in itertools.islice(batches, end - start):
            state, _ = step(state, batch)
            hashes.append(str(checkpoint._StateHash(state)))
        return hashes

    def _call(self, state: TrainState, step: TrainStep, last: int) -> Run:
        """The call of `fit` that makes the steps up to `last`."""
        info = self._saved[-1].info
        per_program = (info.made_by or {}).get("steps_per_execution", "auto")
        options = FitOptions(batch_size=info.batch_size, max_steps=max(last, 1), steps_per_execution=per_program)
        return Run(state, step, self.data, options)

    def _compute(
        self, caller: str, state: TrainState, saved: SavedState, last: int, source: data_room.Source | None = None
    ) -> Generator[tuple[Clock, TrainState, Metrics, range | None]]:
        """The steps after a checkpoint up to step `last`, as `fit` makes them: the clock, the state, its metrics."""
        if saved.step == last:
            return
        step, _ = self._needed(caller)
        call = self._call(state, step, last)
        if source is not None:
            call.source = source
        self._go_to(caller, call.source, saved)
        clock = Clock.resume(call, saved.info, saved.step)
        clock.last = last
        is_certified = bool(self._certificate) and not self.not_exact
        with contextlib.closing(own_steps(call, clock, state, self.left_out)) as steps:
            for state, metrics, rows in steps:
                clock.advance(call, rows)
                if is_certified and clock.step in self._certificate:
                    computed, certified = str(checkpoint._StateHash(state)), self._certificate[clock.step]
                    if computed != certified:
                        raise ValueError(
                            f"{caller}: the state after step {clock.step} has the hash {computed}, and the certificate "
                            f"of the run says {certified}; the data or the program give other numbers than then. "
                            "train.compare says where two runs part"
                        )
                yield clock, state, metrics, rows
                if clock.step == last:
                    return


@allows_transfers
def open(
    directory: str | os.PathLike[str],
    step: TrainStep | None = None,
    data: Any = None,
    *,
    state: TrainState | None = None,
) -> SavedRun:
    """The run that `fit` saved in a directory, as a value. Nothing is trained or written.

    Args:
        directory: the `checkpoint_dir` of `fit`. With `fit(keep_every=n)` it has all that any step is computed from.
        step: the step of the run, from `start` or `make_train_step`. None: only what is saved is known.
        data: the data of the run, as given to `fit`. None: no step is computed.
        state: a state of the same structure, whose values do not matter: for a step of `make_train_step`.

    Returns:
        A `SavedRun`: `run.at(n)`, `run.batch(n)`, `run.metrics(first, last)`, `run.fork(directory, at=n)`.

    Raises:
        FileNotFoundError: the directory has no checkpoint of `fit`.
        ValueError: the step or the data are not those of the run. The message names what differs: the shapes of the
            model, the optimizer, the loss function, the options of the step, or the data. Data that are not arrays are
            known by what they give only.
    """
    path = files.as_path(directory, "train.open: directory")
    listed, unreadable = checkpoint._newest_first(path)
    saved, damages = list[SavedState](), list(unreadable.values())
    for each, manifest in listed:
        try:
            if "first" in manifest.get("info", {}) and has_good_info(each, manifest):
                saved.append(SavedState(manifest.get("step", 0), Path(each), RunInfo.from_json(manifest["info"])))
        except checkpoint.CheckpointError as error:  # `fit` passes over it too
            damages.append(str(error))
    if not saved:
        damage = f" ({damages[0]})" if damages else ""
        raise FileNotFoundError(
            f"train.open: {path} has no checkpoint of fit{damage}; give the checkpoint_dir of a call of fit"
        )
    newest = saved[0].info
    # An earlier run in the same directory is another one. Of a step that was made twice the newest counts.
    by_step = {each.step: each for each in reversed(saved) if each.info.run == newest.run}
    history: list[Record] = newest.history or []
    if (place := dict(listed)[saved[0].path].get("records")) is not None:
        with contextlib.suppress(checkpoint.CheckpointError):  # the checkpoint has its last records itself
            history = checkpoint._Records(path).read(place)

    left_out = frozenset(newest.left_out or [])
    any_state = state
    if step is not None:
        if isinstance(step, TrainStep):
            step = step.without(left_out)
            if any_state is None and step.like is not None:
                any_state = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), step.like)
        if any_state is not None:
            check_is_state(any_state, "train.open")
            any_state = template(any_state, step)
    # The certificate may be gone, or was moved with the directory of its run.
    certificate_path = newest.certificate
    places = [] if certificate_path is None else [Path(certificate_path), path / Path(certificate_path).name]
    lines = next((certificate.read(place)[1] for place in places if place.is_file()), {})

    run = SavedRun(
        directory=path,
        history=History(history),
        left_out=left_out,
        forked_from=None if newest.forked_from is None else (newest.forked_from[0], newest.forked_from[1]),
        made_by=newest.made_by or {},
        step=step,
        data=data,
        _saved=tuple(by_step[number] for number in sorted(by_step)),
        _like=any_state,
        _certificate={number: entry["state"] for number, entry in lines.items()},
    )
    if newest.made_by and step is not None and data is not None and any_state is not None:
        call = run._call(any_state, step, 1)
        now = describe(call, any_state)
        # The seed is in the state. Hashes of functions are of Python's code, which differs between its versions.
        names = ["model", "data", "optimizer", "loss", "step"]
        if now["python"] != newest.made_by.get("python"):
            names = ["model", "data"]
        if now["data"] is None or newest.made_by.get("data") is None:
            names.remove("data")
        if why := differences(newest.made_by, now, names):
            raise ValueError(f"train.open: {files.shown(path)} is from another run ({why}); give what fit was given")
    return run


Gradients = Callable[[TrainState, PyTree], dict[str, jax.Array]]


def with_options(step: TrainStep, **options: Any) -> TrainStep:
    """The same step with other options of what each device does, which leaves no step out."""
    global_step = step.global_step
    return dataclasses.replace(
        step.without(()),
        device_step=dataclasses.replace(step.device_step, **options),
        global_step=None if global_step is None else dataclasses.replace(global_step, **options),
    )


def gradients_of(step: TrainStep, state: TrainState) -> Gradients | None:
    """A function of (state, batch): the summed gradients that the optimizer would get, by the names of the params.

    They are NaN where the step would skip its update, since they overflow or are not finite. The state stays valid.
    None for a function of the user's own, and where an update is not by the gradient of its own step alone.
    """
    if not isinstance(step, TrainStep) or state.store.staleness or carries(state.local):
        return None
    # It is the step itself, with a store that keeps what is pushed in place of an optimizer. What the loss does not
    # depend on has zeros there, also where the step would leave it alone, as have rows that it does not look up.
    probe_step = with_options(step, unused="warn", row_sparse=(), record=())

    def gradients(state: TrainState, batch: PyTree) -> dict[str, jax.Array]:
        store = kv.set_updater(mesh.own_copies(state.store), updaters.assign)
        probe = dataclasses.replace(mesh.own_copies(state), store=store)
        with warnings.catch_warnings(action="ignore"):  # the run has warned
            probe, metrics = probe_step(probe, batch)
        grads = _trained(probe)
        if float(metrics.get("skipped", 0.0)) > 0:  # the params are as before
            return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), grads)
        return grads

    return gradients


def _trained(state: TrainState) -> dict[str, jax.Array]:
    """The trained params of a state by name."""
    store, names = state.store, kv.names(state.store)
    params = dict(zip(store.values, jax.tree.leaves(kv.to_params(store)), strict=True))
    return {names[key]: params[key] for key in trained_keys(store)}


@jax.jit
def _sum_of_squares(tree: PyTree) -> jax.Array:
    """The sum over all leaves, in float32 or wider: the squares of float16 overflow at 256."""
    total = jnp.float32(0)
    for x in jax.tree.leaves(tree):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        total = total + jnp.sum(jnp.square(jnp.abs(wide)))
    return total
