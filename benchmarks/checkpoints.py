"""A training state split over four processes: saved and restored by jaxpar, beside orbax v1 alone.

    python benchmarks/checkpoints.py                    1,024 MB over 4 processes with 2 emulated devices each
    python benchmarks/checkpoints.py "256 MB" --rounds 5
    python benchmarks/checkpoints.py --quick

The params and both averages of Adam are split over all devices (FSDP). In each round both save the same arrays and
restore them, in turns and in the same processes. Before each turn what was written is on disk, and the turn before has
left nothing. A save ends when it is on disk and all processes know. orbax compresses nothing here, as jaxpar does.

`memory` is by how much the resident memory of a process grew at most, over what it had before the call with its shards
of the state. The largest of the processes counts. After a restore it has its shards a second time; these do not count.
The peak of memory is Linux's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _harness import arguments, environment, ratio, save, show

PROCESSES, DEVICES, LAYERS, COLUMNS = 4, 2, 4, 1024
SIZES = {"256 MB": 256, "1,024 MB": 1024}  # of the state
QUICK = {"8 MB": 8}
JAXPAR, ORBAX = "jaxpar", "orbax v1"


def main() -> None:
    options = arguments(__doc__ or "", rounds=3, turn_seconds=0)
    sizes = QUICK if options.quick else SIZES
    report: dict[str, Any] = {"environment": environment() | {"processes": PROCESSES, "devices": DEVICES}, "rows": {}}
    table: list[list[str]] = []
    for name in options.rows or list(sizes)[-1:]:
        load = os.getloadavg()[0]
        row = measure(sizes[name], options.rounds)
        report["rows"][name] = {"load": load, **row}
        for what in ("save", "call", "restore"):
            seconds = {contender: row[contender][what] for contender in (JAXPAR, ORBAX)}
            table.append([name, what, f"{ratio(seconds, JAXPAR, ORBAX):.2f}"])
            for contender in (JAXPAR, ORBAX):
                memory = row[contender].get(f"{what} memory")
                table[-1].append(f"{statistics.median(seconds[contender]):.2f} s")
                table[-1].append(f"+{max(memory):.0f} MB" if memory else "")
    show(["state", "", "times as long", JAXPAR, "memory", ORBAX, "memory"], table)
    save(options, "checkpoints", report)


def measure(megabytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds, and megabytes of memory, of each round, by contender and what is measured: as the first process says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    with tempfile.TemporaryDirectory() as folder:
        # The other processes print the same, and logs of Gloo.
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "worker", address, str(rank), folder, str(megabytes), str(rounds)],
                env=variables,
                stdout=subprocess.DEVNULL,
            )
            for rank in range(PROCESSES)
        ]
        statuses = [process.wait() for process in started]
        if any(statuses):
            raise RuntimeError(f"the processes ended with the statuses {statuses}")
        return json.loads(Path(folder, "result.json").read_text())


def worker(address: str, rank: int, folder: str, megabytes: int, rounds: int) -> None:
    """One of the processes."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, rank)

    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint.experimental.v1 as ocp
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxpar import checkpoint

    # The state: params and the two averages of Adam, all of one size.
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    count = PROCESSES * DEVICES
    rows = -(-megabytes * 2**20 // (3 * LAYERS * COLUMNS * 4 * count)) * count
    names = [f"{kind}/layer{i}" for kind in ("params", "mu", "nu") for i in range(LAYERS)]
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())

    @jax.jit(out_shardings={**dict.fromkeys(names, split), "step": whole})
    def make() -> dict[str, jax.Array]:
        place = jax.lax.broadcasted_iota(jnp.float32, (rows, COLUMNS), 0) * COLUMNS
        place += jax.lax.broadcasted_iota(jnp.float32, (rows, COLUMNS), 1)
        return {**{name: jnp.sin(place * 0.7 + i) for i, name in enumerate(names)}, "step": jnp.int32(3)}

    state = jax.block_until_ready(make())
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    own = sum(shard.data.nbytes for x in state.values() for shard in x.addressable_shards) / 2**20
    directory = Path(folder, "checkpoints")
    context = ocp.Context()
    context.array.saving.use_compression = False

    # Each returns four functions: begin to save, wait for the save, restore, close.
    def by_jaxpar() -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
        manager = checkpoint.Manager(os.fspath(directory))

        def load() -> Any:
            restored = manager.restore_latest(like)
            assert restored is not None
            return restored[0]

        return lambda: manager.save(state), manager.wait, load, manager.close

    def by_orbax() -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
        checkpointer = ocp.training.Checkpointer(os.fspath(directory), context=context)
        responses: list[Any] = []
        return (
            lambda: responses.append(checkpointer.save_async(3, state)),
            lambda: responses.pop().result(),
            lambda: checkpointer.load(3, like),
            checkpointer.close,
        )

    measured: dict[str, dict[str, list[float]]] = {JAXPAR: {}, ORBAX: {}}
    libc = ctypes.CDLL(None)

    def note(contender: str, name: str, value: float) -> None:
        """The largest value of all processes."""
        largest = float(np.max(multihost_utils.process_allgather(np.float32(value))))
        measured[contender].setdefault(name, []).append(largest)

    for number in range(1 + rounds):
        if number == 1:  # the first round compiles and imports
            measured = {JAXPAR: {}, ORBAX: {}}
        for contender, open_ in {JAXPAR: by_jaxpar, ORBAX: by_orbax}.items():
            if rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                os.sync()
            multihost_utils.sync_global_devices("empty")
            begin, wait, load, close = open_()

            forget_peak(libc)
            before, start = resident("VmRSS"), time.perf_counter()
            begin()
            called = time.perf_counter() - start
            wait()
            multihost_utils.sync_global_devices("saved")
            seconds, memory = time.perf_counter() - start, resident("VmHWM") - before
            note(contender, "call", called)
            note(contender, "save", seconds)
            note(contender, "save memory", memory)

            forget_peak(libc)
            before, start = resident("VmRSS"), time.perf_counter()
            restored = jax.block_until_ready(load())
            multihost_utils.sync_global_devices("restored")
            seconds, memory = time.perf_counter() - start, resident("VmHWM") - before - own
            note(contender, "restore", seconds)
            note(contender, "restore memory", memory)
            for name, array in state.items():
                for mine, theirs in zip(array.addressable_shards, restored[name].addressable_shards, strict=True):
                    np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(theirs.data))
            del restored
            close()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(measured))


def resident(key: str) -> float:
    """Megabytes of this process, now (`VmRSS`) or at most since `forget_peak` (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def forget_peak(libc: ctypes.CDLL) -> None:
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        libc.malloc_trim(0)  # else what is free already hides what is taken now
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
