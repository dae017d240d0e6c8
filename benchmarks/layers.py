"""Every kind of layer of the networks of `models.py`, in jaxpar and in PyTorch on the same shapes, on all cores.

Each layer and direction is a program of its own; jaxpar's is what its training step compiles for one device. Both
libraries live in processes of their own, which take turns, and keep the memory that they free: otherwise pages that
the kernel fills with zeros are what is measured. `--memory-as-it-comes` leaves that out. First come the limits of the
machine: a large product, a sum of arrays of 32 MB, and the call of a program. A network ends with the sum over its
layers, of count times milliseconds, beside its whole step in the same run. Results of both are held against each other.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from _harness import KEEP_MEMORY, Child, Turn, arguments, environment, ratio, save, saved, show, take_turns
from _layers import FORWARD, LIMITS, NETWORKS, THREE_WAYS, Part

HERE = Path(__file__).resolve().parent
MOST_DIFFERENCE = 0.05  # a convolution with stride begins one pixel later in PyTorch
WHICH = ("milliseconds", "least")  # medians, and the shortest turns, for a machine that others use as well
SUMMARY = ("ms a step", "jaxpar", "PyTorch", "difference", "jaxpar's least", "PyTorch's least", "difference")
HEADER = ("a step", "jaxpar, ms", "PyTorch, ms", "jaxpar, speed", "PyTorch's", "as fast as PyTorch", "cores busy")


def main() -> None:
    flag = "the children give freed memory back to the kernel, as the C library does"
    options = arguments("Layers of networks, beside PyTorch's.", 5, 0.04, memory_as_it_comes=flag)
    rows = options.rows or list(NETWORKS)
    unknown = set(rows) - set(NETWORKS)
    if unknown:
        raise SystemExit(f"no network {', '.join(sorted(unknown))}; there are {', '.join(NETWORKS)}")
    with contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(contextlib.closing(child)) for name, child in _start(options).items()}
        name = f"layers_jax_{children['jaxpar'].version}" + "_memory_as_it_comes" * options.memory_as_it_comes
        report = saved(options, name) or {"networks": {}}
        report["environment"] = environment() | {"jax": children["jaxpar"].version}
        report["environment"]["torch"] = children["PyTorch"].version if "PyTorch" in children else "not installed"
        report["freed_memory_is_kept"] = not options.memory_as_it_comes
        for network in rows:
            limits = _layers("limits", children, options)
            report["networks"][network] = {"limits": limits} | _network(network, limits, children, options)
            save(options, name, report)


def _start(options: Any) -> dict[str, Child]:
    os.environ |= {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    if not options.memory_as_it_comes:
        os.environ |= KEEP_MEMORY
    children = {"jaxpar": Child([sys.executable, str(HERE / "_layers_jax.py")])}
    children["jaxpar"].version = children["jaxpar"].ask(do="version")
    try:
        child = Child([os.environ.get("JAXPAR_TORCH_PYTHON", sys.executable), str(HERE / "_layers_torch.py")])
        child.version = child.ask(do="version")
        children["PyTorch"] = child
    except (RuntimeError, OSError) as error:
        print(f"no PyTorch: {error}; `pip install torch`, or name its Python in JAXPAR_TORCH_PYTHON")
    return children


def _network(network: str, limits: dict, children: dict[str, Child], options: Any) -> dict[str, Any]:
    layers = _layers(network, children, options)
    step = _measured({"network": network, "index": -1, "direction": ""}, children, options)
    sums, least = ({name: _sums(layers, limits, name, which) for name in children} for which in WHICH)
    table = [
        (kind, *_beside(*({name: found[name].get(kind, 0.0) for name in children} for found in (sums, least))))
        for kind in sums["jaxpar"]
    ]
    totals = ({name: sum(kinds.values()) for name, kinds in found.items()} for found in (sums, least))
    table.append(("**sum**", *_beside(*totals)))
    table.append(("**whole step**", *_beside(*(step[which] for which in WHICH))))
    show((f"{network}, {SUMMARY[0]}", *SUMMARY[1:]), table)
    print()
    return {"layers": layers, "sums": sums, "sums_of_least": least, "step": step}


def _sums(layers: dict[str, Any], limits: dict[str, Any], library: str, which: str) -> dict[str, float]:
    """Milliseconds of a step by kind of layer and direction. jaxpar's step is one call of a program."""
    found: dict[str, float] = {}
    counted = [row for row in layers.values() if row["is_counted"] and row["count"]]
    for row in counted:
        ways = row["direction"] in THREE_WAYS and row["kind"] in ("convolution", "product")
        kind = f"{row['kind']}, {row['direction']}" if ways else row["kind"]
        found[kind] = found.get(kind, 0.0) + row["count"] * row[which][library]
    if library == "jaxpar":
        calls = sum(row["count"] for row in counted) - 1
        found["calls that one program saves"] = -calls * limits[f"{LIMITS[-1]}, {FORWARD}"][which][library]
    return found


def _beside(*times: dict[str, float]) -> list[str]:
    """jaxpar's and PyTorch's medians, the difference, and the same of the least."""
    cells = []
    for found in times:
        ours, theirs = found["jaxpar"], found.get("PyTorch")
        cells += [f"{ours:.2f}", *(("", "") if theirs is None else (f"{theirs:.2f}", f"{theirs - ours:+.2f}"))]
    return cells


def _layers(network: str, children: dict[str, Child], options: Any) -> dict[str, Any]:
    """Each layer in each direction; with --quick one of each kind."""
    parts: list[tuple[int, Part]] = list(enumerate(LIMITS if network == "limits" else NETWORKS[network]))
    if options.quick:
        parts = list({part.kind: (index, part) for index, part in reversed(parts)}.values())[::-1]
    found = {}
    for index, part in parts:
        for direction in part.directions():
            row = _measured({"network": network, "index": index, "direction": direction}, children, options)
            work = part.work()
            speeds = {name: work.amounts[direction] / ms / 1e6 for name, ms in row["milliseconds"].items()}
            words = {"kind": part.kind, "direction": direction, "count": part.count, "unit": work.unit}
            is_counted = {"is_counted": direction in part.counted(), "speed": speeds}
            found[f"{part}, {direction}"] = words | is_counted | row
    show((network, *HEADER), [_line(name, row) for name, row in found.items()])
    print()
    return found


def _measured(what: dict[str, Any], children: dict[str, Child], options: Any) -> dict[str, Any]:
    norms = {name: child.ask(do="start", what=what) for name, child in children.items()}
    if what["index"] >= 0 and len(norms) == 2:
        _hold_against(what, *norms.values())
    turns: dict[str, Turn] = {name: child.turn("") for name, child in children.items()}
    times = take_turns(turns, options.rounds, options.turn_seconds, most_seconds=10)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    repeats = {name: max(1, min(1000, round(options.turn_seconds / seconds[name]))) for name in children}
    counted = {name: child.ask(do="count", repeats=repeats[name]) for name, child in children.items()}
    return {
        "milliseconds": {name: 1000 * value for name, value in seconds.items()},
        "least": {name: 1000 * min(values) for name, values in times.items()},
        "times_as_fast_as_pytorch": ratio(times, "PyTorch", "jaxpar") if "PyTorch" in times else None,
        "cores_busy": {name: cores for name, (cores, _) in counted.items()},
        "page_faults": {name: faults for name, (_, faults) in counted.items()},
    }


def _hold_against(what: dict[str, Any], ours: list[float], theirs: list[float]) -> None:
    """That both have computed the same, by the norms of their results, in whatever order these come."""
    if len(ours) != len(theirs):  # PyTorch's LSTM has two biases
        ours, theirs = [math.hypot(*ours)], [math.hypot(*theirs)]
    for a, b in zip(sorted(ours), sorted(theirs), strict=True):
        if not abs(a - b) <= MOST_DIFFERENCE * max(a, b):
            raise RuntimeError(f"{what}: results have the norms {ours} in jaxpar, {theirs} in PyTorch")


def _line(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    libraries = [library for library in ("jaxpar", "PyTorch") if library in row["milliseconds"]]
    blank = [""] * (2 - len(libraries))
    times = [f"{row['milliseconds'][library]:.3f}" for library in libraries] + blank
    speeds = [f"{row['speed'][library]:.0f} {row['unit']}" for library in libraries] + blank
    times_as_fast = row["times_as_fast_as_pytorch"]
    cores = ", ".join(f"{row['cores_busy'][library]:.1f}" for library in libraries)
    count = f"{row['count']} ×" if row["count"] else ""
    return name, count, *times, *speeds, f"{times_as_fast:.2f}" if times_as_fast else "", cores


if __name__ == "__main__":
    main()
