"""Free-running servers: placement and updates, tried without Ray; the rest with it."""

import contextlib
import dataclasses
import gc
import math
import os
import runpy
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from launched import python, until

from jaxpar import free_running, kv
from jaxpar.free_running._servers import Server

# The placement of values.


@given(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8), st.integers(1, 5), st.integers(0, 50))
def test_every_element_is_held_once(shapes, servers, split):
    held = free_running.placement(shapes, servers, split)
    assert len(held) == servers
    for pieces in held:
        assert [p.key for p in pieces] == sorted({p.key for p in pieces})
    assert {p.key for pieces in held for p in pieces} == set(range(len(shapes)))
    for key, shape in enumerate(shapes):
        elements = [i for pieces in held for p in pieces if p.key == key for i in range(p.start, p.stop)]
        assert elements == list(range(math.prod(shape)))


def test_small_values_are_hashed_and_large_ones_cut_evenly():
    held = free_running.placement([(10,), (10,), (10,), (100,)], servers=3, split=100)
    assert [[p.key for p in pieces] for pieces in held] == [[0, 3], [1, 3], [2, 3]]  # 9973 = 1 modulo 3
    assert [p.stop - p.start for pieces in held for p in pieces if p.key == 3] == [33, 33, 34]


def test_small_values_lie_where_mxnet_puts_them():
    """Keys are multiplied by 9973, which on fewer than five servers, and on six, changes little."""
    held = free_running.placement([(1,)] * 9, servers=7)
    assert [[p.key for p in pieces] for pieces in held] == [[0, 7], [3], [6], [2], [5], [1, 8], [4]]


# A server, without Ray.


def server(optimizer=None, updater=None):
    return Server({3: np.ones(2, np.float32), 7: np.zeros((2, 2), np.float32)}, updater, optimizer)


def test_a_server_updates_with_every_push():
    one = server(optax.sgd(0.5, momentum=0.9))
    grads = [np.ones(2, np.float32), np.full((2, 2), 2, np.float32)]
    store = kv.set_optimizer(kv.create("local"), optax.sgd(0.5, momentum=0.9))
    store = kv.init(store, [3, 7], [jnp.ones(2), jnp.zeros((2, 2))])
    for _ in range(3):
        one.push(0, 0, grads)
        store = kv.push(store, [3, 7], grads)
    version, values = one.pull()
    assert version == 3
    for mine, stored in zip(values, kv.pull(store, [3, 7]), strict=True):
        np.testing.assert_allclose(mine, stored, rtol=1e-6)


def test_a_plain_updater_sees_the_keys():
    seen = []

    def updater(key, pushed, stored):
        seen.append(key)
        return stored + pushed

    one = server(updater=updater)
    one.push(0, 0, [np.ones(2, np.float32), np.ones((2, 2), np.float32)])
    assert seen == [3, 7]
    assert one.pull()[1][0].tolist() == [2, 2]


def test_what_was_pulled_stays_as_it_was():
    one = server(optax.sgd(1.0))
    _, (before, _) = one.pull()
    one.push(0, 0, [np.ones(2, np.float32), np.ones((2, 2), np.float32)])
    assert before.tolist() == [1, 1]
    assert one.pull()[1][0].tolist() == [0, 0]


def test_a_server_counts_who_pushed_and_how_late():
    one = server(optax.sgd(0.5))
    grads = [np.ones(2, np.float32), np.ones((2, 2), np.float32)]
    for worker, version in [(0, 0), (1, 0), (0, 1), (2, 0)]:
        one.push(worker, version, grads)
    assert one.status() == {"pushes": {0: 2, 1: 1, 2: 1}, "staleness": {0: 1, 1: 2, 3: 1}}


def test_a_server_with_nothing_counts_too():
    one = Server({}, None, optax.sgd(0.5))
    one.push(0, 0, [])
    assert one.pull() == (1, [])


# What is refused before anything starts.


@pytest.mark.parametrize(
    ("dtype", "value"),  # the last one is infinite in the dtype of the parameters
    [("float32", np.nan), ("float32", -np.inf), ("bfloat16", np.nan), ("complex64", np.nan * 1j), ("float16", 1e6)],
)
def test_a_push_that_would_spoil_the_parameters_is_refused(dtype, value):
    treedef = jax.tree.structure({"a": 0, "w": 0})
    shapes, paths = ((2,), (2,)), ("a", "layer.w")
    servers = free_running.Servers((), (), shapes, (np.dtype(np.int32), np.dtype(dtype)), paths, treedef, 1.0)
    kind = np.complex64 if dtype == "complex64" else np.float32
    check = free_running._servers._check_grads
    assert check(servers, {"a": np.ones(2, np.int32), "w": np.ones(2, kind)})[1].dtype == dtype
    with pytest.raises(ValueError, match=r"'layer\.w': 1 of 2 values are NaN or infinite; nothing was sent"):
        check(servers, {"a": np.ones(2, np.int32), "w": np.array([1, value], kind)})


@pytest.mark.parametrize("version", ["2.58.9", "1.13.0", "2.9.3rc0"])
def test_a_ray_without_a_token_is_not_started(monkeypatch, version):
    ray = types.SimpleNamespace(__version__=version, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ImportError, match=rf"needs Ray 2\.59 or newer, which asks .* {version} is installed"):
        free_running.start({"w": jnp.ones(2)})


def test_the_benchmark_without_ray_is_one_line(monkeypatch, capsys):
    benchmarks = Path(__file__).resolve().parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sys, "argv", ["free_running.py", "--quick"])
    runpy.run_path(str(benchmarks / "free_running.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ['no Ray: it is not installed in this environment; pip install "jaxpar[ray]" adds it']


# With Ray.


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    with warnings.catch_warnings():  # Ray forks, to start programs at once
        warnings.simplefilter("ignore", RuntimeWarning)
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=100 << 20)
    yield ray
    started = [x for x in gc.get_objects() if isinstance(x, subprocess.Popen)]
    ray.shutdown()
    for process in started:
        process.wait(60)  # Ray ends its processes and does not look at them again, which would be a warning


def with_ray(test):
    """In the second row, since each server is a process that imports JAX. Ray warns."""
    kinds = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
    return pytest.mark.slow(pytest.mark.filterwarnings(*kinds)(test))


PARAMS = {"b": np.zeros(3, np.float32), "w": np.zeros((4, 3), np.float32)}
ONES = jax.tree.map(np.ones_like, PARAMS)


@pytest.fixture
def two(ray):
    servers = free_running.start(PARAMS, optimizer=optax.sgd(1.0), servers=2, split=6, timeout=60)
    yield servers
    for handle in servers.handles:
        ray.kill(handle)


LISTENING = """
import glob, os
from pathlib import Path
import ray
from jaxpar.free_running._servers import _get_ray
assert _get_ray().get(ray.remote(lambda: 7).remote()) == 7

def parent(process):
    try:
        return int(Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0

parents = {int(process): parent(process) for process in os.listdir("/proc") if process.isdigit()}
own = {os.getpid()}
while new := {process for process, above in parents.items() if above in own and process not in own}:
    own |= new
sockets = set()
for descriptor in (name for process in own for name in glob.glob(f"/proc/{process}/fd/*")):
    try:
        sockets.add(os.readlink(descriptor))
    except OSError:
        continue
for table in "/proc/net/tcp", "/proc/net/tcp6":
    for line in Path(table).read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
            print("LISTENS", words[1].partition(":")[0])
print("VARIABLE", os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"))
"""


@with_ray
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux only")
def test_ray_listens_on_loopback_only():
    pytest.importorskip("ray", reason="Ray is not installed")
    done = python("-c", LISTENING, timeout=300)
    addresses = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("LISTENS")]
    assert len(addresses) >= 3, done.stdout
    # 127.0.0.1 and ::1, ::ffff:127.0.0.1 as the tables of Linux have them on a little-endian machine
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert {*addresses} <= loopback
    assert "VARIABLE None" in done.stdout
    assert "listens at" not in done.stderr


@with_ray
def test_what_is_pushed_is_pulled(two):
    worker = free_running.Worker(two)
    pushed = {"b": np.arange(3, dtype=np.float32), "w": np.arange(12, dtype=np.float32).reshape(4, 3)}
    worker.push(pushed)
    worker.push(pushed)
    pulled = worker.pull()
    for name in PARAMS:
        np.testing.assert_array_equal(pulled[name], -2 * pushed[name])
    assert free_running.status(two) == [{"pushes": {0: 2}, "staleness": {0: 1, 1: 1}}] * 2


@with_ray
def test_a_wrong_push_changes_nothing(two):
    worker = free_running.Worker(two)
    with pytest.raises(ValueError, match=r"'w': expected shape \(4, 3\), got \(3, 4\)"):
        worker.push({"b": ONES["b"], "w": ONES["w"].T})
    with pytest.raises(ValueError, match=r"Dict key mismatch; expected keys: \['b', 'w'\]"):
        worker.push({"b": ONES["b"]})
    with pytest.raises(TypeError, match="Cannot cast"):
        worker.push({"b": ONES["b"] * 1j, "w": ONES["w"]})
    assert free_running.status(two) == [{"pushes": {}, "staleness": {}}] * 2


@with_ray
def test_a_killed_worker_does_not_stop_the_others(two):
    def forty_pushes(worker):  # in here, so that Ray sends it as it is: workers cannot import this file
        for _ in range(40):
            params = worker.pull()
            time.sleep(0.05)
            worker.push({name: np.ones_like(value) for name, value in params.items()})
        return 100 + worker.index

    running = free_running.run(forty_pushes, two, workers=3)
    until(lambda: all(seen["pushes"].get(1, 0) >= 3 for seen in free_running.status(two)), 120)
    os.kill(running.pids[1], signal.SIGKILL)
    outcome = free_running.finish(running)
    assert outcome == free_running.Outcome({0: 100, 2: 102}, {1: "its process ended"})
    for seen in free_running.status(two):
        assert seen["pushes"][0] == seen["pushes"][2] == 40
        assert 3 <= seen["pushes"][1] < 40
        assert sum(seen["staleness"].values()) == sum(seen["pushes"].values())
        assert max(seen["staleness"]) > 0  # they did overtake one another
    first = free_running.status(two)[0]
    assert free_running.Worker(two).pull()["b"].tolist() == [-sum(first["pushes"].values())] * 3


@with_ray
def test_a_worker_that_raises_is_named(two):
    def failing(worker):
        if worker.index == 0:
            raise ArithmeticError("no luck")
        return "done"

    assert free_running.finish(free_running.run(failing, two, workers=2)) == free_running.Outcome(
        {1: "done"}, {0: "no luck"}
    )
    with pytest.raises(RuntimeError, match="every worker was lost: worker 0: no luck"):
        free_running.finish(free_running.run(failing, two, workers=1))


@with_ray
def test_a_killed_server_is_a_clear_error(two, ray):
    worker = free_running.Worker(two)
    ray.kill(two.handles[1])
    with contextlib.suppress(ray.exceptions.RayActorError):  # Ray ends it a moment later
        while True:
            ray.get(two.handles[1].pull.remote(), timeout=60)
    with pytest.raises(free_running.ServerLost, match=r"server 1 of 2 is gone; it held w\. Start servers again"):
        worker.pull()
    with pytest.raises(free_running.ServerLost, match="server 1 of 2 is gone"):
        worker.push(ONES)


@with_ray
def test_a_silent_server_is_a_clear_error(ray):
    def slow(key, pushed, stored):
        time.sleep(30)
        return stored

    servers = free_running.start(PARAMS, updater=slow, timeout=40)
    try:
        with pytest.raises(free_running.ServerLost, match=r"server 0 of 1 has not answered for 0\.5 s; it held b, w"):
            free_running.Worker(dataclasses.replace(servers, timeout=0.5)).push(ONES)
    finally:
        free_running.stop(servers)
