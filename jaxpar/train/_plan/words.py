"""A plan, and a comparison of plans, as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..._core.text import Table


def table_of(plan: Any) -> Table:
    """The answer, and then what to try."""
    verdict = "fits" if plan.fits else f"does NOT fit, by {size(plan.peak_bytes - plan.limit_bytes)}"
    rows = [("memory", f"{size(plan.peak_bytes)} of {size(plan.limit_bytes)} on each device{_parts(plan)}")]
    rows += [("largest", f"{size(one['bytes'])}  {one['name']}  {one['shape']}") for one in plan.arguments[:3]]
    if plan.donated_bytes is not None:
        rows.append(("donated", f"{size(plan.donated_bytes)} of {size(plan.returned_bytes)} that the step returns"))
    rows += list(_sent(plan))
    rows.append(("work", f"{plan.flops / 1e9:,.1f} GFLOP" + _cycles(plan)))
    rows.append(("compiled", f"in {plan.compile_seconds} s of CPU time"))
    rows += [("try" if not plan.fits else "note", text) for text in hints(plan)]
    return Table(f"{name_of(plan)}: {verdict}", ("", ""), rows, most=100)


def name_of(plan: Any) -> str:
    chosen = "".join(f", {name}={value}" for name, value in plan.choices.items())
    return f"{plan.devices} x {plan.chip} ({plan.on}){chosen}"


def size(count: int) -> str:
    """Bytes in decimal units."""
    for unit, power in (("GB", 1e9), ("MB", 1e6)):
        if count >= 0.995 * power:
            return f"{count / power:,.2f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def _parts(plan: Any) -> str:
    """What the peak is made of."""
    text = f": {size(plan.argument_bytes)} state and batch"
    if plan.temporary_bytes is None:
        return text
    kept = plan.argument_bytes + plan.returned_bytes - plan.donated_bytes
    rest = plan.peak_bytes - kept - plan.temporary_bytes
    more = f", {size(rest)} that the compiler sets aside" if rest > plan.peak_bytes / 100 else ""
    return f"{text}, {size(plan.temporary_bytes)} temporaries{more}"


def _cycles(plan: Any) -> str:
    return "" if plan.cycles is None else f"; {plan.cycles:,} cycles estimated, without collectives"


def _sent(plan: Any) -> Iterable[tuple[str, str]]:
    """A row for each kind and axes of collectives."""
    groups: dict[tuple[str, tuple[str, ...]], list[Any]] = {}
    for one in plan.collectives:
        groups.setdefault((one.kind, one.axes), []).append(one)
    for (kind, axes), group in groups.items():
        sent, hidden = (
            sum(one.bytes * one.runs for one in some) for some in (group, [g for g in group if g.overlapped])
        )
        runs, over = sum(one.runs for one in group), f" over {', '.join(axes)}" if axes else ""
        beside = "all beside compute" if hidden == sent else f"{size(hidden)} beside compute" if hidden else "alone"
        least = "" if all(one.is_exact for one in group) else ", in a loop of unknown length at least"
        yield kind, f"{size(sent)} sent by each device{over}, in {runs} a step{least}; {beside}"


def hints(plan: Any) -> list[str]:
    """What to try where it does not fit, and what is remarkable where it does."""
    if not plan.fits:
        if plan.argument_bytes > plan.limit_bytes / 2:
            return [
                f"state and batch alone are {size(plan.argument_bytes)}: split them over the devices, by "
                "sharding=parallel.fsdp() on a mesh or kind='sharded'; if they are split, take more devices"
            ]
        return [
            "temporaries are the most: jax.checkpoint (remat) around the layers, accumulate=N in make_train_step, or "
            "fewer examples for each device"
        ]
    # Other axes have all-reduces of their own: of gradients over copies, of activations under tensor parallelism.
    params = [one for one in plan.arguments if one["name"].startswith("params/")]
    axes = {name for one in params for name in one["axes"]} & set(plan.batch_axes)
    whole = sum(one.bytes * one.runs for one in plan.collectives if one.kind == "all-reduce" and axes & set(one.axes))
    if plan.engine == "jit" and plan.cycles is not None and whole > plan.sent_bytes.get("all-gather", 0) / 2:
        return [
            f"all-reduces of {size(whole)}: split weights or gradients travel whole, where gathers and reduce-scatters "
            "would send half. Split over fewer devices, an axis of the mesh, and keep copies over the rest"
        ]
    return []


def rank(plan: Any) -> tuple[float, ...]:
    """What decides between plans on the same devices, the least first."""
    return (plan.cycles or 0, plan.alone_bytes, plan.peak_bytes)


def comparison_of(rows: Iterable[tuple[str, dict[str, Any], Any]], best: Mapping[str, Any]) -> Table:
    """A row for each plan. The best of each `on` has a star. The others are compared with it, or with the first."""
    rows = list(rows)
    tops = {on: plan for on, _, plan in reversed(rows) if not isinstance(plan, str) and plan.fits} | dict(best)
    names = list(dict.fromkeys(name for _, choices, _ in rows for name in choices))
    cells: list[list[str]] = [["", "on", *names, "memory", "sent", "alone", "cycles", "compared"]]
    for on, choices, plan in rows:
        chosen = [str(choices.get(name, "")) for name in names]
        if isinstance(plan, str):
            cells.append(["", on, *chosen, "", "", "", "", plan])
            continue
        top = tops.get(on)
        numbers = [
            size(plan.peak_bytes) + ("" if plan.fits else " NO"),
            size(sum(plan.sent_bytes.values())),
            size(plan.alone_bytes),
            f"{plan.cycles:,}" if plan.cycles else "",
        ]
        mark = "*" if plan is best.get(on) else ""
        cells.append([mark, on, *chosen, *numbers, "with this" if plan is top else _beside(plan, top)])
    head, *body = cells
    return Table("memory of one device, bytes that it sends in a step", tuple(head), [head, *body], most=200)


def _beside(plan: Any, other: Any) -> str:
    """In what a plan differs from another."""
    if not plan.fits or other is None:
        return f"does not fit by {size(plan.peak_bytes - plan.limit_bytes)}"
    pairs = (
        ("cycles", plan.cycles, other.cycles),
        ("sent", sum(plan.sent_bytes.values()), sum(other.sent_bytes.values())),
        ("memory", plan.peak_bytes, other.peak_bytes),
    )
    ratios = [f"{mine / its:.2f} x {name}" for name, mine, its in pairs if mine and its and abs(mine / its - 1) > 0.01]
    return ", ".join(ratios) or "the same"
