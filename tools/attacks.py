"""Attacks on a run: its sockets, checkpoints, caches and memory. Each ends in "held", "not tried" or an error.

    python tools/attacks.py            all of them, three minutes
    python tools/attacks.py packets    one

The tests hold each of them too. Here they run as an attacker would, against whole processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

HEAD = """
import os, sys, time
from pathlib import Path
import numpy as np
import jaxpar as jp
"""
FIT = """
import jax, optax
points = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
STEP = jp.train.make_train_step(lambda params, batch, rng: (((batch["image"] @ params["w"]) - 1.0).var(), {}))
def run(directory=None, source=None, **options):
    store = jp.kv.from_params({"w": np.zeros((4, 2), np.float32)}, optimizer=options.pop("tx", None) or optax.adam(0.1))
    source = source or jp.data.Dataset(points, np.zeros(32, np.int32))
    state = jp.train.create_state(store, 3)
    options = {"epochs": 2, "batch_size": 16, "progress": False, "checkpoint_dir": directory, **options}
    return jp.train.fit(state, STEP, source, **options)
"""


def start(source: str, *launcher: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxpar", "launch", *launcher, "--"] if launcher else []
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "SLURM", "OMPI"))}
    command += [sys.executable, "-c", textwrap.dedent(source)]
    root = str(Path(__file__).resolve().parents[1])
    env = {**clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([root, clean.get("PYTHONPATH", "")]), **env}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ends(process: subprocess.Popen[str], seconds: float = 300) -> str:
    """Standard output of a process that ends with 0."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, f"status {process.returncode}: {err[-1500:]}"
    return out


def run(source: str, **env: str) -> str:
    return ends(start(HEAD + FIT + textwrap.dedent(source), **env))


def wait_for(file: Path) -> str:
    end = time.monotonic() + 120
    while not file.exists() or not file.read_text():
        assert time.monotonic() < end, f"{file} never comes"
        time.sleep(0.05)
    return file.read_text()


WAITS = """
jp.distributed.initialize()
if jp.distributed.known_processes() > 1:
    import jax
here = Path(os.environ["HERE"])
if os.environ["JAXPAR_PROCESS_ID"] == "0":
    (here / "part").write_text(os.environ.get("JAXPAR_HUB", ""))
    (here / "part").rename(here / "hub")
while not (here / "over").exists():
    time.sleep(0.05)
"""


@contextlib.contextmanager
def hub() -> Any:
    """The address of the server of a run under the launcher, and the launcher. The run must end with 0."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        process = start(HEAD + WAITS, "-n", "2", "--devices", "1", HERE=folder)
        try:
            host, port = wait_for(here / "hub").split(":")
            yield (host, int(port)), process
            (here / "over").touch()
            assert "\x1b" not in ends(process)
        finally:
            process.kill()


def mebibytes(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def packets() -> str:
    """B1: single packets that no connection may answer for."""
    hello = {"hello": 1, "job": "x", "rank": 0, "size": 2, "host": "h", "timeout": 5}
    bad = [b"[" * 60_000 + b"\n", b"\xff\n", b"{}\n", b"9" * 100_000, b'{"hint": "\\u001b[2J"}\n']
    bad += [json.dumps({**hello, "timeout": value}).encode() + b"\n" for value in ("abc", -1, 1e300)]
    with hub() as (address, process):
        for data in bad * 10:
            with contextlib.suppress(ConnectionError), socket.create_connection(address) as sock:
                sock.sendall(data)
        assert process.poll() is None
    return f"{10 * len(bad)} packets, the run ended with 0"


def floods() -> str:
    """B2: a flood, and more idle connections than there are descriptors."""
    with hub() as (address, process):
        before, sent, end = mebibytes(process.pid), 0, time.monotonic() + 5
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as sock:
                while time.monotonic() < end:
                    sent += sock.send(b"{}\n" * 20_000)
        idle: list[socket.socket] = []
        for _ in range(800):
            with contextlib.suppress(OSError):
                idle.append(socket.create_connection(address, timeout=2))
        descriptors, grown = len(os.listdir(f"/proc/{process.pid}/fd")), mebibytes(process.pid) - before
        for sock in idle:
            sock.close()
        assert descriptors < 200, descriptors
        assert grown < 20, grown
    return f"{sent >> 20} MiB and {len(idle)} connections: {descriptors} descriptors, {grown:.1f} MiB more"


def looks() -> str:
    """B3: many who open the directory of a run, and a second run in it."""
    with tempfile.TemporaryDirectory() as folder:
        pace = "on_step=lambda step, metrics: time.sleep(0.2), checkpoint_every=1, epochs=15"
        first = start(HEAD + FIT + f'print(run({folder + "/run"!r}, {pace})[0].params["w"].tolist())')
        wait_for(Path(folder, "run", ".writer"))
        look = f"""
        for _ in range(100):
            jp.checkpoint.Manager({folder + "/run"!r}).close()
        try:
            run({folder + "/run"!r})
        except OSError as error:
            print(error)
        """
        said = run(look)
        assert f"process {first.pid} on " in said, said
        assert ends(first) == run('print(run(epochs=15)[0].params["w"].tolist())')
    return said.strip()


def damages() -> str:
    """B4: a newest checkpoint that cannot be read: a directory, an endless file, a pipe, an error of the disk."""
    source = """
    expected = run(epochs=3)[0]
    for kind in ("mkdir", "endless", "pipe", "error"):
        folder = Path(os.environ["HERE"], kind)
        run(folder)
        manifest = max(folder.glob("step_*")) / "jaxpar.json"
        manifest.unlink()
        if kind == "mkdir": manifest.mkdir()
        elif kind == "pipe": os.mkfifo(manifest)
        elif kind == "endless": manifest.symlink_to("/dev/zero")
        else: manifest.symlink_to("/proc/1/mem")
        state, history = run(folder, epochs=3)
        assert state.params["w"].tolist() == expected.params["w"].tolist()
        assert len(history) == 3
    """
    with tempfile.TemporaryDirectory() as folder:
        run(source, HERE=folder)
    return "four times the one before was taken, and the bits are the same"


def memory() -> str:
    """B6: a new optimizer for each of many fits."""
    source = """
    def measure():
        import gc
        gc.collect()
        return len(jax.devices()[0].client.live_executables()), len(jax.live_arrays())
    for _ in range(20): run(tx=optax.adam(0.01), epochs=1)
    before = measure()
    for _ in range(30): run(tx=optax.adam(0.01), epochs=1)
    print(before, measure())
    assert measure() == before
    """
    return "programs and arrays before and after 30 fits: " + run(source).strip()


def caches() -> str:
    """B7: a place for compiled programs whose parent others can write to."""
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder, "shared")
        (shared / "cache").mkdir(parents=True)
        shared.chmod(0o777)
        said = run("print(jp.train.use_compilation_cache())", XDG_CACHE_HOME=str(shared / "cache"))
    assert said.split() == ["None"], said
    return "it is not used"


def histories() -> str:
    """B8: 20,000 epochs, and errors in the middle of a run."""
    source = """
    folder, like = Path(os.environ["HERE"]), {"w": np.zeros(3, np.float32)}
    manager = jp.checkpoint.Manager(folder)
    records = [{"epoch": n, "step": n, "loss": 1 / n, "accuracy": None} for n in range(1, 20_002)]
    manager._save(like, {}, records=records[:-1])
    manager.wait()
    began = time.perf_counter()
    manager._save(like, {}, records=records)
    manager.wait()
    took = time.perf_counter() - began
    manager.close()
    assert manager.restore_latest(like)[1]["history"] == records
    print((folder / "save_00000002" / "jaxpar.json").stat().st_size, "bytes,", round(took, 2), "s")

    def fails(step, metrics):
        raise error
    def loader():
        yield from [{"image": points[:16]}] * 5
        raise error
    for error in (ValueError("x"), KeyboardInterrupt("x"), SystemExit(3)):
        for options in ({"on_step": fails}, {"source": jp.data.from_iterable(loader, steps_per_epoch=9)}):
            try:
                run(**options, epochs=30)
            except BaseException as caught:
                assert caught is error, repr(caught)
                assert int(caught.state.step) >= 1, options
                del caught.state, caught.history
            else:
                raise AssertionError(options)
    """
    with tempfile.TemporaryDirectory() as folder:
        return "the manifest has " + run(source, HERE=folder).strip() + ", the state is on all six errors"


def locks() -> str:
    """B9: a worker that holds Python's lock for 14 seconds, in the process of the server and in another."""
    source = """
    jp.distributed.initialize()
    import jax
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("all are there")
    if jax.process_index() == int(os.environ["WHO"]):
        import ctypes
        ctypes.PyDLL(None).sleep(14)
    multihost_utils.sync_global_devices("over")
    """
    ends(start(HEAD + textwrap.dedent(source), "-n", "2", "--devices", "1", WHO="1"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {"JAXPAR_COORDINATOR": address, "JAXPAR_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "1", "WHO": "0"}
    both = [start(HEAD + textwrap.dedent(source), **env, JAXPAR_PROCESS_ID=str(rank)) for rank in range(2)]
    for process in both:
        ends(process)
    return "nobody was shot, and both ended with 0"


def servers() -> str:
    """B5: what `free_running` listens on, and a push of NaN."""
    source = """
    from jaxpar import free_running
    try:
        servers = free_running.start({"w": np.zeros(2, np.float32)}, timeout=300)
    except ImportError as error:
        print("not tried:", error)
        sys.exit()
    worker = free_running.Worker(servers)
    try:
        worker.push({"w": np.array([1, np.nan], np.float32)})
    except ValueError as error:
        print(error)
    assert worker.pull()["w"].tolist() == [0, 0]
    free_running.stop(servers)
    """
    return run(source).strip()


ATTACKS = {f.__name__: f for f in (packets, floods, looks, damages, servers, memory, caches, histories, locks)}


def main() -> None:
    for number, (name, attack) in enumerate(ATTACKS.items(), 1):
        if not sys.argv[1:] or name in sys.argv[1:]:
            found = attack()
            print(f"B{number} {name}: {'' if found.startswith('not tried') else 'held. '}{found}", flush=True)


if __name__ == "__main__":
    main()
