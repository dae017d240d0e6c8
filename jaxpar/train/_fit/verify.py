"""A part of a certified run computed again, without a change of its files."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from typing import Any

from ... import checkpoint, data, kv
from ..._core import checks
from ..._core.transfers import allows_transfers
from .._step.state import check_is_state
from .._step.train_step import TrainStep
from .certificate import Certificate, Entry, difference, header_of, read
from .clock import Clock
from .fault import Fault, fault_of, network_of
from .run import FitOptions, Run
from .saved import RunInfo, has_good_info, template
from .steps import own_steps


@dataclasses.dataclass(frozen=True)
class Verified:
    """What a verification found.

    Attributes:
        start: the checkpoint that it began at. None: the state that was given.
        steps: the certified steps that were compared, of those that were asked for.
        differs: the first step that differs. It may be before those that were asked for. None: all are the same.
        fault: which step, virtual shard and leaf was wrong first. None: all are the same.
    """

    start: checkpoint._AnyPath | None
    steps: list[int]
    differs: int | None
    fault: Fault | None = None


@allows_transfers
def verify(
    certificate: str | os.PathLike[str],
    arguments: dict[str, Any],
    *,
    first: int | None = None,
    last: int | None = None,
) -> Verified:
    """Compute certified steps of a run again, and compare them. Nothing is written.

    It begins at the last checkpoint that is not after step `first`, or at the state that is given, and ends at the
    first difference, at step `last` or at the last line. A line between the beginning and `first` is compared too, so
    that a difference has the right step. With virtual shards it may run on any number of devices.

    Args:
        certificate: the file that `fit(certificate=...)` wrote.
        arguments: the arguments of `fit`. Its state is donated.
        first, last: the first and the last step to compare. None: those of the file.

    Raises:
        ValueError: the file cannot be read; it has no such steps; it is of another machine, version or program; the
            data can be read only once.

    Example:
        >>> import tempfile, numpy as np, optax
        >>> import jax.numpy as jnp
        >>> from jaxpar import train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["x"] * params["w"] - batch["y"]) ** 2).mean(), {}
        >>> data = {"x": np.ones(64, np.float32), "y": np.ones(64, np.float32)}
        >>> path = tempfile.mkdtemp() + "/run.jsonl"
        >>> def arguments():
        ...     state, step = train.start({"w": jnp.zeros(())}, optax.sgd(0.25), loss_fn)
        ...     return {"state": state, "step": step, "train_data": data, "batch_size": 8}
        >>> state, history = train.fit(
        ...     **arguments(), epochs=1, progress=False, certificate=path, certificate_every=2)
        >>> train.verify(path, arguments(), last=6).steps
        [2, 4, 6]
    """
    return compute_again(certificate, read(certificate), arguments, first, last)


def compute_again(
    path: str | os.PathLike[str],
    certified: tuple[dict[str, Any], dict[int, Entry]],
    arguments: Any,
    first: int | None = None,
    last: int | None = None,
) -> Verified:
    """As `verify`. `certified` is what `certificate.read` found in the file, before code of the user ran."""
    header, lines = certified
    steps = [step for step in lines if (first or 0) <= step <= (last or step)]
    if not steps:
        existing = f"its steps are {min(lines)} to {max(lines)}" if lines else "it has none"
        asked = f"from {first or 0}" + (f" to {last}" if last else "")
        raise ValueError(f"{path} has no step {asked}; {existing}")

    # The arguments are what a function of the user's returned, so they may be anything.
    if not isinstance(arguments, dict):
        raise TypeError(f"expected the arguments of fit in a dict, got {checks.describe(arguments)}")
    needed = ("state", "step", "train_data")
    for name in needed:
        if name not in arguments:
            raise TypeError(f"missing a required argument: {name!r}")
    for name in arguments:
        if name not in needed and name not in FitOptions.__dataclass_fields__:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    state, step, train_data = (arguments[name] for name in needed)
    check_is_state(state, "verify")
    if why := difference(header, header_of(step, state)):
        raise ValueError(f"{path} is from another run ({why})")
    left_out = frozenset(header.get("left_out", ()))  # by `Undo`, which is no option of the step
    if isinstance(step, TrainStep):
        left_out |= step.left_out

    # Begin at the newest good checkpoint that is not after `first`. Without one, at the state that is given.
    start, info = None, None
    given_step, checkpoint_dir = int(state.step), arguments.get("checkpoint_dir")
    if checkpoint_dir is not None:
        directory = checkpoint._as_path(checkpoint_dir, "verify: checkpoint_dir")
        good = checkpoint._newest_good(
            directory,
            set(),
            lambda path, body: given_step < body.get("step", 0) <= (first or 0) and has_good_info(path, body),
        )
        if good is not None:
            state, start = checkpoint.restore(good.path, template(state, step)), good.path
            info = RunInfo.from_json(good.body["info"]) if "first" in good.body.get("info", {}) else None
    begin = int(state.step)
    if begin > steps[0]:
        raise ValueError(
            f"the state is at step {begin}, after the first step to compare, {steps[0]}; give an earlier state, "
            "or a later --from"
        )

    # Of the options these two may change bits: which examples a step has, and which program makes it.
    options = {name: arguments[name] for name in ("batch_size", "steps_per_execution") if name in arguments}
    call = Run(state, step, train_data, FitOptions(max_steps=max(1, steps[-1] - begin), progress=False, **options))
    state = call.check(state)
    place = None if info is None else info.place
    if start is not None and place is None and getattr(call.source, "is_read_once", False):
        raise ValueError(
            f"the data can be read only once, and nothing says where they were after step {begin}; give an iterator "
            "with get_state and set_state, a list, or a function of the epoch"
        )
    data._go_to(call.source, place)
    clock = Clock.resume(call, info or RunInfo(begin, call.batch_size, call.examples), begin)
    clock.last = steps[-1]

    # All lines from the beginning on are compared, also those before `first`: what differs there was wrong first.
    on_the_way = [step for step in lines if begin <= step <= steps[-1]]
    recomputed: list[Entry] = []
    # A step of a line is made with the hashes of its shards, so it must be known as due before it is made. The header
    # of an earlier jaxpar does not say at which distance the lines are.
    again = Certificate(math.gcd(*on_the_way), recomputed.append)
    compared: list[int] = []
    right = begin  # the last step that is known to be right, as far as the start is
    with contextlib.closing(own_steps(call, clock, state, left_out, again)) as made:
        for certified_step in on_the_way:
            # A state at a certified step may be the first one, which no step is made for.
            while clock.step < certified_step:
                state, _, rows = next(made)
                clock.advance(call, rows)
            again.take(certified_step, state)
            again.write(certified_step)
            if certified_step in steps:
                compared.append(certified_step)
            if recomputed[-1]["state"] != lines[certified_step]["state"]:
                # The store numbers its values, and people name them.
                names = {f"store/values/{key}": f"params/{name}" for key, name in kv.names(state.store).items()}
                again.names["leaves"] = [names.get(leaf, leaf) for leaf in again.names["leaves"]]
                fault = fault_of(lines[certified_step], recomputed[-1], right, again.names)
                if isinstance(step, TrainStep):
                    network = network_of(step, state, call.source, call.batch_size)
                    fault = dataclasses.replace(fault, _network=network)
                return Verified(start, compared, certified_step, fault)
            right = certified_step
    return Verified(start, compared, None)
