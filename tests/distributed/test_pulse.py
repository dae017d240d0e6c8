"""Heartbeats from beside a process: while it cannot send them, and only then."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from hostile import is_readable
from launched import alive, until

from jaxpar._heartbeat.connection import FROM_PROCESS, JsonConnection
from jaxpar._heartbeat.pulse import Pulse

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there are pulses on Linux only")


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    with near, far:
        yield near, JsonConnection(far, FROM_PROCESS)


@pytest.mark.slow
def test_heartbeats_come_while_this_process_sends_none(pair):
    near, far = pair
    pulse = Pulse(quiet=0.5, most=1.7)
    pulse.add(near)
    for _ in range(20):  # often, since a busy machine may delay each
        time.sleep(0.03)
        pulse.beat()
    assert not is_readable(far.sock, 0.1)
    far.wait(5.0)
    assert far.receive() == [{"heartbeat": 1}]
    time.sleep(1.5)
    far.receive()
    assert not is_readable(far.sock, 0.7)  # this process hangs
    pulse.beat()
    assert is_readable(far.sock, 30.0)
    pulse.close()
    pulse.add(near)  # nothing happens
    pulse.beat()
    assert pulse._process.returncode == 0


def test_a_connection_that_is_closed_here_is_closed(pair):
    near, far = pair
    pulse = Pulse(quiet=0.2)
    pulse.add(near)
    is_readable(far.sock, 30.0)
    JsonConnection(near, FROM_PROCESS).close()
    time.sleep(0.3)
    while far.receive():
        pass
    assert far.is_closed
    assert far.fault is None
    pulse.close()


PROGRAM = """
    import ctypes, os, socket, sys
    from jaxpar._heartbeat.pulse import Pulse
    pulse = Pulse(quiet=0.2)
    pulse.add(socket.socket(fileno=int(sys.argv[1])))
    print(pulse._process.pid, flush=True)
    ctypes.PyDLL(None).sleep(60)  # with Python's lock
"""


@pytest.mark.slow
def test_a_process_that_holds_the_lock_is_heard_and_one_that_is_stopped_or_killed_is_not(pair):
    near, far = pair
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(near.fileno())]
    with subprocess.Popen(command, pass_fds=[near.fileno()], stdout=subprocess.PIPE) as process:
        near.close()
        try:
            beside = int(process.stdout.readline())
            far.wait(5.0)
            assert set(map(str, far.receive())) == {"{'heartbeat': 1}"}
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(beside, number)
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            far.receive()
            assert not is_readable(far.sock, 0.6)
            process.send_signal(signal.SIGCONT)
            assert is_readable(far.sock, 30.0)
        finally:
            process.kill()
        end = time.monotonic() + 30
        while not far.is_closed:
            assert time.monotonic() < end
            far.wait(1.0)
            far.receive()
        until(lambda: not alive(beside), 30)  # it does not go on without its process


def test_where_it_cannot_be_started_there_is_none(pair, monkeypatch):
    near, far = pair
    monkeypatch.setattr(sys, "executable", "/nowhere")
    pulse = Pulse(quiet=0.1)
    pulse.add(near)
    pulse.beat()
    pulse.close()
    assert not is_readable(far.sock, 0.2)


def test_a_fork_that_goes_on_does_not_keep_it():
    program = """
    import os, time
    from jaxpar._heartbeat.pulse import Pulse
    pulse = Pulse()
    if (child := os.fork()) == 0:  # as a worker that loads data
        time.sleep(60)
        os._exit(0)
    began = time.monotonic()
    pulse.close()
    assert time.monotonic() - began < 30
    os.kill(child, 9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=50)
