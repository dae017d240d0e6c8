"""`python -m jaxpar launch` as a process, and programs for it that send heartbeats without loading JAX."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxpar.__main__ import main

LIMIT = 60  # seconds; every run here is over in a few

# A program under the launcher, with a heartbeat client. It does not import JAX, so that its start takes no time.
HEAD = """
import os, pathlib, signal, subprocess, sys, time
rank, size = int(os.environ["JAXPAR_PROCESS_ID"]), int(os.environ["JAXPAR_NUM_PROCESSES"])
start, here = int(os.environ["JAXPAR_RESTART"]), pathlib.Path(__file__).parent
host, port = os.environ["JAXPAR_HUB"].split(":")
"""
MEMBER = """
from jaxpar._heartbeat.client import HeartbeatClient, watch_end
from jaxpar._heartbeat.server import find_secret
run = {"job": os.environ["JAXPAR_JOB"], "secret": find_secret()}
client = HeartbeatClient(rank, size, **run, heartbeat_timeout=2.0, launched=True)
client.join_run([(host, int(port))], 10.0, "absent")
watch_end(client)
client.send_resume_hint("runs/step_5")
assert "jax" not in sys.modules
"""


def command(*options):
    return [sys.executable, "-m", "jaxpar", "launch", *options]


def environment(**more):
    """The variables of this process without those of a cluster. What it can import, the other one can too."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "CUDA", "SLURM", "OMPI"))}
    return {**clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path), **more}


def refused(capsys, *words):
    """What the command line says of words that it does not take."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


def free_port():
    """A port. The next ones are free too, very likely."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return port if port < 65000 else port - 1000


def write(folder, *parts):
    """Write a program, and return the end of a command line of the launcher."""
    path = folder / "program.py"
    path.write_text("".join(map(textwrap.dedent, parts)))
    return ["--", "python", str(path)]


def background(words, **env):
    """A process whose output is read while it runs, or at its end by `communicate`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=environment(**env), text=True, **pipes)


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def state_of(pid):
    """The letter that Linux has for what a process does, such as T where it is stopped. Empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def alive(pid):
    """Whether it runs; one that ended and was not reaped does not."""
    return state_of(pid) not in ("", "Z")


def launch(*arguments, expect=0, timeout=LIMIT, **env):
    """The launcher, which ends with the expected status."""
    return _done(command(*arguments), expect, timeout, env)


def python(*arguments, expect=0, timeout=LIMIT, **env):
    """Python in a process of its own, which ends with the expected status."""
    return _done([sys.executable, *arguments], expect, timeout, env)


def _done(words, expect, timeout, env):
    done = subprocess.run(words, env=environment(**env), capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode in (expect if isinstance(expect, tuple) else (expect,)), done.stderr
    return done
