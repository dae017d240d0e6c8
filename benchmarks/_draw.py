"""Draws what is in results/ for the README: how fast the LeNet step and push + pull are, beside their peers.

python benchmarks/_draw.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
OURS, PEER, GOAL = "#1f77b4", "#b0b0b0", "#d62728"


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def lenet() -> Figure:
    """Images per second of every contender, the fastest on top."""
    result = read("train_step")
    speeds = sorted(result["images_per_second"].items(), key=lambda item: item[1])
    figure = Figure(figsize=(8, 0.8 + 0.3 * len(speeds)), layout="constrained")
    axes = figure.subplots()
    colours = [OURS if name.startswith("jaxpar") else PEER for name, _ in speeds]
    bars = axes.barh([name for name, _ in speeds], [speed for _, speed in speeds], color=colours)
    axes.bar_label(bars, [f"{speed:,.0f}" for _, speed in speeds], padding=3, fontsize=9)
    axes.margins(x=0.12)
    about = result["environment"]
    axes.set(xlabel="images per second", title=f"LeNet step, batch {result['batch']}, {_words(about)}")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def kvstore() -> Figure:
    """Times as fast as MXNet's better kind, for each row and way."""
    result = read("kvstore")
    rows = result["rows"]
    ways = ("loop device", "compiled device", "eager device", "eager local")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, (way, shade) in enumerate(zip(ways, (1.0, 0.75, 0.5, 0.3), strict=True)):
        at = [n + 0.21 * (i - 1.5) for n, row in enumerate(rows) if way in rows[row]["against_mxnet"]]
        values = [row["against_mxnet"][way] for row in rows.values() if way in row["against_mxnet"]]
        axes.bar_label(axes.bar(at, values, 0.2, color=OURS, alpha=shade, label=way), fmt="%.1f", fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhline(2, color=GOAL, linewidth=0.8, linestyle="--", label="the goal")
    axes.set_xticks(range(len(rows)), [name.replace(" on ", "\non ").replace("r t", "r\nt") for name in rows])
    axes.set(ylabel="times as fast as MXNet", title=f"push + pull from 4 devices, {_words(result['environment'])}")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _words(environment: dict) -> str:
    return f"{environment['machine']}, jax {environment['jax']}"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, draw in (("lenet_speed", lenet), ("kvstore_speed", kvstore)):
        draw().savefig(PICTURES / f"{name}.png", dpi=120)
        print(f"drew docs/pictures/{name}.png")


if __name__ == "__main__":
    main()
