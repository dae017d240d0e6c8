"""Test accuracy and seconds from the start of a process, for each of twenty seeds: jaxpar beside PyTorch.

Each run is a new process. The clock starts before it is spawned and stops when it has ended: imports, reading the data,
tracing, compilation, training and evaluation are in it. There is no cache of compiled programs. jaxpar's run is the
command `jaxpar train --recipe fast --no-compilation-cache --seed N`. PyTorch's is `_record_torch.py N`, the same
network and recipe, and takes turns with it; JAXPAR_TORCH_PYTHON names its Python. All 60,000 images are trained on. The
test set is looked at after the last epoch, and nothing is chosen by it.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _harness import arguments, environment, save, show

from jaxpar import data

HERE = Path(__file__).resolve().parent
DATASETS = ("fashion_mnist", "mnist")
GOALS = {"fashion_mnist": 0.9, "mnist": 0.99}
EPOCHS = {"fashion_mnist": 1, "mnist": 3}
GOAL_SECONDS = 10.0
_ACCURACY = re.compile(r"test accuracy (\d\.\d+)")


def main() -> None:
    options = arguments("Test accuracy and seconds from the start of a process, for each seed.", 20, 0)
    (dataset,) = options.rows or [DATASETS[0]]
    seeds, epochs = (1, 1) if options.quick else (options.rounds, EPOCHS[dataset])
    with tempfile.TemporaryDirectory() as folder:
        _write(dataset, Path(folder))
        contenders = {"jaxpar": _jaxpar(dataset, epochs)}
        torch_python = os.environ.get("JAXPAR_TORCH_PYTHON", sys.executable)
        if _has_torch(torch_python):
            contenders["PyTorch"] = [torch_python, str(HERE / "_record_torch.py"), folder, str(epochs)]
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
        for seed in range(seeds):
            for name, command in contenders.items():
                runs[name].append({"seed": seed, **_run([*command, f"{seed}"])})
                print(f"{name}, seed {seed}: {runs[name][-1]}", flush=True)
    rows = {name: {**_summary(found), "runs": found} for name, found in runs.items()}
    header = (f"{dataset}, {seeds} seeds", "test accuracy, mean", "least", "seconds, median", "most")
    show(header, [(name, *_cells(row)) for name, row in rows.items()])
    print(f"the goal is {GOALS[dataset]:.1%} within {GOAL_SECONDS:.0f} s")
    save(options, f"record_{dataset}", {"environment": environment(), "epochs": epochs, "rows": rows})


def _write(dataset: str, folder: Path) -> None:
    """Both splits as arrays, for PyTorch. This also prepares the data set, which no run is to pay for."""
    for split in ("train", "test"):
        found = data.load(dataset, split, verbose=False)
        np.save(folder / f"{split}_images.npy", found.images)
        np.save(folder / f"{split}_labels.npy", found.labels)


def _jaxpar(dataset: str, epochs: int) -> list[str]:
    words = f"train --recipe fast --no-compilation-cache --dataset {dataset} --epochs {epochs} --seed"
    return [sys.executable, "-m", "jaxpar", *words.split()]


def _has_torch(python: str) -> bool:
    try:
        subprocess.run([python, "-c", "import torch"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        print("no PyTorch: `pip install torch`, or name its Python in JAXPAR_TORCH_PYTHON")
        return False
    return True


def _run(command: list[str]) -> dict[str, float]:
    """One run from a cold start."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent)}
    started = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr}")
    return {"test_accuracy": float(_ACCURACY.findall(done.stdout)[-1]), "seconds": round(seconds, 3)}


def _summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    accuracies, seconds = ([run[name] for run in runs] for name in ("test_accuracy", "seconds"))
    return {
        "mean_test_accuracy": round(statistics.mean(accuracies), 5),
        "least_test_accuracy": min(accuracies),
        "median_seconds": statistics.median(seconds),
        "most_seconds": max(seconds),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    accuracies = (f"{row[name]:.2%}" for name in ("mean_test_accuracy", "least_test_accuracy"))
    return (*accuracies, f"{row['median_seconds']:.2f}", f"{row['most_seconds']:.2f}")


if __name__ == "__main__":
    main()
