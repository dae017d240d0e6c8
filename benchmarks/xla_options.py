"""Images per second of jaxpar's LeNet step with other numbers of devices and other options of XLA and jax.

Every row is a process of its own, with the environment variables that the table names; all stay alive and take turns.
Nothing here is set by jaxpar: a user sets it before jax starts, `XLA_FLAGS=--xla_cpu_use_xnnpack=false python ...`.
The options are those for CPUs that XLA's own list (`XLA_FLAGS=--help`) describes, without the experimental and the
deprecated ones, and jax's for its dispatch. The lists of flags in the documentation of jax and of OpenXLA name none for
CPUs, and say that flags may go away; XLA ends a process that is given a flag it does not know, and that row is left
out. `loss` is that of the ninth step: options that change it, change results.

`one core` keeps the whole process on a single core from the start (Linux), so that XLA makes one thread.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from _harness import Child, arguments, environment, medians, ratio, save, show, take_turns, timed

BASE = "4 devices"
STEPS = 3  # in one repeat, as train_step.py has it, which starts jax when it is imported
TURNS_FOR_LOSS = 3
FLAGS = (
    "xla_cpu_multi_thread_eigen=false",
    "xla_cpu_prefer_vector_width=512",
    "xla_cpu_use_xnnpack=false",
    "xla_cpu_use_onednn=true",
    "xla_cpu_opt_preset=FAST_RUNTIME",
    "xla_cpu_enable_fast_math=true",
)
ROWS: dict[str, dict[str, Any]] = {
    "1 device": {"devices": 1},
    "2 devices": {"devices": 2},
    BASE: {"devices": 4},
    "8 devices": {"devices": 8},
    "1 device, one core": {"devices": 1, "one_core": True},
    "4 devices, one core": {"devices": 4, "one_core": True},
    **{f"{BASE}, {flag}": {"devices": 4, "variables": {"XLA_FLAGS": f"--{flag}"}} for flag in FLAGS},
    f"{BASE}, no asynchronous dispatch": {"devices": 4, "variables": {"JAX_CPU_ENABLE_ASYNC_DISPATCH": "false"}},
}
QUICK = (BASE, f"{BASE}, {FLAGS[0]}")


def child(devices: int, batch: int, one_core: bool = False, variables: dict[str, str] | None = None) -> None:
    """Answers one request a line: `start` with the loss of the ninth step, `measure` with seconds a repeat."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    for name, value in (variables or {}).items():  # flags come after the user's own, since the last one counts
        os.environ[name] = f"{os.environ.get(name, '')} {value}".strip() if name == "XLA_FLAGS" else value
    if one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from train_step import batch_of, jaxpar_loop

    loop = jaxpar_loop(batch_of(batch), devices, "pmap")
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            result = float([loop() for _ in range(TURNS_FOR_LOSS)][-1]["loss"])
        else:
            result = timed(loop)(request["repeats"])
        print(json.dumps({"result": result}), flush=True)


def start(options: dict[str, Any], batch: int) -> Child:
    return Child([sys.executable, __file__, "child", json.dumps({"batch": batch, **options})])


def started(rows: Sequence[str], batch: int) -> tuple[dict[str, Child], dict[str, float]]:
    """The processes of the rows that can be, one started after the other, and the losses their first steps lead to."""
    children, losses = {}, {}
    for row in rows:
        if ROWS[row].get("one_core") and not hasattr(os, "sched_setaffinity"):
            print(f"no {row}: this system cannot keep a process on one core")
            continue
        child = start(ROWS[row], batch)
        try:
            losses[row] = child.ask(do="start")
            children[row] = child
        except RuntimeError as error:  # its own words are above, on standard error
            print(f"no {row}: {error}")
            child.close()
    return children, losses


def main() -> None:
    options = arguments("The LeNet step with other numbers of devices and other options of XLA and jax.", 15, 0.2)
    batch = 32 if options.quick else 256
    children, losses = started(options.rows or (QUICK if options.quick else list(ROWS)), batch)
    turns = {row: child.turn(row) for row, child in children.items()}
    times = take_turns(turns, options.rounds, options.turn_seconds, most_seconds=180)
    for child in children.values():
        child.close()
    speeds = {row: round(STEPS * batch / seconds) for row, seconds in medians(times).items()}
    against = {row: round(ratio(times, BASE, row), 3) for row in times} if BASE in times else {}
    report = {
        "environment": environment(),
        "batch": batch,
        "rounds": len(next(iter(times.values()))),
        "rows": {row: {**ROWS[row], "images_per_second": speeds[row], "loss": losses[row]} for row in times},
        "against_4_devices": against,
    }
    show(
        (f"LeNet, batch {batch}", "images/s", f"against {BASE}", "loss"),
        [(row, f"{speeds[row]:,}", f"{against[row]:.2f}x" if against else "–", f"{losses[row]:.7f}") for row in times],
    )
    save(options, "xla_options", report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(**json.loads(sys.argv[2]))
    else:
        main()
