"""The compiled programs of training steps, and the bits they compute, as digests to compare before and after a change.

    python tools/programs.py old.json                       # the whole grid, of the jaxpar that Python finds
    python tools/programs.py new.json                       # the same after the change
    python tools/programs.py --compare old.json new.json    # what differs, and status 1 if anything does
    python tools/programs.py --pairs pairs.json             # fewer cases, in which any two choices meet twice

A case is a choice of each of `CHOICES`. Its record is:

    text         digest of `compile().as_text()`, without metadata and without the names of instructions
    operations   digest of how often each operation is there with which shapes, in any order
    collectives  how often each collective is there with which shapes
    donated      how many arguments are donated
    bits         digest of the state and the metrics after five steps
    error        in place of all these, the message that refuses the case

Bits and texts depend on the processor, so compare those of one machine.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

CHOICES = {
    "kind": ("local", "device", "sharded", "dist_sync", "dist_device_sync", "dist_async"),
    "engine": ("pmap", "shard_map", "jit"),
    "updates": ("key", "tree", "elementwise"),
    "compression": ("none", "2bit", "int8"),
    "processes": ("1", "2"),
    "where": ("plain", "mesh", "virtual"),
}
DEVICES = 4  # of all processes together
COLLECTIVE = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
Case = tuple[str, ...]


def all_cases() -> list[Case]:
    return [case for case in itertools.product(*CHOICES.values()) if _is_taken(*case)]


def _is_taken(kind: str, engine: str, updates: str, compression: str, processes: str, where: str) -> bool:
    """Whether jaxpar takes the case. Others are refused, which tests of their own assert."""
    del processes
    if engine == "jit":  # one program over whole arrays, in which no device has a gradient of its own
        return where != "virtual" and compression == "none" and kind not in ("local", "dist_async")
    if kind == "sharded" and updates == "tree":  # its values are split over a mesh
        return False
    if where == "virtual":  # the sums have one order
        return compression == "none" and kind != "dist_async" and (kind, updates) != ("sharded", "key")
    return where == "plain"


def pairs() -> list[Case]:
    """Few cases in which any two choices that can meet do so at least twice."""
    cases = all_cases()
    missing = collections.Counter({pair: min(2, n) for pair, n in _count_pairs(cases).items()})
    chosen = []
    while +missing:
        best = max((c for c in cases if c not in chosen), key=lambda case: sum(missing[p] > 0 for p in _pairs_of(case)))
        chosen.append(best)
        missing.subtract(_pairs_of(best))
    return sorted(chosen)


def _count_pairs(cases: list[Case]) -> collections.Counter:
    return collections.Counter(pair for case in cases for pair in _pairs_of(case))


def _pairs_of(case: Case) -> list[tuple]:
    return list(itertools.combinations(enumerate(case), 2))


def record(cases: list[Case]) -> dict[str, dict]:
    """The record of each case, computed in processes of their own."""
    found = {}
    for processes in CHOICES["processes"]:
        own = [case for case in cases if case[4] == processes]
        if own:
            found |= _in_processes(int(processes), own)
    return {"/".join(case): found["/".join(case)] for case in cases}


def _in_processes(processes: int, cases: list[Case]) -> dict[str, dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
    env |= {"JAX_NUM_CPU_DEVICES": str(DEVICES // processes), "JAX_PLATFORMS": "cpu"}
    env |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # of LLVM: the programs are those of users
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "cases.json"
        asked.write_text(json.dumps(cases))
        command = [sys.executable, __file__, "--worker", address, str(processes)]
        workers = [subprocess.Popen([*command, str(i), str(asked)], env=env) for i in range(processes)]
        try:
            failed = [worker.wait() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(failed):
            raise SystemExit(f"the processes ended with {failed}")
        return json.loads(asked.with_suffix(".found").read_text())


def work(address: str, processes: str, process: str, asked: str) -> None:
    """What each process does for the cases in the file `asked`."""
    if int(processes) > 1:
        from jaxpar import distributed

        distributed.initialize(address, int(processes), int(process))
    found = {}
    for case in json.loads(Path(asked).read_text()):
        name = "/".join(case)
        try:
            found[name] = _record_one(*case)
        except (ValueError, TypeError) as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        print(name, found[name].get("error", "")[:80], flush=True)
    if process == "0":
        Path(asked).with_suffix(".found").write_text(json.dumps(found))


def _record_one(kind: str, engine: str, updates: str, compression: str, processes: str, where: str) -> dict:
    import jax
    import numpy as np

    from jaxpar import train

    del processes
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model")) if where == "mesh" else None
    store = _store(kind, updates, compression, mesh)
    options = {"virtual_shards": 8} if where == "virtual" else {}
    options |= {"mesh": mesh} if mesh is not None and engine == "jit" else {}
    step = train.make_train_step(_loss, engine=engine, **options)
    state = train.create_state(store, 7) if mesh is not None else train.create_state(store, 7, devices=jax.devices())
    state = step.complete(state)
    text = step.lower(state, _batch(0)).compile().as_text()
    bits = hashlib.sha256()
    for i in range(5):
        state, metrics = step(state, _batch(i))
        _add_bits(bits, metrics)
    state = step.finish(state)
    store = state.store
    _add_bits(bits, (store.values, store.updater_state, store.optimizer_state, store.residuals, state.step))
    return _digests(text) | {"bits": bits.hexdigest()[:16]}


def _store(kind: str, updates: str, compression: str, mesh):
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jaxpar import kv, parallel, updaters

    numbers = np.random.default_rng(0)
    params = {
        "a": jnp.asarray(numbers.standard_normal((6, 20)), jnp.float32),
        "b": jnp.zeros(20),
        "c": jnp.asarray(numbers.standard_normal((20, 4)), jnp.float32),
    }
    optimizer = {
        "key": updaters.mxnet_sgd(0.05, momentum=0.5),
        "tree": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)),
        "elementwise": optax.adamw(0.05),
    }[updates]
    options = {} if mesh is None else {"mesh": mesh, "sharding": parallel.fsdp("data", min_size=1)}
    store = kv.from_params(params, kind=kind, optimizer=optimizer, **options)
    if compression == "none":
        return store
    threshold = {"threshold": 0.1} if compression == "2bit" else {}
    return kv.set_gradient_compression(store, {"type": compression} | threshold)


def _loss(params, batch, rng):
    import jax
    import jax.numpy as jnp

    hidden = jax.nn.relu(batch["x"] @ params["a"] + params["b"][None])
    hidden = hidden * jax.random.bernoulli(rng, 0.9, hidden.shape)
    error = hidden @ params["c"] - batch["y"]
    return (error**2).mean(), {"error": jnp.abs(error).mean()}


def _batch(seed: int) -> dict:
    """This process's part of a batch of 16 examples."""
    import jax
    import numpy as np

    numbers = np.random.default_rng(seed)
    batch = {"x": numbers.standard_normal((16, 6)), "y": numbers.standard_normal((16, 4))}
    own = 16 // jax.process_count()
    first = own * jax.process_index()
    return {name: x[first : first + own].astype(np.float32) for name, x in batch.items()}


def _add_bits(digest, tree) -> None:
    """The bits of what this process has of each array."""
    import jax
    import numpy as np

    for leaf in jax.tree.leaves(tree):
        shards = sorted(leaf.addressable_shards, key=lambda shard: str(shard.index))
        for shard in shards:
            digest.update(np.asarray(shard.data).tobytes())


def _digests(text: str) -> dict:
    """What a record has of a program."""
    lines = [line for line in text.splitlines() if re.match(r"\s*(ROOT )?%|\s*ENTRY|HloModule|}", line)]
    lines = [re.sub(r", metadata=\{[^}]*\}|, origin=\{\{.*?\}\}", "", line) for line in lines]
    header = lines[0]
    numbers: dict[str, str] = collections.defaultdict(lambda: str(len(numbers)))
    plain = [re.sub(r"%[\w.\-]+", lambda found: f"%{numbers[found[0]]}", line) for line in lines[1:]]
    operations = collections.Counter(
        f"{found[2]} {found[1]}"
        for line in lines
        if (found := re.match(r"\s*(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w\-]+)\(", line))
    )
    collectives = {name: n for name, n in operations.items() if re.match(COLLECTIVE, name)}
    return {
        "text": _digest("\n".join(plain)),
        "operations": _digest(json.dumps(sorted(operations.items()))),
        "collectives": dict(sorted(collectives.items())),
        "donated": len(re.findall(r"(?:may|must)-alias", header)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _processor() -> str:
    """The make of the processor, what it can and its cores, which decide what XLA compiles."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    model, flags = re.search(r"model name\s*: (.*)", about), re.search(r"flags\s*: (.*)", about)
    can = f", flags {_digest(flags[1])}" if flags else ""
    return f"{model[1] if model else platform.processor()}{can}, {os.cpu_count()} cores"


def differences(old: dict[str, dict], new: dict[str, dict]) -> list[str]:
    """A line for each case that differs and is in both."""
    lines = []
    for name in sorted(set(old) & set(new) - {"processor"}):
        before, after = old[name], new[name]
        changed = [f for f in (*before, *(a for a in after if a not in before)) if before.get(f) != after.get(f)]
        if changed:
            shown = [f for f in changed if f in ("collectives", "donated", "error")]
            lines.append(f"{name}: {', '.join(changed)}")
            lines += [f"    {field}: {before.get(field)} -> {after.get(field)}" for field in shown]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="where the records go, or what to compare")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(*given.files)
        return 0
    if given.compare:
        old, new = (json.loads(Path(file).read_text()) for file in given.files)
        found = differences(old, new)
        print("\n".join(found) or f"{len(set(old) & set(new) - {'processor'})} cases are equal")
        return 1 if found else 0
    found = {"processor": _processor()} | record(pairs() if given.pairs else all_cases())
    Path(given.files[0]).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
