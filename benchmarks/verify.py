"""`train.verify` of a stretch of a run beside training it, as ratios.

LeNet on random images, 8 virtual shards, a line of the certificate after each step or each tenth. Each contender makes
the same steps from the same state with the same compiled step: `train.fit` without a certificate, `train.fit` with it,
and `train.verify`, which computes the steps and all hashes again. Of a second certificate the last line is wrong:
`verify` finds it and names what differs.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from _harness import Turn, arguments, environment, medians, ratio, save, show, take_turns

from jaxpar import data, models, train

STEPS, BATCH = 20, 64


def main() -> None:
    options = arguments("Verifying a stretch of a run beside training it.", 9, 1.0)
    steps = 4 if options.quick else STEPS
    draw = np.random.default_rng(0)
    images = draw.random((steps * BATCH, 28, 28, 1), np.float32)
    examples = data.Dataset(images, draw.integers(10, size=len(images)).astype(np.int32))
    params = models.lenet.init(jax.random.key(0))
    loss_fn = train.classification_loss(models.lenet.apply)
    tx = optax.adam(1e-3)  # one for all, since a step is compiled anew for another optimizer
    rows: dict[str, Any] = {}
    for shards, every in ((8, 1), (8, 10), (None, 1)):
        name = f"{shards or 'no'} virtual shards, a line every {every} step{'s' if every > 1 else ''}"
        if every > steps or (options.rows and name not in options.rows):
            continue
        _, step = train.start(params, tx, loss_fn, devices=jax.devices()[:1], virtual_shards=shards)

        def given(step: train.TrainStep = step, shards: int | None = shards) -> dict[str, Any]:
            state, _ = train.start(params, tx, loss_fn, devices=jax.devices()[:1], virtual_shards=shards)
            call = {"state": state, "step": step, "train_data": examples, "batch_size": BATCH}
            return {**call, "steps_per_execution": 1}

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.jsonl"

            def fit(certificate: Path | None = None, every: int = every) -> Callable[[dict[str, Any]], object]:
                def run(call: dict[str, Any]) -> object:
                    if certificate is not None:
                        certificate.unlink(missing_ok=True)
                    extra = {"certificate": certificate, "certificate_every": every}
                    return train.fit(**call, max_steps=steps, progress=False, **extra)

                return run

            fit(path)(given())

            *right, last = path.read_text().splitlines()
            wrong = Path(folder) / "wrong.jsonl"
            line = json.loads(last)
            wrong.write_text("\n".join([*right, json.dumps({**line, "state": line["state"][::-1]})]) + "\n")

            def verify(call: dict[str, Any], path: Path = path) -> None:
                if train.verify(path, call).differs is not None:
                    raise AssertionError("a right run is said to be wrong")

            def blame(call: dict[str, Any], wrong: Path = wrong) -> None:
                if train.verify(wrong, call).differs != steps:
                    raise AssertionError("the wrong line was not found")

            contenders = {
                "train": turn_of(fit(), given),
                "train, certified": turn_of(fit(Path(folder) / "again.jsonl"), given),
                "verify": turn_of(verify, given),
                "verify, wrong": turn_of(blame, given),
            }
            times = take_turns(contenders, 2 if options.quick else options.rounds, options.turn_seconds, 100)
        ratios = {
            f"{a} / {b}": ratio(times, a, b)
            for a, b in (
                ("train, certified", "train"),
                ("verify", "train"),
                ("verify, wrong", "train"),
                ("verify", "train, certified"),
            )
        }
        rows[name] = {"seconds": medians(times), "ratios": ratios, "rounds": len(times["train"]), "steps": steps}
    header = ("", "certified / train", "verify / train", "wrong / train", "verify / certified")
    show(header, [(name, *(f"{value:.2f}" for value in row["ratios"].values())) for name, row in rows.items()])
    save(options, "verify", {"environment": environment(), "rows": rows})


def turn_of(run: Callable[[dict[str, Any]], object], given: Callable[[], dict[str, Any]]) -> Turn:
    """Seconds of one run. The state that it takes is made before the clock starts."""

    def turn(repeats: int) -> float:
        seconds = 0.0
        for _ in range(repeats):
            call = given()
            start = time.perf_counter()
            run(call)
            seconds += time.perf_counter() - start
        return seconds / repeats

    return turn


if __name__ == "__main__":
    main()
