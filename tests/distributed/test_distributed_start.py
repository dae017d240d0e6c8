"""`distributed.initialize`: what it finds, how it fails, and what the survivors do when a process is lost."""

import functools
import re
import signal
import socket
import sys
import textwrap
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from hostile import new_client, serving
from launched import LIMIT, background, free_port, launch, write

from jaxpar import data, distributed, free_running, kv, train
from jaxpar._heartbeat import server as server_module
from jaxpar._heartbeat.client import HeartbeatClient
from jaxpar._heartbeat.server import find_secret
from jaxpar._launch import share_gpus
from jaxpar.distributed import _environment, _initialize

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[007-009,11],other",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n10.0.0.7",
    "SKYPILOT_NODE_RANK": "2",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-22-16-00-00-000000_lenet_7",
}
KUBEFLOW = {"JAX_COORDINATOR_ADDRESS": "lenet-node-0-0.lenet:6666", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
BY_HAND = {"JAXPAR_COORDINATOR": "a:1", "JAXPAR_NUM_PROCESSES": "2", "JAXPAR_PROCESS_ID": "1"}


def found(env, *given):
    result = _environment.find(*(given or (None, None, None)), env)
    assert isinstance(result, _environment.Cluster)
    return result.coordinator, result.num_processes, result.process_id, result.local_devices


# What the environment says


def test_nothing_names_several_processes():
    assert _environment.find(None, None, None, {"HOME": "/root"}) is None
    assert _environment.find(None, None, None, {"KUBERNETES_SERVICE_HOST": "1.2.3.4"}) is None  # a notebook in a pod
    assert _environment.find(None, None, None, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) is None  # not within srun


def test_the_compiler_of_tpus_is_no_tpu(monkeypatch):
    """libtpu is installed for `jaxpar plan`, on a machine without a TPU."""
    monkeypatch.setattr(_environment.importlib.util, "find_spec", lambda name: name == "libtpu")
    assert _environment.find(None, None, None, {}) is None
    assert _environment.find(None, None, None, {"TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3"}) == "Cloud TPU"


def test_settings_by_hand():
    assert found(BY_HAND) == ("a:1", 2, 1, None)
    assert found({}, "host:12", 3, 0) == ("host:12", 3, 0, None)
    assert found({"JAX_COORDINATOR_ADDRESS": "b:2"}, None, 3, 0) == ("b:2", 3, 0, None)
    assert found({**BY_HAND, **SLURM}) == ("a:1", 2, 1, None)


def test_slurm():
    port = 65535 - 4096 + 1 + 5000 % 4096  # as jax chooses it
    assert found(SLURM) == (f"node007:{port}", 8, 3, (1,))
    assert found({**SLURM, "SLURM_STEP_NODELIST": "solo"})[0] == f"127.0.0.1:{port}"
    assert found({**SLURM, "SLURM_STEP_NODELIST": "a-1,b"})[0] == f"a-1:{port}"
    assert found({**SLURM, "JAX_COORDINATOR_PORT": "99"})[0] == "node007:99"
    assert found({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x8)"})[3] is None  # all GPUs of its host
    assert found({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x4)"})[3] == (1,)
    assert found({**SLURM, "CUDA_VISIBLE_DEVICES": "0"})[3] is None  # SLURM has shared them out already
    assert found({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})[1:3] == (1, 0)  # salloc's own step
    assert found(SLURM, "elsewhere:1", None, None)[:3] == ("elsewhere:1", 8, 3)


def test_slurm_and_open_mpi_as_jax_reads_them(surround):
    clusters = pytest.importorskip("jax._src.clusters")  # private: only for this comparison
    surround({**SLURM, **OPEN_MPI})
    theirs = clusters.SlurmCluster
    address = theirs.get_coordinator_address(None, None)
    assert found(SLURM)[:3] == (address, theirs.get_process_count(), theirs.get_process_id())
    assert found(OPEN_MPI)[0] == clusters.OmpiCluster.get_coordinator_address(None, None)


def test_open_mpi():
    port = 65535 - 4096 + 1 + (1531576320 // 4096) % 4096
    assert found(OPEN_MPI) == (f"10.96.0.1:{port}", 4, 2, (0,))
    assert found({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})[0] == f"127.0.0.1:{port}"
    newer = {k: v for k, v in OPEN_MPI.items() if "MCA" not in k}
    assert found({**newer, "JAX_COORDINATOR_ADDRESS": "first:7"})[:3] == ("first:7", 4, 2)
    assert found({**newer, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})[0].startswith("127.0.0.1:")
    assert found({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})[3] is None


def test_skypilot():
    port = 65535 - 4096 + 1 + sum(b"sky-2026-11-22-16-00-00-000000_lenet_7") % 4096
    assert found(SKYPILOT) == (f"10.0.0.5:{port}", 3, 2, None)
    assert found({**SKYPILOT, "JAX_COORDINATOR_PORT": "7"})[0] == "10.0.0.5:7"
    assert found({**SKYPILOT, "SKYPILOT_NODE_IPS": "fd00::1\nfd00::2\nfd00::3"})[0] == f"[fd00::1]:{port}"
    assert found({**SKYPILOT, **SLURM})[1:3] == (3, 2)  # SkyPilot on SLURM: a step for each node
    assert found({**SKYPILOT, **OPEN_MPI})[1:3] == (4, 2)  # mpirun in its task
    one = {**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.5", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}
    assert _environment.find(None, None, None, one) is None


def test_the_names_of_jax():
    assert found(KUBEFLOW) == ("lenet-node-0-0.lenet:6666", 4, 3, None)
    assert found({**KUBEFLOW, **BY_HAND}) == ("a:1", 2, 1, None)


def test_variables_of_torchrun_are_not_read():
    torchrun = {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert _environment.find(None, None, None, torchrun) is None  # its own store has that port


def test_kubernetes():
    job = {"KUBERNETES_SERVICE_HOST": "1.2.3.4", "JOB_COMPLETION_INDEX": "1"}
    assert _environment.find(None, None, None, job) == "Kubernetes"  # jax asks the API server
    by_hand = {"JAXPAR_COORDINATOR": "job-0.net:5", "JAXPAR_NUM_PROCESSES": "2"}
    assert found({**job, **by_hand}) == ("job-0.net:5", 2, 1, None)


def test_the_manifests_of_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    pod = {"KUBERNETES_SERVICE_HOST": "1.2.3.4", "JOB_COMPLETION_INDEX": "3"}
    manifests = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "JAXPAR_" in block]
    for block in manifests:
        variables = dict(re.findall(r'name: (JAXPAR_\w+), value: "([^"]+)"', block))
        coordinator, size, rank, _ = found({**pod, **variables})
        assert (size, rank) == (4, 3) == (int(re.search(r"completions: (\d)", block)[1]), 3)
        assert re.fullmatch(r"lenet(-workers-0)?-0\.lenet:4000", coordinator)
    assert len(manifests) == 2


def given(*arguments, **environment):
    return lambda: _environment.find(*(arguments or (None, None, None)), environment)


def without(environment, word):
    return {name: value for name, value in environment.items() if word not in name}


T, V, R = TypeError, ValueError, RuntimeError
# What is refused before anything starts: the error, the call, and the names and values of its message, in their order.
REFUSED = {
    "two of three arguments": (
        V,
        given("a:1", 2, None),
        ["'coordinator': 'a:1'", "'num_processes': 2", "the arguments", "missing: process_id"],
    ),
    "one of three arguments": (V, given("a:1", None, None), ["'a:1'", "missing: num_processes, process_id"]),
    "one variable of jax": (
        V,
        given(JAX_COORDINATOR_ADDRESS="a:1"),
        ["JAX_COORDINATOR_ADDRESS", "missing: num_processes, process_id"],
    ),
    "one variable of jaxpar": (V, given(JAXPAR_NUM_PROCESSES="2"), ["JAXPAR_", "missing: coordinator, process_id"]),
    "a variable that is no number": (V, given(**{**BY_HAND, "JAXPAR_PROCESS_ID": "x"}), ["JAXPAR_PROCESS_ID", "'x'"]),
    "a variable of jax that is no number": (V, given(**{**KUBEFLOW, "JAX_PROCESS_ID": "x"}), ["JAX_PROCESS_ID", "'x'"]),
    "a process too many": (V, given(**{**BY_HAND, "JAXPAR_PROCESS_ID": "2"}), ["process_id", "0 to 1", "got 2"]),
    "no processes": (V, given("a:1", 0, 0), ["num_processes", "1 or more", "got 0"]),
    "a process before the first": (V, given("a:1", 2, -1), ["process_id", "0 to 1", "got -1"]),
    "a coordinator without a port": (V, given("a", 2, 0), ["'host:port'", "got 'a'"]),
    "another number than the launcher's": (
        V,
        given(None, 4, None, **BY_HAND, JAXPAR_HUB="b:2"),
        ["num_processes=4", "jaxpar launch"],
    ),
    "a bool for processes": (T, given("a:1", True, 0), ["initialize: num_processes", "1 or more", "True"]),
    "a text for processes": (T, given("a:1", "2", 0), ["initialize: num_processes", "'2'"]),
    "a float for a process": (T, given("a:1", 2, 0.5), ["initialize: process_id", "0 to 1", "0.5"]),
    "a newer mpirun on several hosts": (
        V,
        given(**without(OPEN_MPI, "MCA")),
        ["mpirun -x JAX_COORDINATOR_ADDRESS=<first host>:<port>"],
    ),
    "nodes without addresses": (
        V,
        given(**{**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6"}),
        ["SKYPILOT_NUM_NODES is 3", "SKYPILOT_NODE_IPS has 2"],
    ),
    "a jax that runs": (R, lambda: distributed.initialize("127.0.0.1:1", 2, 0), ["JAX runs already"]),
    "a short timeout": (
        V,
        lambda: distributed.initialize("127.0.0.1:1", 2, 0, heartbeat_timeout=1),
        ["heartbeat_timeout", "2 seconds", "60 and 1"],
    ),
    "more processes than GPUs": (
        V,
        lambda: share_gpus(["0", "1"], 4, None),
        ["4 processes with 1 GPU each", "need 4", "2"],
    ),
    "no servers": (
        V,
        lambda: free_running.start({"w": np.ones(2)}, servers=0),
        ["servers", "1 to 65,536", "got 0"],
    ),
    "an optimizer and an updater": (
        V,
        lambda: free_running.start(
            {"w": np.ones(2)}, optimizer=optax.sgd(1.0), updater=lambda key, pushed, stored: pushed
        ),
        ["optimizer", "updater", "not both"],
    ),
    "a short secret": (R, lambda: find_secret({"JAXPAR_SECRET": "password"}), ["JAXPAR_SECRET", "16 to 4096 bytes"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    error, call, content = REFUSED[case]
    jax.devices()
    with pytest.raises(error, match=".*".join(map(re.escape, content))) as caught:
        call()
    assert "password" not in str(caught.value)


def test_where_there_is_one_process_nothing_starts():
    jax.devices()
    distributed.initialize()
    distributed.initialize()
    assert not jax.distributed.is_initialized()
    assert distributed.known_processes() == 1
    distributed.set_resume_hint("there is no client")
    distributed.wait_for_loss_report()


# What is for all processes, in one that has not joined them. JAX was used before, so it cannot join now.

UNJOINED = {
    "process 1 of 2 (jaxpar launch)": {**BY_HAND, "JAXPAR_HUB": "a:2"},
    "process 1 of 2 (JAXPAR_*)": BY_HAND,
    "process 3 of 8 (SLURM)": SLURM,
    "process 2 of 4 (Open MPI)": OPEN_MPI,
    "process 2 of 3 (SkyPilot)": SKYPILOT,
    "process 3 of 4 (JAX_*)": KUBEFLOW,
    "one of several (Kubernetes)": {"KUBERNETES_SERVICE_HOST": "1.2.3.4", "JOB_COMPLETION_INDEX": "1"},
}
DIST = ("dist_sync", "dist_device_sync", "dist_async")


TX = optax.sgd(0.1)  # one, and one step, so that each kind is compiled once


@functools.cache
def make_step():
    return train.make_train_step(lambda params, batch, rng: ((params["w"] - batch["label"]).sum(), {}))


def one_step(kind):
    """The loss of a training of one step."""
    store = kv.from_params({"w": np.zeros(())}, kind=kind, optimizer=TX)
    step = make_step()
    lines = data.Dataset(np.zeros((8, 1), np.float32), np.ones(8, np.float32))
    state = train.create_state(store, 0)
    return train.fit(state, step, lines, epochs=1, batch_size=8, progress=False)[1][0]["loss"]


@pytest.fixture
def surround(monkeypatch):
    jax.devices()

    def surround(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return surround


@pytest.mark.parametrize("name", UNJOINED)
def test_a_dist_store_is_never_one_of_many(name, surround):
    surround(UNJOINED[name])
    unjoined = re.escape(f"this is {name} and has not joined the others")
    for kind in DIST:
        for make in (
            lambda kind=kind: kv.create(kind),
            lambda kind=kind: kv.create(kind, devices=jax.devices()),
            lambda kind=kind: kv.from_params({"w": np.ones(2)}, kind=kind),
            lambda kind=kind: jax.jit(lambda x: kv.init(kv.create(kind), 0, x))(np.ones(2)),
        ):
            with pytest.raises(RuntimeError, match=f"kv.create: kind '{kind}': {unjoined}.*JAX was used before.*Call"):
                make()
    for function in (kv.rank, kv.num_workers, kv.barrier):
        with pytest.raises(RuntimeError, match=f"kv.{function.__name__}: {unjoined}, so .* Call jp.distributed.init"):
            function()
    assert kv.create("device", devices=jax.devices()).kind == "device"
    with pytest.raises(ValueError, match="one or more different devices"):  # said before anything is joined
        kv.create("dist_sync", devices=[])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", UNJOINED)
def test_training_apart_is_refused_where_the_processes_belong_together(name, surround):
    store = kv.from_params({"w": np.ones(())}, optimizer=TX)
    by_hand = train.TrainState(store, np.int32(0), jax.random.key(0))
    lines = data.Dataset(np.zeros((8, 1), np.float32), np.ones(8, np.float32))
    surround(UNJOINED[name])
    if not {"JAXPAR_COORDINATOR", "JAX_NUM_PROCESSES"} & set(UNJOINED[name]):  # these may be runs of their own
        assert one_step("sharded") == -1.0
        return
    for caller, function in [
        ("train.create_state", lambda: train.create_state(store, 0)),
        ("train.create_state", lambda: train.fit(by_hand, make_step(), lines, epochs=1, batch_size=8)),
        ("kv.create: kind 'sharded'", lambda: kv.create("sharded")),
    ]:
        with pytest.raises(RuntimeError, match=re.escape(f"{caller}: this is {name} and has not joined the others")):
            function()


def test_one_of_one_and_one_that_has_joined_go_on(surround, monkeypatch):
    surround({**BY_HAND, "JAXPAR_HUB": "a:2", "JAXPAR_NUM_PROCESSES": "1", "JAXPAR_PROCESS_ID": "0"})
    assert (kv.create("dist_sync").kind, kv.rank(), kv.num_workers()) == ("dist_sync", 0, 1)
    assert one_step("dist_sync") == one_step("sharded") == -1.0
    surround(BY_HAND)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)  # by the user's own call
    assert [kv.create(kind).kind for kind in DIST * 2] == [*DIST * 2]


def test_a_start_that_failed_is_not_taken_for_one_process(surround, monkeypatch):
    monkeypatch.setattr(_initialize, "this", _initialize.Process())

    def fail(*args, **options):
        raise RuntimeError("no room")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(RuntimeError, match="no room"):
        _initialize._start(_environment.Cluster("127.0.0.1:1", 2, 1, "test"), {"local_device_ids": None}, 9, 9, False)
    for function in (distributed.initialize, kv.rank, lambda: kv.create("dist_sync")):
        with pytest.raises(RuntimeError, match="an earlier call failed in this process; start all processes again"):
            function()


# Joining without JAX: a server and clients in threads


def join(*settings, seconds=30.0, job="job"):
    """The client or the error of each (process_id, num_processes), in a thread of its own."""
    port = free_port()

    def run(rank, size):
        cluster = _environment.Cluster(f"127.0.0.1:{port}", size, rank, "test", job=job)
        try:
            return _initialize.join_others(cluster, 5.0, seconds)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(len(settings)) as threads:
        results = list(threads.map(run, *zip(*settings, strict=True), timeout=LIMIT))
    for result in results:
        if isinstance(result, HeartbeatClient):
            result.leave()
    return results


def test_all_join():
    clients = join((0, 3), (1, 3), (2, 3))
    assert [client.rank for client in clients] == [0, 1, 2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([(0, 2), (1, 3)], "process 1 was started as one of 3, this run has 2 processes"),
        ([(0, 3), (1, 3), (1, 3)], "two processes say that they are process 1; each needs its own number"),
        ([(0, 4), (2, 4)], "processes 1, 3 of 4 did not come within 30 seconds"),
    ],
)
def test_every_process_says_why_the_run_cannot_begin(settings, text, monkeypatch):
    class Hurried(server_module.HeartbeatServer):
        """A server whose 30 seconds are over when these processes have come, however slow the machine is."""

        def check(self):
            if len(self.peers) + len(self._faults) == len(settings):
                self._first_join = -LIMIT
            super().check()

    monkeypatch.setattr(_initialize, "HeartbeatServer", Hurried)
    for error in join(*settings):
        assert text in error


def test_process_0_waits_for_the_others_so_long():
    (error,) = join((0, 2), seconds=1.0)
    assert "process 1 of 2 did not come within 1 seconds" in error


def test_a_coordinator_that_is_not_there():
    began = time.monotonic()
    (error,) = join((1, 2), seconds=0.5)
    assert re.search(r"process 0 is not there: no answer from the coordinator 127.0.0.1:\d+ .* within 0.5 sec", error)
    assert error.endswith("(this is process 1 of 2)")
    assert time.monotonic() - began < 20


def test_another_run_is_left_in_peace():
    address, server = serving(job="a")
    server.thread.start()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"absent within 0\.3 seconds"):
        new_client(job="b").join_run([address], 0.3, "absent")
    assert time.monotonic() - began < 20
    assert server.lost is None


def test_the_port_of_the_coordinator_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"coordinator {address} cannot be used .*: Address already in use"):
            _initialize.reserve_port(address)
    with _initialize.reserve_port(address), pytest.raises(RuntimeError, match="another run may have it"):
        _initialize.reserve_port(address)  # a second process 0
    _initialize.reserve_port(address).close()


def test_messages_that_are_none():
    here, there = socket.socketpair()
    with there:
        end = server_module.JsonConnection(here, server_module.FROM_SERVER)
        there.sendall(b'{"heartbeat": 1}\n{"closing"')
        assert end.receive() == [{"heartbeat": 1}]
        there.sendall(b": 1}\n")
        assert end.receive() == [{"closing": 1}]
        assert not end.is_closed
        there.sendall(b'{"heartbeat": 1}\nGET / HTTP/1.1\n{"heartbeat": 1}\n')
        assert end.receive() == [{"heartbeat": 1}]
        assert (end.is_closed, end.fault) == (True, "a message is a line of JSON")
        end.close()


def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(server_module, "time", types.SimpleNamespace(monotonic=lambda: now))
    clock = server_module.AwakeClock()
    now = 101.5
    assert clock.tick() == 1.5
    now = 131.5  # stopped for half a minute
    assert clock.tick() == 1.5
    now = 132.0
    assert clock.tick() == 2.0


# Real runs, without the launcher (as under SLURM) unless said


PROGRAM = """
    import os, signal, sys, time
    import jaxpar as jp
    {start}
    import jax
    from jax.experimental import multihost_utils
    rank = jax.process_index()
    multihost_utils.sync_global_devices("all are there")
    jp.distributed.set_resume_hint("runs/step_7")
    multihost_utils.sync_global_devices("all know what to resume from")
    {then}
    for i in range(10**6):
        multihost_utils.sync_global_devices(f"step {{i}}")
"""


def start(tmp_path, size, then, heartbeat=10.0, begin=None, env=lambda rank: {}):
    begin = begin or f"jp.distributed.initialize(sys.argv[1], {size}, int(sys.argv[2]), heartbeat_timeout={heartbeat})"
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(start=begin, then="\n    ".join(then.split("\n")))))
    words = [sys.executable, str(program), f"127.0.0.1:{free_port()}"]
    return [background([*words, str(rank)], JAX_NUM_CPU_DEVICES="1", **env(rank)) for rank in range(size)]


def as_slurm():
    """The environment of each of two tasks on this machine."""
    port = str(free_port())
    own = {**SLURM, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "JAX_COORDINATOR_PORT": port}
    return lambda rank: {**own, "SLURM_PROCID": str(rank)}


def ended(processes, but=()):
    """The (status, standard error) of each, without Gloo's remarks; those in `but` are killed after the others."""
    results = {}
    try:
        for rank in sorted(range(len(processes)), key=lambda rank: rank in but):
            if rank in but:
                processes[rank].kill()
            _, err = processes[rank].communicate(timeout=LIMIT)
            results[rank] = processes[rank].returncode, [x for x in err.splitlines() if not x.startswith("[Gloo]")]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [results[rank] for rank in range(len(processes))]


def last_line(rank, size, lost, why):
    return [
        f"jaxpar: process {lost} (host {socket.gethostname()}) was lost: {why}. "
        f"Process {rank} of {size} ends with status 75; resume from runs/step_7"
    ]


@pytest.mark.slow
def test_a_killed_coordinator_is_noticed_by_every_survivor(tmp_path):
    first, *others = ended(start(tmp_path, 3, "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)"))
    assert first[0] == -signal.SIGKILL
    for rank, (status, lines) in enumerate(others, 1):
        assert status == distributed.LOST == 75
        assert lines == last_line(rank, 3, 0, "its connection closed (killed?)")


@pytest.mark.slow
def test_a_frozen_process_is_noticed_by_a_collective(tmp_path):
    frozen = 'if rank == 0: print("now", flush=True); os.kill(os.getpid(), signal.SIGSTOP)'
    processes = start(tmp_path, 2, frozen, heartbeat=4.0)
    for line in processes[0].stdout:
        if "now" in line:
            break
    began = time.monotonic()
    _, (status, lines) = ended(processes, but=[0])
    assert time.monotonic() - began < 30
    assert status == 75
    assert lines == last_line(1, 2, 0, "no heartbeat for 4 seconds: it is frozen, or its host is gone")


@pytest.mark.slow
def test_a_process_that_holds_the_lock_for_seconds_or_ends_early_is_no_loss(tmp_path):
    then = """if rank == {}:
    import ctypes
    ctypes.PyDLL(None).sleep(6)  # PyDLL keeps the interpreter lock: no thread of this process runs
else: time.sleep(7.5)
sys.exit()"""
    for rank in (0, 1):  # the heartbeat server is in process 0
        assert ended(start(tmp_path, 2, then.format(rank), heartbeat=10.0)) == [(0, [])] * 2


@pytest.mark.slow
def test_a_failing_process_where_only_jax_finds_the_settings(tmp_path):
    """The client then learns everything from jax: tried by letting jax read SLURM's variables.

    A store made while jax traces joins the processes here.
    """
    find = "from jaxpar.distributed import _environment; _environment.find = lambda *_, **options: 'SLURM'"
    begin = f"import jax; {find}; jax.eval_shape(lambda: jp.kv.create('dist_sync').values)"
    # By jax only, process 1 would wait in its shutdown for process 0, which waits in its collective.
    failing = "if rank == 1: raise ValueError('no\\nmore')"
    first, second = ended(start(tmp_path, 2, failing, begin=begin, env=as_slurm()))
    assert first == (75, last_line(0, 2, 1, "ValueError: no more"))
    assert second[0] == 1
    assert "ValueError: no" in second[1]


@pytest.mark.slow
def test_a_dist_store_joins_the_tasks_of_slurm(tmp_path):
    begin = "store = jp.kv.create('dist_sync'); store = jp.kv.create('dist_sync')"
    then = """import numpy as np
store = jp.kv.push(jp.kv.init(store, 3, np.zeros(2)), 3, np.full(2, 1.0 + rank))
assert (jp.kv.num_workers(), jp.kv.pull(store, 3).tolist()) == (2, [3.0, 3.0])
sys.exit()"""
    assert ended(start(tmp_path, 2, then, begin=begin, env=as_slurm())) == [(0, [])] * 2


@pytest.mark.slow
def test_a_dist_store_under_the_launcher_until_the_coordinator_is_killed(tmp_path):
    """The one start of jax in the first row, about 4 s: the others are in the second."""
    program = """
        import os, signal
        import numpy as np
        from jaxpar import distributed, kv
        try:
            kv.rank()
        except RuntimeError as error:  # nor did this start JAX
            print(error)
        store = kv.from_params({"w": np.zeros(2, np.float32)}, kind="dist_async", staleness=0)
        store = kv.push(store, 0, np.full(2, 1.0 + kv.rank(), np.float32))
        kv.barrier()
        print(kv.rank(), "of", kv.num_workers(), kv.pull(store, 0).tolist(), kv.create("dist_sync"), flush=True)
        distributed.set_resume_hint("runs/step_7")
        kv.barrier("both have printed")
        if kv.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        kv.barrier("process 0 never comes")
    """
    done = launch("-n", "2", "--devices", "1", *write(tmp_path, program), expect=137)
    lines = [line for line in done.stderr.splitlines() if "Gloo" not in line]
    launcher, survivor = sorted(lines, key=lambda line: line.startswith("["))  # in any order
    assert re.fullmatch(r"jaxpar launch: process 0 \(pid \d+\) failed: killed by SIGKILL; ending the others", launcher)
    assert [survivor] == ["[1] " + line for line in last_line(1, 2, 0, "killed by SIGKILL")]
    lines = sorted(done.stdout.splitlines())
    said = "kv.rank: this is process {} of 2 (jaxpar launch) and has not joined the others, so JAX would return 0"
    store = "KVStore(kind='dist_sync', updater=assign, empty)"
    for rank in range(2):
        assert f"[{rank}] {rank} of 2 [3.0, 3.0] {store}" in lines
        assert any(line.startswith(f"[{rank}] {said.format(rank)}") for line in lines)


@pytest.mark.slow
def test_the_launcher_starts_jax_again_after_a_loss(tmp_path):
    program = """
        import os, signal, time
        import jaxpar as jp
        jp.distributed.initialize()
        jp.distributed.initialize()
        assert jp.distributed.known_processes() == int(os.environ["JAXPAR_NUM_PROCESSES"])
        import jax, jax.numpy as jnp
        rank = jax.process_index()
        values = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jnp.ones(jax.local_device_count()))
        sums = os.path.join(os.path.dirname(__file__), "sums")
        with open(sums, "a") as file:
            file.write(f"{rank} of {jax.process_count()}: {values[0]}\\n")
        jp.distributed.set_resume_hint("runs/step_9")
        if rank == 1 and os.environ["JAXPAR_RESTART"] == "0":
            while len(open(sums).readlines()) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        jax.block_until_ready(jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(values))
    """
    options = ["-n", "2", "--devices", "2", "--max-restarts", "1", "--min-processes", "1"]
    done = launch(*options, *write(tmp_path, program))
    sums = (tmp_path / "sums").read_text().splitlines()
    assert sorted(sums) == ["0 of 1: 2.0", "0 of 2: 4.0", "1 of 2: 4.0"]
    lines = [line for line in done.stderr.splitlines() if "Gloo" not in line]
    failed, restart, survivor = sorted(lines, key=lambda line: line.startswith("["))  # the launcher's come in order
    assert re.fullmatch(r"jaxpar launch: process 1 \(pid \d+\) failed: killed by SIGKILL; ending the others", failed)
    assert survivor.startswith("[0] jaxpar: process 1 (host ")
    assert restart == "jaxpar launch: restart 1 of 1 with 1 process, from runs/step_9"
