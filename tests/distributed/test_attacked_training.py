"""Any bytes at the heartbeat server while a training runs beside it: it goes on, to the same bits."""

import contextlib
import socket
import sys

import numpy as np
import pytest
from hostile import JOB, line
from hypothesis import HealthCheck, given, settings
from launched import LIMIT, background, command, free_port, python, until, write

# In one process or in several. It is over only after the attack.
TRAINING = """
    import os, pathlib, time
    import jaxpar as jp
    jp.distributed.initialize(heartbeat_timeout=20.0)
    import jax, numpy as np, optax
    here, rank = pathlib.Path(__file__).parent, jax.process_index()
    (here / f"address{rank}").write_text(os.environ.get("JAXPAR_HUB", ""))

    def wait(step, metrics):
        end = time.monotonic() + (200.0 if step == 180 else 0.1)
        while not (here / "over").exists() and time.monotonic() < end:
            time.sleep(0.01)

    points = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    step = jp.train.make_train_step(lambda params, batch, rng: (((batch["image"] @ params["w"]) - 1.0).var(), {}))
    store = jp.kv.from_params({"w": np.zeros((4, 2), np.float32)}, optimizer=optax.adam(0.1))
    options = {"batch_size": 16, "max_steps": 200, "progress": False, "on_step": wait}
    state = jp.train.create_state(store, 3, devices=jax.devices())
    state, _ = jp.train.fit(state, step, jp.data.Dataset(points, np.zeros(32, np.int32)), **options)
    np.save(here / f"end{rank}.npy", state.params["w"])
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What two devices make of it. The bits are those of two processes with one device each."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "over").touch()
    python(write(folder, TRAINING)[2], JAX_NUM_CPU_DEVICES="2")
    return np.load(folder / "end0.npy")


def attack(address, number):
    """Send so many messages of any bytes, each on a connection of its own. Return how many were sent."""
    sent, idle = [], [socket.create_connection(address) for _ in range(30)]

    @settings(deadline=None, max_examples=number, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(data=line)
    def send(data):
        with contextlib.suppress(ConnectionError), socket.create_connection(address, timeout=30) as sock:
            sock.sendall(data)
            sent.append(1)

    try:
        send()
    finally:
        for sock in idle:
            sock.close()
    return len(sent)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "number"), [(False, 2000), (True, 500)])
def test_processes_that_train_beside_an_attack(tmp_path, undisturbed, launcher, number):
    program, port = write(tmp_path, TRAINING)[2], free_port()
    if launcher:
        words = command("-n", "2", "--devices", "1", "--", sys.executable, program)
        processes = [background(words, JAXPAR_JOB=JOB)]
    else:
        shared = {"JAXPAR_COORDINATOR": f"127.0.0.1:{port}", "JAXPAR_NUM_PROCESSES": "2", "JAXPAR_SECRET": "x" * 32}
        shared |= {"JAXPAR_JOB": JOB, "JAX_NUM_CPU_DEVICES": "1"}
        words = [sys.executable, program]
        processes = [background(words, JAXPAR_PROCESS_ID=str(rank), **shared) for rank in range(2)]
    try:
        until(lambda: all((tmp_path / f"address{rank}").exists() for rank in range(2)), LIMIT)
        hub = (tmp_path / "address0").read_text()
        assert attack(("127.0.0.1", int(hub.split(":")[1]) if launcher else port + 1), number) > 0.9 * number
        (tmp_path / "over").touch()
        for process in processes:
            _, said = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, said
            assert [x for x in said.splitlines() if "Gloo" not in x] == []
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for rank in range(2):
        np.testing.assert_array_equal(np.load(tmp_path / f"end{rank}.npy"), undisturbed)
