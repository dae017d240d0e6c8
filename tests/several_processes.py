"""Several processes of one script on this machine, over Gloo."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from launched import environment, free_port

from jaxpar import kv

LIMIT = 400  # seconds; a run takes ten to sixty on an idle machine


def free_address():
    return f"127.0.0.1:{free_port()}"


def run_phases(phases_of, attach=lambda: None):
    """What a process does: it joins the others, and then calls the phases that its command line names."""
    coordinator, count, index, folder, *phases = sys.argv[1:]
    if int(count) > 1:
        jax.distributed.initialize(coordinator, int(count), int(index), initialization_timeout=60)
        attach()
    assert (kv.rank(), kv.num_workers()) == (int(index), int(count))
    for phase in phases:
        began, worked = time.monotonic(), time.process_time()
        phases_of[phase](Path(folder))
        print(f"{phase}: {time.monotonic() - began:.1f} s, {time.process_time() - worked:.1f} of the CPU", flush=True)
    kv.barrier("done")


def stays_after(step):
    """An `on_step` that does not return after this step: the test kills all processes there."""

    def on_step(now, metrics):
        if now > step:
            time.sleep(600)

    return on_step


class Run:
    """Processes that were started together; killed together on leaving."""

    def __init__(self, script, folder, processes, devices, *phases):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        address = free_address()
        # Nothing here is long enough for optimised code to pay; of two flags the last one counts.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
        env = environment(JAX_NUM_CPU_DEVICES=str(devices), XLA_FLAGS=flags, PYTHONFAULTHANDLER="1")
        self.outputs = [folder / f"output{i}" for i in range(processes)]
        self.processes = []
        for i, output in enumerate(self.outputs):
            command = [sys.executable, Path(__file__).parent / script, address, str(processes), str(i), folder, *phases]
            with open(output, "w") as file:
                started = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
            self.processes.append(started)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.wait()

    def wait(self, until=lambda: False):
        """Until all have ended well, or something else has happened; fails when one fails or time is over."""
        end = time.monotonic() + LIMIT
        while not until():
            codes = [process.poll() for process in self.processes]
            if all(code == 0 for code in codes):
                return
            if any(codes) or time.monotonic() > end:
                shown = [f"--- process {i}: {codes[i]}\n{o.read_text()[-1500:]}" for i, o in enumerate(self.outputs)]
                pytest.fail("\n".join(shown))
            time.sleep(0.05)

    def saved(self, name):
        with np.load(self.folder / name) as found:
            return dict(found)


def killed_and_resumed(script, folder, saved, phases, others):
    """What each topology found. 2 × 2 is killed in the midst of a run, which each of the others resumes."""
    first = Run(script, folder / "first", 2, 2, *phases)
    with first:
        first.wait(until=(first.folder / "run" / saved).exists)
    assert [process.returncode for process in first.processes] == [-9, -9]
    found = {"2x2": first}
    for name, *what in others:
        (folder / name).mkdir()
        shutil.copytree(first.folder / "run", folder / name / "run")
        with Run(script, folder / name, *what) as found[name]:
            found[name].wait()
    return found


def check_same(got, expected, exact=lambda name: False):
    """The same arrays but for the order of sums; to the bit where `exact` says so."""
    assert got.keys() >= expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
        assert not exact(name) or got[name].tobytes() == value.tobytes(), name
