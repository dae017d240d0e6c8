"""`train.plan` and `train.compare_plans`: does a step fit, what does it send, what would another choice give."""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..._core.text import Table, describe
from .._step.train_step import TrainStep
from .accelerators import Slice
from .child import ask
from .compiled import PlannedCollective, examine

if TYPE_CHECKING:
    from ... import viz


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What a training step would be on accelerators, by their compiler. Nothing of it was measured on a chip.

    Bytes, FLOPs and cycles are those of one device in one step. Where the compiler of TPUs refuses a program that does
    not fit, what only a program says is None, and `collectives` is empty. A step with `virtual_shards` is several
    programs: its numbers are sums, its peak is the highest of any, and it has no picture.

    Attributes:
        on, choices: as given to `train.plan`. Values of choices are strings.
        devices, chip: how many devices, and their kind.
        engine: of the step, what "auto" chooses.
        batch_axes: of the mesh, over which the batch is split.
        fits: whether the step fits the memory.
        peak_bytes: what it needs at once.
        limit_bytes: what there is: of a TPU what its compiler allows, of a GPU the part of its memory that JAX takes,
            0.75 or `XLA_PYTHON_CLIENT_MEM_FRACTION`.
        argument_bytes, returned_bytes, temporary_bytes: state and batch, what the step returns, and the rest.
        donated_bytes: what it returns in the memory of its arguments.
        arguments: the five largest arrays of state and batch: `name`, `shape` of the whole, `bytes` of one device,
            `axes` of the mesh over which it is split.
        flops: counted from the traced step, as XLA counts them. Of branches the costliest counts.
        cycles: the sum of the estimates of the compiler of TPUs, for comparisons only. Collectives and most copies have
            no estimate. None for GPUs.
        collectives: each of the program.
        compile_seconds: of CPU time.
    """

    on: str
    choices: dict[str, str]
    devices: int
    chip: str
    engine: str
    batch_axes: tuple[str, ...]
    fits: bool
    peak_bytes: int
    limit_bytes: int
    argument_bytes: int
    arguments: tuple[dict[str, Any], ...]
    flops: int
    compile_seconds: float
    returned_bytes: int | None = None
    donated_bytes: int | None = None
    temporary_bytes: int | None = None
    cycles: int | None = None
    collectives: tuple[PlannedCollective, ...] = ()
    _picture: Any = dataclasses.field(default=None, compare=False)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that a device sends in one step, by kind of collective."""
        by_kind: dict[str, int] = {}
        for collective in self.collectives:
            by_kind[collective.kind] = by_kind.get(collective.kind, 0) + collective.bytes * collective.runs
        return by_kind

    @property
    def alone_bytes(self) -> int:
        """Those of `sent_bytes` during which the device computes nothing."""
        return sum(collective.bytes * collective.runs for collective in self.collectives if not collective.overlapped)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "_picture"}
        fields["collectives"] = [dataclasses.asdict(collective) for collective in self.collectives]
        return {**fields, "sent_bytes": self.sent_bytes}

    def plot(self) -> viz.Plot:
        """The picture of the step, as of `viz.plot_step`. `ValueError` with the reason where there is none."""
        from ... import viz  # who trains does not need it

        if isinstance(self._picture, str):
            raise ValueError(f"train.plan: no picture: {self._picture}")
        return viz._plot_drawn(*self._picture, title=f"{_name_of(self)}")

    def __repr__(self) -> str:
        return str(_table_of(self))

    def _repr_html_(self) -> str:
        from ... import viz

        table = _table_of(self)._repr_html_()
        if isinstance(self._picture, str):
            return table
        try:
            picture = self.plot().pipe("svg", encoding="utf-8")
        except viz.RenderError as error:
            picture = f"<p>{html.escape(str(error))}</p>"
        return f"<div>{table}{picture[picture.find('<svg') :]}</div>"


@dataclasses.dataclass(frozen=True, repr=False)
class PlanComparison:
    """Plans over several choices. It prints as a table.

    Attributes:
        rows: `(on, choices, plan)` for each. A string in place of the plan says why there is none.
    """

    rows: tuple[tuple[str, dict[str, Any], Plan | str], ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Those that there are, in the order of the rows."""
        return tuple(plan for _, _, plan in self.rows if isinstance(plan, Plan))

    @property
    def best(self) -> dict[str, Plan]:
        """The best plan that fits on each of `on`. None for GPUs, whose programs have no estimate of time.

        It has the fewest estimated cycles, then the fewest bytes sent alone, then the lowest peak.
        """
        best_of: dict[str, Plan] = {}
        for plan in sorted(self.plans, key=lambda plan: (plan.cycles or 0, plan.alone_bytes, plan.peak_bytes)):
            if plan.fits and plan.cycles is not None:
                best_of.setdefault(plan.on, plan)
        return best_of

    def to_dict(self) -> list[dict[str, Any]]:
        """A dict for each row, for JSON."""
        heads = ({"on": on, "choices": {k: str(v) for k, v in choices.items()}} for on, choices, _ in self.rows)
        rows = (plan.to_dict() if isinstance(plan, Plan) else {"error": plan} for _, _, plan in self.rows)
        return [{**a, **b} for a, b in zip(heads, rows, strict=True)]

    def __repr__(self) -> str:
        return str(_comparison_of(self))

    def _repr_html_(self) -> str:
        return _comparison_of(self)._repr_html_()


_MAKE = "make(devices, **choices) -> (step, state, batch)"


def plan(make: Callable[..., Any], on: str = "v5e:2x4", **choices: Any) -> Plan:
    """What a training step would be on accelerators that are not there: does it fit, what does it send.

    The compiler of these devices compiles the step, in a process of its own. Nothing is run, and the model may be
    larger than this machine. It needs `libtpu` or JAX's CUDA plugin: in this Python or in the one that the environment
    variable `JAXPAR_PLAN_PYTHON` names, which `make plan-env` sets up.

    Args:
        make: `make(devices, **choices) -> (step, state, batch)`, the ordinary construction on these devices, meshes
            included. It is evaluated for shapes. `batch` is the whole batch, of arrays or `jax.ShapeDtypeStruct`s.
            A function of a notebook or a script needs the package `cloudpickle`.
        on: `"v5e:2x4"` and the like, chips along each axis of a slice of v4, v5e, v5p, v6e or tpu7x; `"h100:8"`, or
            `"h100:4x8"` for four hosts with eight each, of a100, h100, h200 or b200.
        **choices: given to `make`.

    Raises:
        ValueError: there is no such slice; `make` raises; it cannot be sent to the other process.
        RuntimeError: there is no compiler for these devices.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from jaxpar import kv, models, train
        >>> def make(devices, kind="device"):
        ...     params = models.lenet.init(jax.random.key(0))
        ...     store = kv.from_params(params, kind=kind, optimizer=optax.sgd(0.1), devices=devices)
        ...     n = 128 * len(devices)
        ...     batch = {"image": jax.ShapeDtypeStruct((n, 28, 28, 1), jnp.float32),
        ...              "label": jax.ShapeDtypeStruct((n,), jnp.int32)}
        ...     step = train.make_train_step(train.classification_loss(models.lenet.apply))
        ...     return step, train.create_state(store, 0), batch
        >>> print(train.plan(make, on="v5e:2x4"))  # doctest: +SKIP
    """
    check_make(make, "train.plan")
    fields, picture = ask(examine, make, Slice(on, "train.plan"), choices, "train.plan")
    return Plan(**fields, _picture=picture)


def check_make(make: object, caller: str) -> None:
    """`TypeError` for a step, which is on devices that are there, or for what else is no function."""
    if not callable(make) or isinstance(make, TrainStep):
        got = "a train step" if isinstance(make, TrainStep) else describe(make)
        raise TypeError(
            f"{caller}: make must be a function, {_MAKE}, got {got}; put the lines that make the step, the state and "
            f"the batch into a function of the devices: {caller}(make, on='v5e:2x4')"
        )


def compare_plans(
    make: Callable[..., Any], on: str | Sequence[str] = "v5e:2x4", **choices: Sequence[Any]
) -> PlanComparison:
    """Plans for all combinations of devices and choices, as a table.

    Args:
        make: as for `train.plan`.
        on: names of devices.
        **choices: for each choice, its values: `kind=["device", "sharded"]`.

    Raises:
        ValueError, RuntimeError: as of `train.plan`. What `make` raises for some choices is in their row.

    Example:
        >>> from jaxpar import train
        >>> print(train.compare_plans(make, on=["v5e:2x4"], kind=["device", "sharded"]))  # doctest: +SKIP
    """
    check_make(make, "train.compare_plans")
    slices = [on] if isinstance(on, str) else list(on)
    for name in slices:
        Slice(name, "train.compare_plans")  # its `ValueError` comes before any work
    for name, values in choices.items():
        if isinstance(values, str):  # else each letter would be a choice
            raise TypeError(f"train.compare_plans: {name} must be a list of values, got {values!r}; write [{values!r}]")
    rows: list[tuple[str, dict[str, Any], Plan | str]] = []
    for name, *values in itertools.product(slices, *choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        try:
            rows.append((name, chosen, plan(make, name, **chosen)))
        except ValueError as error:
            rows.append((name, chosen, str(error)))
    return PlanComparison(tuple(rows))


# A plan, and a comparison of plans, as tables for people.


def _table_of(plan: Plan) -> Table:
    """The answer, and then what to try."""
    # What the peak is made of. Of a program that its compiler refused only state and batch are known.
    memory = f"{size_text(plan.peak_bytes)} of {size_text(plan.limit_bytes)} on each device"
    memory += f": {size_text(plan.argument_bytes)} state and batch"
    if plan.temporary_bytes is not None and plan.donated_bytes is not None and plan.returned_bytes is not None:
        kept = plan.argument_bytes + plan.returned_bytes - plan.donated_bytes
        set_aside = plan.peak_bytes - kept - plan.temporary_bytes
        memory += f", {size_text(plan.temporary_bytes)} temporaries"
        memory += f", {size_text(set_aside)} that the compiler sets aside" if set_aside > plan.peak_bytes / 100 else ""
    rows = [("memory", memory)]
    for argument in plan.arguments[:3]:
        rows.append(("largest", f"{size_text(argument['bytes'])}  {argument['name']}  {argument['shape']}"))
    if plan.donated_bytes is not None and plan.returned_bytes is not None:
        rows.append(
            ("donated", f"{size_text(plan.donated_bytes)} of {size_text(plan.returned_bytes)} that the step returns")
        )

    # What is sent: a row for each kind and axes of collectives.
    groups: dict[tuple[str, tuple[str, ...]], list[PlannedCollective]] = {}
    for collective in plan.collectives:
        groups.setdefault((collective.kind, collective.axes), []).append(collective)
    for (kind, axes), group in groups.items():
        sent = sum(collective.bytes * collective.runs for collective in group)
        hidden = sum(collective.bytes * collective.runs for collective in group if collective.overlapped)
        runs, along = sum(collective.runs for collective in group), f" over {', '.join(axes)}" if axes else ""
        beside = (
            "all beside compute" if hidden == sent else f"{size_text(hidden)} beside compute" if hidden else "alone"
        )
        least = "" if all(collective.is_exact for collective in group) else ", in a loop of unknown length at least"
        rows.append((kind, f"{size_text(sent)} sent by each device{along}, in {runs} a step{least}; {beside}"))

    # What is computed, and what to try.
    cycles = "" if plan.cycles is None else f"; {plan.cycles:,} cycles estimated, without collectives"
    rows.append(("work", f"{plan.flops / 1e9:,.1f} GFLOP{cycles}"))
    rows.append(("compiled", f"in {plan.compile_seconds} s of CPU time"))
    if hint := _hint(plan):
        rows.append(("note" if plan.fits else "try", hint))
    verdict = "fits" if plan.fits else f"does NOT fit, by {size_text(plan.peak_bytes - plan.limit_bytes)}"
    return Table(f"{_name_of(plan)}: {verdict}", ("", ""), rows, most=100)


def _name_of(plan: Plan) -> str:
    chosen = "".join(f", {name}={value}" for name, value in plan.choices.items())
    return f"{plan.devices} x {plan.chip} ({plan.on}){chosen}"


def size_text(count: int) -> str:
    """Bytes in decimal units."""
    for unit, power in (("GB", 1e9), ("MB", 1e6)):
        if count >= 0.995 * power:
            return f"{count / power:,.2f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def _hint(plan: Plan) -> str:
    """What to try where it does not fit, and what is remarkable where it does. May be empty."""
    if not plan.fits and plan.argument_bytes > plan.limit_bytes / 2:
        return (
            f"state and batch alone are {size_text(plan.argument_bytes)}: split them over the devices, by "
            "sharding=parallel.fsdp() on a mesh or kind='sharded'; if they are split, take more devices"
        )
    if not plan.fits:
        return (
            "temporaries are the most: jax.checkpoint (remat) around the layers, accumulate=N in make_train_step, or "
            "fewer examples for each device"
        )
    # Other axes have all-reduces of their own: of gradients over copies, of activations under tensor parallelism.
    params = [item for item in plan.arguments if item["name"].startswith("params/")]
    axes = {name for item in params for name in item["axes"]} & set(plan.batch_axes)
    all_reduced = sum(
        item.bytes * item.runs for item in plan.collectives if item.kind == "all-reduce" and axes & set(item.axes)
    )
    if plan.engine == "jit" and plan.cycles is not None and all_reduced > plan.sent_bytes.get("all-gather", 0) / 2:
        return (
            f"all-reduces of {size_text(all_reduced)}: split weights or gradients travel whole, where gathers and "
            "reduce-scatters would send half. Split over fewer devices, an axis of the mesh, and keep copies over the "
            "rest"
        )
    return ""


def _comparison_of(comparison: PlanComparison) -> Table:
    """A row for each plan. The best of each `on` has a star. The others are compared with it, or with the first."""
    # Each row is compared with the best one, or where no time is known, as of GPUs, with the first one that fits.
    best = comparison.best
    tops = {plan.on: plan for plan in reversed(comparison.plans) if plan.fits} | best
    names = list(dict.fromkeys(name for _, choices, _ in comparison.rows for name in choices))
    head = ("", "on", *names, "memory", "sent", "alone", "cycles", "compared")
    cells: list[Sequence[str]] = [head]
    for on, choices, plan in comparison.rows:
        chosen = [str(choices.get(name, "")) for name in names]
        if isinstance(plan, str):
            cells.append(["", on, *chosen, "", "", "", "", plan])
            continue
        top = tops.get(on)
        numbers = [
            size_text(plan.peak_bytes) + ("" if plan.fits else " NO"),
            size_text(sum(plan.sent_bytes.values())),
            size_text(plan.alone_bytes),
            f"{plan.cycles:,}" if plan.cycles else "",
        ]
        mark = "*" if plan is best.get(on) else ""
        cells.append([mark, on, *chosen, *numbers, "with this" if plan is top else _beside(plan, top)])
    return Table("memory of one device, bytes that it sends in a step", head, cells, most=200)


def _beside(plan: Plan, other: Plan | None) -> str:
    """In what a plan differs from another."""
    if not plan.fits or other is None:
        return f"does not fit by {size_text(plan.peak_bytes - plan.limit_bytes)}"
    pairs = (
        ("cycles", plan.cycles, other.cycles),
        ("sent", sum(plan.sent_bytes.values()), sum(other.sent_bytes.values())),
        ("memory", plan.peak_bytes, other.peak_bytes),
    )
    ratios = [
        f"{value / its:.2f} x {name}" for name, value, its in pairs if value and its and abs(value / its - 1) > 0.01
    ]
    return ", ".join(ratios) or "the same"
