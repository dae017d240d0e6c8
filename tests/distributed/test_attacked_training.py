"""Any bytes at the heartbeat server while a training runs beside it: it goes on, to the same bits."""

import contextlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from hostile import JOB, line
from hypothesis import HealthCheck, given, settings
from launched import LIMIT, command, environment, free_port, write

STEPS = 200
# The training, in this process or in several. It is over only after the attack.
TRAINING = f"""
import numpy as np, optax, time
from jaxpar import data, kv, train
points = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
STEP = train.make_train_step(lambda params, batch, rng: (((batch["image"] @ params["w"]) - 1.0).var(), {{}}))

def run(is_over, devices=None):
    def wait(step, metrics):
        end = time.monotonic() + (200.0 if step == {STEPS} - 20 else 0.1)
        while not is_over() and time.monotonic() < end:
            time.sleep(0.01)
    store = kv.from_params({{"w": np.zeros((4, 2), np.float32)}}, optimizer=optax.adam(0.1))
    state = train.create_state(store, 3, devices=devices)
    options = {{"batch_size": 16, "max_steps": {STEPS}, "progress": False, "on_step": wait}}
    state, _ = train.fit(state, STEP, data.Dataset(points, np.zeros(32, np.int32)), **options)
    return np.asarray(state.params["w"])
"""
OWN = {}
exec(TRAINING, OWN)


@pytest.fixture(scope="module")
def undisturbed():
    """What two devices make of it. The bits are those of two processes with one device each."""
    return OWN["run"](lambda: True, jax.devices()[:2])


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


PROGRAM = """
import os, pathlib, sys
import jaxpar as jp
jp.distributed.initialize(heartbeat_timeout=20.0)
import jax
here = pathlib.Path(__file__).parent
(here / f"address{jax.process_index()}").write_text(os.environ.get("JAXPAR_HUB", ""))
end = run((here / "over").exists)
np.save(here / f"end{jax.process_index()}.npy", end)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "number"), [(False, 10_000), (True, 1000)])
def test_processes_that_train_beside_an_attack(tmp_path, undisturbed, launcher, number):
    source = PROGRAM.replace("end = run", TRAINING + "\nend = run")
    program = write(tmp_path, source)[2]
    env, port = environment(JAXPAR_JOB=JOB, JAX_NUM_CPU_DEVICES="1"), None
    commands = [[*command("-n", "2", "--devices", "1"), "--", sys.executable, program]]
    if not launcher:
        port = free_port()
        env |= {"JAXPAR_COORDINATOR": f"127.0.0.1:{port}", "JAXPAR_NUM_PROCESSES": "2", "JAXPAR_SECRET": "x" * 32}
        commands = [[sys.executable, program]] * 2
    with open(tmp_path / "output", "w") as output:
        processes = [
            subprocess.Popen(c, env={**env, "JAXPAR_PROCESS_ID": str(i)} if port else env, stderr=output)
            for i, c in enumerate(commands)
        ]
    try:
        end = time.monotonic() + LIMIT
        while not all((tmp_path / f"address{rank}").exists() for rank in range(2)):
            assert time.monotonic() < end
            assert all(process.poll() is None for process in processes), (tmp_path / "output").read_text()
            time.sleep(0.05)
        hub = (tmp_path / "address0").read_text()
        assert attack(("127.0.0.1", int(hub.split(":")[1]) if launcher else port + 1), number) > 0.9 * number
        (tmp_path / "over").touch()
        assert [process.wait(LIMIT) for process in processes] == [0] * len(processes), (tmp_path / "output").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank in range(2):
        np.testing.assert_array_equal(np.load(tmp_path / f"end{rank}.npy"), undisturbed)
    said = [x for x in (tmp_path / "output").read_text().splitlines() if "Gloo" not in x]
    assert said == []
