"""Hostile arguments for every public function: no call may hang, crash, lose a state or give wrong numbers.

    python tools/fuzz.py                    all functions, in turns, a few minutes
    python tools/fuzz.py --seed 3 kv train  two rooms, with other combinations
    python tools/fuzz.py --calls 200 kv.push
    python tools/fuzz.py --taken kv         and which hostile values were taken, to be read

In whose words an error ends is not looked at. Looked for are: calls that take longer than their time limit; a process
that ends; a state, a store or an array that an error left donated or changed; numbers that are not finite out of
numbers that are. Functions that start servers or processes stay out.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar

ROOMS = (
    "kv parallel data sparse checkpoint updaters compression models models.lenet models.strided models.transformer "
    "models.matrix_factorization viz distributed free_running train"
).split()
# They start servers, processes or other programs, wait for them, or change the process for good.
NOT_CALLED = {
    "distributed.initialize",
    "distributed.check_joined",
    "distributed.join",
    "data.load",
    "distributed.wait_for_loss_report",
    "free_running.start",
    "free_running.run",
    "kv.barrier",
    "train.interruptible",
    "train.Interruptible",
    "train.use_compilation_cache",
    "train.to_mlflow",
    "train.to_wandb",
    "models.conv_general_dilated",  # its errors are those of lax
    "models.fast_on_cpus",
}
# Other classes come out of calls.
MADE_BY_USERS = set(
    (
        "sparse.RowSparse data.Dataset checkpoint.Manager updaters.Updater compression.TwoBit compression.OneBit "
        "compression.Int8 compression.BFloat16 compression.TopK compression.Int3 compression.PowerSGD viz.Call "
        "viz.Rule models.transformer.Config train.DynamicLossScale train.EarlyStopping train.KeepBest "
        "train.LearningRate train.Mean"
    ).split()
)
_ALSO_GIVEN = ("batch_size", "epochs", "progress", "devices", "source")  # though they have defaults
SECONDS = 10.0  # of one call
MEMORY = 8 << 30  # address space that the calls may add


class TooLong(BaseException):
    """A call that took longer than its time limit."""


def gone() -> jax.Array:
    array = jnp.ones(2)
    array.delete()
    return array


def numbers() -> Iterator[int]:
    yield 1


def nested(depth: int = 50) -> Any:
    return [nested(depth - 1)] if depth else 1


# By names, since some are used up by a call. None of them takes memory, and no number makes a call take much.
HOSTILE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "2**31": lambda: 2**31,
    "2**70": lambda: 2**70,
    "-(2**70)": lambda: -(2**70),
    "10**5000": lambda: 10**5000,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1e308": lambda: 1e308,
    "0.5": lambda: 0.5,
    "1j": lambda: 1j,
    "''": lambda: "",
    "'x'": lambda: "x",
    "NUL": lambda: "\0",
    "surrogate": lambda: "\udc80",
    "bytes": lambda: b"x",
    "[]": lambda: [],
    "[None]": lambda: [None],
    "['x']": lambda: ["x"],
    "()": lambda: (),
    "{}": lambda: {},
    "mixed keys": lambda: {1: jnp.ones(2), "x": jnp.ones(2)},
    "{'x': None}": lambda: {"x": None},
    "{'x': object}": lambda: {"x": object()},
    "nested": nested,
    "set": lambda: {1, 2},
    "object": object,
    "generator": numbers,
    "lambda of none": lambda: lambda: None,
    "lambda of nine": lambda: lambda a, b, c, d, e, f, g, h, i: None,
    "lambda of any": lambda: lambda *args, **kwargs: None,
    "class": lambda: dict,
    "its class": lambda: jaxpar.kv.KVStore,
    "module": lambda: os,
    "array of rank 0": lambda: jnp.ones(()),
    "array of rank 5": lambda: jnp.ones((1, 1, 2, 1, 1)),
    "array without elements": lambda: jnp.ones((0, 3)),
    "array of nan": lambda: jnp.full(2, jnp.nan),
    "array of bools": lambda: np.array([True, False]),
    "array of complex": lambda: jnp.ones(2, complex),
    "array of ints": lambda: np.array([1, -5]),
    "array of objects": lambda: np.array([object(), None]),
    "array of words": lambda: np.array(["a", "b"]),
    "array of times": lambda: np.array(["2020-01-01", "2021-01-01"], "datetime64[D]"),
    "structured array": lambda: np.zeros(2, [("a", int), ("b", float)]),
    "deleted": gone,
    "deleted in a list": lambda: [gone()],
    "random key": lambda: jax.random.key(0),
    "shape": lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    "NumPy's nan": lambda: np.float64("nan"),
    "list of lists": lambda: [[1.0], [1.0, 2.0]],
    "device": lambda: jax.devices()[0],
    "the same device twice": lambda: [jax.devices()[0]] * 2,
}


CONFIG = jaxpar.models.transformer.Config(layers=1, width=8, heads=2, vocabulary=11, positions=5)


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    del rng
    return ((batch["image"] @ params["w"]) ** 2).mean(), {}


def apply_fn(params: Any, images: Any) -> Any:
    return images @ params["w"]


MESH = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])


class Good:
    """Arguments that fit, by the names that the functions give them. Files are in an own folder."""

    def __init__(self, folder: Path):
        kv, train = jaxpar.kv, jaxpar.train
        self.params = {"w": jnp.ones((4, 3))}
        self.image, self.label = np.ones((8, 4), np.float32), np.zeros(8, np.int32)
        self.dataset = jaxpar.data.Dataset(self.image, self.label)
        self.store = kv.init(kv.create("device"), 3, jnp.zeros((4, 2)))
        self.step = train.make_train_step(loss_fn)
        self.rows = jaxpar.sparse.RowSparse(jnp.array([1]), jnp.ones((1, 2)), (4, 2))
        self.folder = folder
        self.saved = folder / "saved"
        jaxpar.checkpoint.save(self.saved, self.params)
        self.logits = jnp.ones((8, 3))

    def state(self) -> Any:
        store = jaxpar.kv.from_params(self.params, optimizer=optax.inject_hyperparams(optax.sgd)(0.1))
        return jaxpar.train.create_state(store, 0, devices=jax.devices()[:2])

    def of(self, where: str, name: str) -> Any:
        """The argument of a function; `KeyError` where there is none."""
        own = self._own(where)
        return own[name] if name in own else self._shared()[name]

    def _own(self, where: str) -> dict[str, Any]:
        room = where.rpartition(".")[0]
        fixed: dict[str, dict[str, Any]] = {
            "kv.from_params": {"params": self.params},
            "kv.to_params": {"store": jaxpar.kv.from_params(self.params)},
            "kv.eval_params": {"store": jaxpar.kv.from_params(self.params)},
            "kv.set_gradient_compression": {"spec": {"type": "2bit"}},
            "kv.init": {"key": 4},
            "kv.broadcast": {"key": 4},
            "compression.make": {"spec": {"type": "2bit"}},
            "checkpoint.restore": {"path": self.saved, "like": self.params},
            "checkpoint.save": {"path": self.folder / "new", "state": self.params},
            "checkpoint.load_mxnet": {"path": self.folder / "no.params"},
            "data.from_iterable": {"source": [{"image": self.image, "label": self.label}]},
            "data.collect": {"elements": [{"image": self.image, "label": self.label}]},
            "data.prefetch": {"iterator": [self.image]},
            "data.load": {"data_dir": self.folder, "source": "debian"},
            "data.as_source": {"given": self.dataset},
            "data.from_arrays": {"arrays": {"image": self.image}},
            "data.split": {"given": self.dataset},
            "data.batch_groups": {
                "source": jaxpar.data.as_source(self.dataset),
                "rng": jax.random.key(0),
                "devices": jax.devices()[:2],
            },
            "viz.Call": {"function": "f", "op": "F"},
            "viz.Rule": {"name": "f", "ops": frozenset(["add"]), "match": lambda cells, cell: None},
            "data.Dataset": {"images": self.image, "labels": self.label},
            "data.ArraySource": {"arrays": {"image": self.image}},
            "data.PaddedBatch": {"arrays": {"image": self.image}, "virtual_shards": 4},
            "data.IterableSource": {"source": [self.image]},
            "sparse.add": {"rows": [self.rows]},
            "sparse.lazy_update": {"update": lambda a, b, c: (c + a, b), "state": (), "stored": jnp.ones((4, 2))},
            "sparse.RowSparse": {"indices": jnp.array([1]), "values": jnp.ones((1, 2)), "shape": (4, 2)},
            "updaters.set_learning_rate": {"state": self.state()},
            "updaters.learning_rates": {"state": self.state()},
            "updaters.stateless": {"fn": lambda key, pushed, stored: stored},
            "models.lenet.from_mxnet": {"arrays": {"w": np.ones((2, 2))}},
            "models.transformer.init": {"config": CONFIG},
            "models.transformer.apply": {"params": jaxpar.models.transformer.init(jax.random.key(0), CONFIG)},
            "models.transformer.loss": {"params": jaxpar.models.transformer.init(jax.random.key(0), CONFIG)},
            "models.lenet.apply": {"params": jaxpar.models.lenet.init(0), "images": jnp.ones((2, 28, 28, 1))},
            "models.strided.apply": {"params": jaxpar.models.strided.init(0), "images": jnp.ones((2, 28, 28, 1))},
            "models.matrix_factorization.apply": {
                "params": jaxpar.models.matrix_factorization.init(jax.random.key(0), 3, 3, 2),
                "user_ids": jnp.array([1]),
                "item_ids": jnp.array([1]),
            },
            "free_running.placement": {"shapes": [(2, 3)], "servers": 2},
            "parallel.sharding_rules": {"patterns": {"w": jax.sharding.PartitionSpec()}},
            "parallel.shardings_of": {"sharding": jax.sharding.PartitionSpec(), "mesh": MESH},
            "parallel.spmd": {"fn": lambda x: x, "axis_name": "i"},
            "viz.diff": dict.fromkeys(("before", "after"), (apply_fn, (self.params, self.image))),
            "viz.plot_step": {"step": self.step}, "viz.trace_step": {"step": self.step},
            "train.top_k": {"k": 2}, "train.Mean": {"total": jnp.ones(2), "weight": jnp.ones(2)},
            "train.check_finite": {"metrics": {"loss": jnp.ones(())}},
            "train.classification_loss": {"apply_fn": apply_fn},
            "train.evaluate": {"apply_fn": apply_fn, "data": self.dataset},
            "train.predict": {"data": self.dataset}, "train.confusion_matrix": {"data": self.dataset},
            "train.mistakes": {"data": self.dataset}, "train.plot_mistakes": {"data": self.dataset},
        }  # fmt: skip
        if room == "viz":
            return {"fn": apply_fn, "args": [self.params, self.image], **fixed.get(where, {})}
        return fixed.get(where, {})

    def _shared(self) -> dict[str, Any]:
        return {
            "store": self.store, "key": 3, "value": jnp.ones((4, 2)), "values": [jnp.ones(2)],
            "params": self.params, "tree": self.params, "rng": 0, "devices": jax.devices()[:2],
            "device": jax.devices()[0], "data": self.image, "n": 8, "axis_name": "data",
            "row_ids": [1, 2], "rows": self.rows, "array": jnp.ones((4, 2)), "size": 8, "batch_size": 4,
            "tx": optax.sgd(0.1), "optimizer": optax.sgd(0.1), "updater": jaxpar.updaters.assign,
            "dataset": self.dataset, "fraction": 0.5, "path": self.folder / "x", "directory": self.folder,
            "state": self.state(), "step": self.step, "train_data": self.dataset, "epochs": 1, "steps": 2,
            "loss_fn": loss_fn, "apply_fn": apply_fn, "state_or_params": self.params, "source": self.dataset,
            "logits": self.logits, "labels": jnp.zeros(8, int), "predictions": self.logits, "targets": self.logits,
            "matrix": np.eye(3, dtype=int), "history": [{"epoch": 1, "loss": 1.0}], "total": 3,
            "names": {3: "w"}, "patterns": {"w": 1.0}, "decay": 0.9, "learning_rate": 0.1, "spec": {"type": "2bit"},
            "users": 3, "items": 3, "k": 2, "fn": apply_fn, "progress": False, "most": 2, "start": 0,
            "mistakes": jaxpar.train.Mistakes(np.array([0]), np.array([1]), np.array([0]), np.ones((1, 3)), 8),
            "inputs": jnp.ones((1, 4, 4, 1)), "window_shape": (2, 2), "lhs": jnp.ones((1, 4, 4, 1)),
            "rhs": jnp.ones((2, 2, 1, 1)), "window_strides": (1, 1), "padding": "VALID",
            "tokens": jnp.zeros((1, 4), int), "init": lambda key, value: (),
            "update": lambda key, pushed, state, stored: (stored, state), "kind": "device",
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """A public function, and what its call is."""

    where: str
    fn: Callable[..., Any]
    good: dict[str, Any]
    names: tuple[str, ...]  # of its arguments that may be given
    positional: tuple[str, ...]
    rest: str | None  # the name of *args


def public_functions(good: Good, only: list[str]) -> Iterator[Call]:
    """Each function and class of the doors, and the calls of a step."""
    found: dict[str, Any] = {}
    for room in ROOMS:
        module = importlib.import_module(f"jaxpar.{room}")
        for name, value in sorted(vars(module).items()):
            home = getattr(value, "__module__", "")
            own = home == module.__name__ if "." in room else home.startswith("jaxpar.")
            made = not inspect.isclass(value) or f"{room}.{name}" in MADE_BY_USERS
            if not name.startswith("_") and callable(value) and own and made:
                found[f"{room}.{name}"] = value
    found |= {f"train.step.{name}": getattr(good.step, name) for name in ("many", "lower", "complete", "finish", "on")}
    found["train.step"] = good.step
    for where, fn in found.items():
        if where not in NOT_CALLED and (not only or any(where == o or where.startswith(o + ".") for o in only)):
            yield _call(where, fn, good)


def _call(where: str, fn: Any, good: Good) -> Call:
    parameters = list(inspect.signature(fn).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    fit: dict[str, Any] = {}
    for p in parameters:
        if p.kind != p.VAR_KEYWORD and (p.default is p.empty or p.name in _ALSO_GIVEN):
            with contextlib.suppress(KeyError):
                fit[p.name] = good.of(where, p.name)
    if where.startswith("train.step"):
        batch = {"image": good.image, "label": good.label}
        fit |= {"batch": batch, "batches": jax.tree.map(lambda x: x[None], batch)}
        fit = {name: fit[name] for name in (p.name for p in named) if name in fit}
    return Call(
        where,
        fn,
        fit,
        tuple(p.name for p in named),
        tuple(p.name for p in named if p.kind == p.POSITIONAL_OR_KEYWORD),
        next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None),
    )


def combinations(call: Call, draw: random.Random) -> Iterator[tuple[dict[str, str], bool]]:
    """Which hostile value for which arguments, and whether by position. One at a time first, then several."""
    names = [*call.names, *([call.rest] if call.rest else [])]
    single = [({name: value}, by) for name in names for value in HOSTILE for by in (True, False)]
    draw.shuffle(single)
    yield from single
    while names:
        chosen = draw.sample(names, draw.randint(1, min(3, len(names))))
        yield {name: draw.choice(list(HOSTILE)) for name in chosen}, draw.random() < 0.5


def run(call: Call, hostile: dict[str, str], by_position: bool, seconds: float = SECONDS) -> tuple[bool, str | None]:
    """Make a call. Whether it was taken, and what is wrong with its end, or None."""
    values = {**call.good, **{name: HOSTILE[value]() for name, value in hostile.items()}}
    kept = {name: value for name, value in call.good.items() if name not in hostile}
    before = contents(kept)
    rest = list(values.pop(call.rest, ())) if call.rest and isinstance(values.get(call.rest), list) else []
    if call.rest and call.rest in values:
        rest = [values.pop(call.rest)]
    args = []
    for name in call.positional if by_position or rest else ():
        if name not in values:
            break
        args.append(values.pop(name))
    try:
        with _limited(seconds):
            out = call.fn(*args, *rest, **values)
            if inspect.isgenerator(out) or isinstance(out, Iterator):
                next(out, None)
    except TooLong:
        return False, f"took more than {seconds} s"
    except Exception:
        after = contents(kept)
        lost = [path for path, content in before.items() if after.get(path) != content]
        return False, f"an error left {', '.join(lost[:3])} donated or changed" if lost else None
    # Hostile values that are no number, or near the limits of floats, may well make more of these.
    is_finite = not hostile.keys() & _MAY_OVERFLOW and not set(hostile.values()) & _NOT_FINITE
    if is_finite and any(_is_not_finite(leaf) for leaf in leaves(out)):
        return True, "numbers that are not finite"
    return True, None


_NOT_FINITE = {"nan", "inf", "1e308", "array of nan", "NumPy's nan", "2**70", "-(2**70)", "10**5000", "2**31"}
_MAY_OVERFLOW = {"learning_rate", "eps", "epsilon"}


def leaves(tree: Any) -> list[Any]:
    try:
        return jax.tree.leaves(tree)
    except (TypeError, ValueError):  # keys of several types
        return []


def _is_not_finite(leaf: Any) -> bool:
    if isinstance(leaf, float):
        return not np.isfinite(leaf)
    if not isinstance(leaf, (jax.Array, np.ndarray)) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return False
    if isinstance(leaf, jax.Array) and leaf.is_deleted():  # a hostile one, passed on: whoever reads it is told
        return False
    return not bool(np.isfinite(np.asarray(leaf)).all())


def contents(tree: Any) -> dict[str, Any]:
    """The bytes of each array, by its path. "gone" where it was donated."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            found[jax.tree_util.keystr(path)] = "gone"
        elif isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            found[jax.tree_util.keystr(path)] = np.asarray(jax.random.key_data(leaf)).tobytes()
        elif isinstance(leaf, (jax.Array, np.ndarray)) and leaf.dtype != object:
            found[jax.tree_util.keystr(path)] = np.asarray(leaf).tobytes()
    return found


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(
    only: list[str], calls: int, seed: int, seconds: float = SECONDS, last: Path | None = None
) -> tuple[int, dict[str, list[str]], list[str]]:
    """How many calls were made, what was wrong by the fault, and which hostile values were taken.

    `last`: a file that has the call under way, for who finds that the process has ended in it.
    """
    wrong: dict[str, list[str]] = collections.defaultdict(list)
    made, taken = 0, []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), contextlib.chdir(folder):
        warnings.simplefilter("ignore")
        good = Good(Path(folder))
        for call in public_functions(good, only):
            draw = random.Random(f"{seed} {call.where}")
            for _, (hostile, by_position) in zip(range(calls), combinations(call, draw), strict=False):
                if "state" in call.good and call.where.startswith("train"):
                    call.good["state"] = good.state()  # a step donates it
                made += 1
                text = ", ".join(f"{k}={v}" for k, v in hostile.items())
                if last is not None:
                    last.write_text(f"{call.where}: {text}")
                was_taken, fault = run(call, hostile, by_position, seconds)
                if was_taken:
                    taken.append(f"{call.where}: {text}")
                if fault:
                    wrong[f"{call.where}: {fault}"].append(f"{text} by {'position' if by_position else 'keyword'}")
    return made, wrong, taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="rooms or functions, such as kv or train.fit")
    parser.add_argument("--calls", type=int, default=200, help="of each function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--taken", action="store_true", help="print which hostile values were taken")
    parser.add_argument("--last", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.last is None:  # the calls are made in a process of their own, which a crash ends
        with tempfile.TemporaryDirectory() as folder:
            last = Path(folder, "last")
            status = subprocess.run([sys.executable, *sys.argv, f"--last={last}"], check=False).returncode
            if status not in (0, 1):
                print(f"the process ended with status {status} in {last.read_text()}")
            return status
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    made, wrong, taken = fuzz(options.only, options.calls, options.seed, last=options.last)
    for line in sorted(taken) if options.taken else ():
        print(f"taken: {line}")
    for text, calls in sorted(wrong.items()):
        print(f"{text}\n    {len(calls)}: {'; '.join(calls[:3])}")
    print(f"{made} calls, {len(taken)} taken, {sum(map(len, wrong.values()))} at fault, of {len(wrong)} kinds")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
