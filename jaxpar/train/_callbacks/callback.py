"""One callback of `fit`: its hooks, and how a function or another object becomes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from ... import checkpoint
from ..._core.arrays import PyTree
from ..._core.functions import check_takes
from .._step.state import TrainState
from .history import Record
from .media import Media

CallbackFunction = Callable[[TrainState, Record], Any]  # Any: it may return a figure. Only a True ends the training
OnStep = Callable[[int, dict[str, float]], object]


class Callback:
    """A callback of `fit`. Each hook does nothing until a subclass writes it.

    `fit` calls the hooks in the order in which they stand here. In a run of several processes each process calls them;
    in an elastic run only process 0 does, since the other processes make its steps and nothing else.

    What a callback counts belongs into its memory, a pytree of arrays, numbers and texts: `init` gives the first one,
    `on_step` and `on_epoch` get one and return the next. Checkpoints save it under the name of the class, so that a
    resumed run decides as one that was never stopped. Without an `init` there is no memory, and it is None.

    Do not keep a state: the next step donates it.

    Example:
        >>> from jaxpar import train
        >>> class StopWhenFitted(train.Callback):
        ...     def init(self, state):
        ...         return {"in_a_row": 0}
        ...     def on_epoch(self, memory, state, record):
        ...         in_a_row = memory["in_a_row"] + 1 if record["loss"] < 0.1 else 0
        ...         return {"in_a_row": in_a_row}, in_a_row == 2
        >>> # state, history = train.fit(..., callbacks=StopWhenFitted())
    """

    def before_resume(self, directory: checkpoint._AnyPath) -> None:
        """`fit` is about to look for checkpoints here. What is put there now is resumed from."""

    def init(self, state: TrainState) -> PyTree:
        """The memory before the first record, also where a saved one takes its place."""
        return None

    def on_start(self, history: Sequence[Record]) -> None:
        """The run begins, or goes on after these records."""

    def on_step(self, memory: PyTree, step: int, metrics: dict[str, float]) -> PyTree:
        """The memory after a step, of which `step` is the number, from 1. It is called up to sixteen steps late."""
        return memory

    def on_media(self, step: int, media: Mapping[str, Media]) -> None:
        """Images and texts of an evaluation, by names such as `eval_samples`. Its record follows."""

    def on_epoch(self, memory: PyTree, state: TrainState, record: Record) -> tuple[PyTree, Any]:
        """(the memory after a record, True to end the training)."""
        return memory, False

    def on_saved(self, record: Record, written: Callable[[], checkpoint._AnyPath | None]) -> None:
        """What is due after this record is saved.

        `written()` waits until the checkpoint is on disk, and returns its path in the first process. It is a wait of
        all processes: all must call it, or none.
        """

    def on_end(self, history: Sequence[Record]) -> None:
        """The run ends. After an error `sys.exception()` is it."""


class WithMemory(Protocol):
    """An object that is no `Callback`, but has these two of its methods. It may have the others too."""

    def init(self, state: TrainState) -> PyTree: ...
    def on_epoch(self, memory: PyTree, state: TrainState, record: Record) -> tuple[PyTree, Any]: ...


def as_callback(user_callback: CallbackFunction | WithMemory) -> Callback:
    """What a user gave as a callback, with all hooks. `TypeError` for what is none, or cannot be called as one."""
    # An epoch may take hours, so that is found out before the first one.
    if isinstance(user_callback, type):
        raise TypeError(f"fit: a callback must be an object, not a class; write {user_callback.__name__}(...)")
    if has_memory(user_callback):
        callback = user_callback if isinstance(user_callback, Callback) else _OfObject(user_callback)
        name = type(user_callback).__name__
        check_takes(callback.on_step, ("memory", "step", "metrics"), f"fit: {name} has a memory, so its on_step")
        return callback
    hint = "; or give a train.Callback, another object with init and on_epoch, or a sequence of these"
    check_takes(user_callback, ("state", "record"), "fit: a callback", hint)
    assert callable(user_callback)
    return _OfFunction(user_callback)


def has_memory(user_callback: object) -> TypeGuard[WithMemory]:
    """Whether an object has the hooks with a memory. A function has none, and no memory."""
    return callable(getattr(user_callback, "init", None)) and callable(getattr(user_callback, "on_epoch", None))


def remembers(callback: Callback) -> bool:
    """Whether it has an `init` of its own, so that its memory is in the checkpoints."""
    return type(callback).init is not Callback.init


class _OfFunction(Callback):
    """A function `(state, record)`. An object that is called so, such as a logger, may have hooks beside."""

    def __init__(self, function: CallbackFunction):
        self._function = function
        # Not `on_step`: that of a logger has no memory, and its user says by `fit(on_step=)` whether it is called.
        _take_hooks(self, function, _WITHOUT_MEMORY)

    def on_epoch(self, memory: PyTree, state: TrainState, record: Record) -> tuple[PyTree, Any]:
        return memory, self._function(state, record)


class _OfObject(Callback):
    """An object with `init`, `on_epoch` and perhaps other hooks, of a class that does not derive from `Callback`."""

    def __init__(self, user_callback: WithMemory):
        self._object = user_callback
        _take_hooks(self, user_callback, ("on_step", *_WITHOUT_MEMORY))

    def init(self, state: TrainState) -> PyTree:
        return self._object.init(state)

    def on_epoch(self, memory: PyTree, state: TrainState, record: Record) -> tuple[PyTree, Any]:
        return self._object.on_epoch(memory, state, record)


_WITHOUT_MEMORY = ("before_resume", "on_start", "on_media", "on_saved", "on_end")


def _take_hooks(callback: Callback, user_callback: object, names: Sequence[str]) -> None:
    """Put those of these hooks that an object has in the place of those that do nothing."""
    for name in names:
        if (hook := getattr(user_callback, name, None)) is not None:
            setattr(callback, name, hook)
