"""What of a training step grows with the number of devices: by compilation, by a model, and the model by measurement.

Three parts. `compile` compiles the step for 8 to 512 emulated devices, each case in a process of its own, and reports
what each device sends, its memory, the size of the program and the time of compiling it; nothing is run. `model`
predicts the time of a step for 8 to 65,536 devices from latencies and bandwidths (`_cost_model.py`). `loopback` holds
that model against steps over 2 and 4 processes of this machine, with latency and bandwidth fitted to two sums.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _cost_model as model
from _harness import HERE, environment, save, saved, show

CASES = (
    ("device", "none"),
    ("sharded", "none"),
    ("local", "none"),
    ("device", "2bit"),
    ("device", "int8"),
    ("device", "int3"),
    ("sharded", "2bit"),
    ("sharded", "int8"),
    ("sharded", "int3"),
)
MEASURED = ("lenet", "mlp")
NETWORKS = ("lenet", "resnet50", "gpt2_small")
PREDICTED = (8, 64, 512, 4096, 16384, 65536)
WAYS = (*CASES[:6], ("device, one ring", "none"))  # of the prediction
OVERLAPS = (0.0, 0.8)
PICTURE = HERE.parent / "docs" / "pictures" / "scale.png"


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    report: dict[str, Any] = saved(options, "scale")
    report["environment"] = {k: v for k, v in environment().items() if k not in ("torch", "mxnet")}
    if "compile" in options.parts:
        report["compile"] = compile_part(options, report.get("compile", []))
    if "model" in options.parts:
        report["model"] = model_part(options)
    if "loopback" in options.parts:
        report["loopback"] = loopback_part(options)
    save(options, "scale", report)
    if options.picture is not None and "model" in report:
        draw(report["model"], options.picture)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What of a training step grows with the number of devices.")
    parser.add_argument("parts", nargs="*", metavar="part", help="compile, model, loopback (default: all)")
    parser.add_argument("--devices", type=int, nargs="+", help="sizes to compile for (default: 8 ... 512)")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="what to compile (default: all)")
    parser.add_argument("--cases", nargs="+", choices=[name(*c) for c in CASES], help="of them (default: all)")
    parser.add_argument("--limit", type=float, default=40, help="seconds that one case may take (default 40)")
    parser.add_argument(
        "--most-seconds", type=float, default=480, help="for all of `compile`, each network its share (default 480)"
    )
    parser.add_argument("--rounds", type=int, default=12, help="of `loopback` (default 12)")
    parser.add_argument("--quick", action="store_true", help="LeNet on 8 devices, 2 rounds: does it run at all?")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: results/, nothing with --quick)")
    parser.add_argument("--picture", type=Path, help="file to draw (default: docs/pictures/, nothing with --quick)")
    options = parser.parse_args(argv)
    known = ["compile", "model", "loopback"]
    for part in options.parts:
        if part not in known:
            parser.error(f"unknown part {part!r}; known are {', '.join(known)}")
    options.parts = options.parts or known
    if options.quick:
        options.devices, options.networks = options.devices or [8], options.networks or ["lenet"]
        options.rounds = 2
    elif options.picture is None and options.output is None:
        options.picture = PICTURE
    return options


# By compilation.


def compile_part(options: argparse.Namespace, before: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """A row for each case, and those of `before` that were not asked for.

    A case that took too long says so; larger ones of its sort are left out, as are those for which no time is left.
    """
    networks = options.networks or NETWORKS
    rows: list[dict[str, Any]] = []
    for network in networks:
        sizes = sorted(
            options.devices or ([2, 4, 8, 16, 32, 64, 128, 256, 512] if network == "lenet" else [8, 64, 512])
        )
        deadline = time.monotonic() + options.most_seconds / len(networks)
        for kind, compressor in CASES:
            if options.cases and name(kind, compressor) not in options.cases:
                continue
            for n in sizes:
                left = deadline - time.monotonic()
                if left < 1:
                    break
                case = {"network": network, "kind": kind, "compressor": compressor, "devices": n}
                rows.append(compiled(case, min(options.limit, left)))
                if "missing" in rows[-1]:
                    break
    asked = {identity(row) for row in rows}
    rows = sorted([*rows, *(row for row in before if identity(row) not in asked)], key=identity)
    for network in networks:
        show_compiled(network, rows)
    return rows


def identity(row: dict[str, Any]) -> tuple[int, int, int]:
    """Which case a row is, in the order of the tables."""
    return NETWORKS.index(row["network"]), CASES.index((row["kind"], row["compressor"])), row["devices"]


def compiled(case: dict[str, Any], limit: float) -> dict[str, Any]:
    env = dict(os.environ, JAX_NUM_CPU_DEVICES=str(case["devices"]), JAX_PLATFORMS="cpu")
    env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    request = json.dumps({k: case[k] for k in ("network", "kind", "compressor")})
    command = [sys.executable, str(HERE / "_scale_compile.py"), request]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {**case, "missing": f"more than {limit:.0f} s"}
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def show_compiled(network: str, rows: list[dict[str, Any]]) -> None:
    header = (network, "devices", "sent MB", "of parameters", "memory MB", "instructions", "lower s", "compile s")
    chosen = [row for row in rows if row["network"] == network]
    show(header, [[name(row["kind"], row["compressor"]), str(row["devices"]), *cells(row)] for row in chosen])


def cells(row: dict[str, Any]) -> list[str]:
    if "missing" in row:
        return [row["missing"], *5 * [""]]
    return [
        f"{row['sent_bytes'] / 1e6:.3f}",
        f"{row['sent_bytes'] / row['parameter_bytes']:.2f}",
        f"{row['memory_bytes'] / 1e6:.1f}",
        str(row["instructions"]),
        f"{row['lower_seconds']:.1f}",
        f"{row['compile_seconds']:.1f}",
    ]


def name(kind: str, compressor: str) -> str:
    return kind if compressor == "none" else f"{kind} + {compressor}"


# By the model.


def model_part(options: argparse.Namespace) -> dict[str, Any]:
    cluster = model.H100
    report: dict[str, Any] = {"cluster": as_json(cluster), "networks": {}}
    for work in (model.resnet50(), model.one_billion()):
        rows = [predicted(work, cluster, n, *way, overlap) for way in WAYS for n in PREDICTED for overlap in OVERLAPS]
        report["networks"][work.name] = {
            "parameters": work.parameters,
            "examples_per_device": work.examples,
            "utilization": work.utilization,
            "sources": work.sources,
            "rows": rows,
        }
        show_predicted(work.name, rows)
    return report


def as_json(cluster: model.Cluster) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(cluster)


def predicted(
    work: model.Work, cluster: model.Cluster, n: int, kind: str, compressor: str, overlap: float
) -> dict[str, Any]:
    algorithm = "ring" if "ring" in kind else "best"
    step = model.step(
        work, cluster, n, kind=kind.split(",")[0], compressor=compressor, overlap=overlap, algorithm=algorithm
    )
    return {
        "kind": kind,
        "compressor": compressor,
        "devices": n,
        "overlap": overlap,
        "milliseconds": round(1e3 * step.seconds, 3),
        "communication_milliseconds": round(1e3 * (step.gradients + step.parameters), 3),
        "efficiency": round(step.efficiency, 4),
    }


def show_predicted(title: str, rows: list[dict[str, Any]]) -> None:
    table = []
    for kind, compressor in WAYS:
        for overlap in OVERLAPS:
            chosen = {
                r["devices"]: r
                for r in rows
                if (r["kind"], r["compressor"], r["overlap"]) == (kind, compressor, overlap)
            }
            steps = [f"{chosen[n]['milliseconds']:.0f} ({chosen[n]['efficiency']:.0%})" for n in PREDICTED]
            table.append([name(kind, compressor), f"{overlap:.0%}", *steps])
    show((f"{title}, ms a step", "overlap", *(f"{n:,}" for n in PREDICTED)), table)


def draw(report: dict[str, Any], path: Path) -> None:
    """Efficiency over the number of devices, a panel for each network."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(report["networks"]), figsize=(11, 4), sharey=True, layout="constrained")
    for panel, (title, network) in zip(panels, report["networks"].items(), strict=True):
        for colour, (kind, compressor) in enumerate(WAYS):
            for overlap, style in zip(OVERLAPS, ("--", "-"), strict=True):
                rows = [
                    r
                    for r in network["rows"]
                    if (r["kind"], r["compressor"], r["overlap"]) == (kind, compressor, overlap)
                ]
                label = name(kind, compressor) if style == "-" else None
                panel.plot(
                    [r["devices"] for r in rows],
                    [100 * r["efficiency"] for r in rows],
                    style,
                    color=f"C{colour}",
                    marker="o",
                    markersize=3,
                    label=label,
                )
        panel.set(title=title, xscale="log", xlabel="devices", xticks=PREDICTED, ylim=(0, 102))
        panel.set_xticklabels([f"{n:,}" for n in PREDICTED])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of the step that is computing, %")
    panels[-1].legend(title="solid: 80 % overlap, dashed: none", fontsize=8, title_fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# By measurement.


def loopback_part(options: argparse.Namespace) -> list[dict[str, Any]]:
    counts = [2] if options.quick else [2, 4]
    measured = {n: together(n, options.rounds, MEASURED) for n in counts}
    links = {n: fitted(n, measured[n]["seconds"]) for n in counts}
    report = [held(n, measured[n], links[fit], fit) for n in counts for fit in counts if fit <= n]
    show_held(report)
    return report


def together(processes: int, rounds: int, networks: Sequence[str]) -> dict[str, Any]:
    """What process 0 measured of that many on this machine; `RuntimeError` where one failed or all took too long."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    command = [sys.executable, str(HERE / "_loopback.py"), str(port), str(processes)]
    started = [
        subprocess.Popen(
            [*command, str(i), str(rounds), *networks], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(processes)
    ]
    try:
        answers = [process.communicate(timeout=600) for process in started]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{processes} processes did not finish within 600 s") from error
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, words) in zip(started, answers, strict=True):
        if process.returncode:
            raise RuntimeError(f"one of {processes} processes ended with status {process.returncode}:\n{words}")
    return json.loads(answers[0][0].strip().splitlines()[-1])  # Gloo writes lines of its own before


def best(seconds: Sequence[float]) -> float:
    return min(seconds)


def fitted(n: int, seconds: dict[str, list[float]], of: Callable = best) -> model.Link:
    """The link that explains the smallest and the largest sum; the start of a program is taken off."""
    sums = sorted((int(item.split()[1]), of(times)) for item, times in seconds.items() if item.startswith("sum "))
    start = of(seconds["nothing"])
    (s0, t0), (s1, t1) = sums[0], sums[-1]
    return model.fit(n, (s0, t0 - start), (s1, t1 - start))


def held(n: int, measured: dict[str, Any], link: model.Link, fitted_on: int, of: Callable = best) -> dict[str, Any]:
    """Predicted and measured milliseconds of each sum and step over n processes."""
    seconds, rows = measured["seconds"], {}
    for item in seconds:
        if item.startswith("sum "):
            predicted = of(seconds["nothing"]) + model.ring_all_reduce(int(item.split()[1]), n, link)
        elif item.endswith(" together"):
            network = item.split()[0]
            alone = of(seconds[f"{network} alone"])
            predicted = alone + sum(pieces_time(c, n, link) for c in measured["collectives"][network])
        else:
            continue
        rows[item] = {
            "predicted_ms": round(1e3 * predicted, 3),
            "measured_ms": round(1e3 * of(seconds[item]), 3),
            "median_ms": round(1e3 * statistics.median(seconds[item]), 3),
            "ratio": round(predicted / of(seconds[item]), 3),
        }
    return {
        "processes": n,
        "fitted_on": fitted_on,
        "latency_microseconds": round(1e6 * link.latency, 1),
        "gigabytes_per_second": round(link.bandwidth / 1e9, 3),
        "alone_ms": {k.split()[0]: round(1e3 * of(v), 3) for k, v in seconds.items() if k.endswith(" alone")},
        "rows": rows,
    }


def pieces_time(collective: dict[str, int], n: int, link: model.Link) -> float:
    """An all-reduce of several arrays: on CPU devices each array is one ring."""
    size = collective["bytes"] / collective["arrays"]
    return collective["arrays"] * model.ring_all_reduce(size, n, link)


def show_held(report: list[dict[str, Any]]) -> None:
    table = []
    for entry in report:
        for item, row in entry["rows"].items():
            table.append(
                [
                    str(entry["processes"]),
                    f"{entry['fitted_on']}: {entry['latency_microseconds']:.0f} us, "
                    f"{entry['gigabytes_per_second']:.2f} GB/s",
                    item,
                    f"{row['predicted_ms']:.2f}",
                    f"{row['measured_ms']:.2f}",
                    f"{row['ratio']:.2f}",
                ]
            )
    show(("processes", "fitted on", "item", "predicted ms", "measured ms", "ratio"), table)


if __name__ == "__main__":
    main()
