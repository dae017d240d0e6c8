"""Whatever a peer sends drops that peer and nothing else: the hub, the launcher, the monitor and the relay."""

import contextlib
import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from hostile import HELLO, JOB, Client, Run
from hypothesis import HealthCheck, given, settings, strategies as st

from jaxpar import distributed
from jaxpar._heartbeat import client as _client, client as _monitor
from jaxpar._heartbeat.client import HeartbeatClient
from jaxpar._heartbeat.connection import JsonConnection
from jaxpar._heartbeat.messages import FROM_HUB
from jaxpar._heartbeat.proxy import ServiceProxy
from jaxpar._heartbeat.server import HubThread

LIMIT = 30
DEEP = b"[" * 60_000 + b"\n"


def hello(**changes):
    return {**HELLO, **changes}


def raw(**changes):
    """A hello as bytes, for values that json.dumps would not write."""
    return b"{" + b",".join(b'"%s":%s' % (k.encode(), v) for k, v in {**RAW, **changes}.items()) + b"}\n"


RAW = {name: json.dumps(value).encode() for name, value in HELLO.items()}

# Bytes that are no message at all, whoever sends them.
BROKEN = {
    "deep nesting": DEEP,
    "deep nesting in a field": raw(host=b'{"a":' * 30_000),
    "balanced nesting": b"[" * 30_000 + b"]" * 30_000 + b"\n",
    "invalid utf-8": b'{"beat": 1, "\xff\xfe": 2}\n',
    "utf-16": '{"beat": 1}\n'.encode("utf-16"),
    "embedded NUL": b'{"beat": 1}\x00\n',
    "a line of NUL": b"\x00" * 100 + b"\n",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "an empty line": b"\n",
    "an empty object": b"{}\n",
    "an array": b"[1]\n",
    "a scalar": b"1\n",
    "null": b"null\n",
    "an unknown message": b'{"reboot": 1}\n',
    "an unknown field": b'{"beat": 1, "more": 1}\n',
    "two messages in one": b'{"beat": 1, "leaving": 1}\n',
    "a field with another type": b'{"beat": "1"}\n',
    "a bool for an int": b'{"beat": true}\n',
    "a number of 5,000 digits": b'{"beat": ' + b"9" * 5000 + b"}\n",
    "a gigantic line": b'{"hint": "' + b"x" * 200_000 + b'"}\n',
    "a line without an end": b'{"hint": "' + b"x" * 200_000,
    "a long hint": b'{"hint": "' + b"x" * 5000 + b'"}\n',
    "escape sequences": b'{"hint": "\\u001b[2J\\u001b]0;owned\\u0007"}\n',
    "a bidirectional override": b'{"hint": "\\u202egnp.exe"}\n',
    "half a surrogate pair": b'{"hint": "\\ud800"}\n',
    "a reason that is a list": b'{"failed": ["x"]}\n',
}

# A hello with one wrong field.
HELLOS = {
    "patience is a word": raw(patience=b'"abc"'),
    "patience is NaN": raw(patience=b"NaN"),
    "patience is infinite": raw(patience=b"Infinity"),
    "patience overflows": raw(patience=b"1e999"),
    "patience is huge": raw(patience=b"1e300"),
    "patience is a huge int": raw(patience=b"9" * 400),
    "patience is negative": raw(patience=b"-1"),
    "patience is a bool": raw(patience=b"true"),
    "patience is missing": b'{"hello":1,"job":"a-job","rank":2,"size":3,"host":"there"}\n',
    "rank is a bool": raw(rank=b"true"),
    "rank is a float": raw(rank=b"2.0"),
    "rank is a word": raw(rank=b'"2"'),
    "rank is a list": raw(rank=b"[2]"),
    "rank is null": raw(rank=b"null"),
    "rank is negative": raw(rank=b"-1"),
    "rank is huge": raw(rank=b"9" * 400),
    "rank is NaN": raw(rank=b"NaN"),
    "size is a bool": raw(size=b"true"),
    "size is zero": raw(size=b"0"),
    "size is negative": raw(size=b"-3"),
    "size is huge": raw(size=b"9" * 30),
    "size is a float": raw(size=b"3.0"),
    "host is an object": raw(host=b'{"a":1}'),
    "host is long": raw(host=b'"' + b"h" * 300 + b'"'),
    "host has an escape sequence": raw(host=b'"\\u001b[31m"'),
    "host has a NUL": raw(host=b'"a\\u0000b"'),
    "host has a line end": raw(host=b'"a\\nb"'),
    "job is a list": raw(job=b'["a-job"]'),
    "job is long": raw(job=b'"' + b"j" * 60_000 + b'"'),
    "hello is true": raw(hello=b"true"),
    "hello with a field more": raw(more=b"1"),
}

EARLY = {
    "a heartbeat first": b'{"beat": 1}\n',
    "a hint first": b'{"hint": "elsewhere"}\n',
    "an error first": b'{"failed": "no"}\n',
    "an interrupt first": b'{"interrupted": "no"}\n',
    "leaving first": b'{"leaving": 1}\n',
    "a message of the hub": b'{"lost": 0, "host": "h", "why": "w"}\n',
    "another run": raw(job=b'"another"'),
}


def cases(table):
    return pytest.mark.parametrize("data", list(table.values()), ids=list(table))


# The hub and those that it does not know


@cases({**BROKEN, **HELLOS, **EARLY})
def test_one_that_is_unknown_is_dropped_and_the_run_begins(monkeypatch, data):
    with Run(monkeypatch) as run:
        first = run.member(0)
        early = run.connect(data)
        assert early.ends()
        members = [first, run.member(1), run.member(2)]
        late = run.connect(data)
        assert late.ends()
        members[1].send({"hint": "runs/step_3"})
        run.turn()
        run.wait(1.0)
        for member in members:
            assert [sorted(m) for m in member.read()] == [["welcome"], ["go", "host"], ["hint"]]
            assert not member.ended
        assert run.hub.lost is None
        assert run.hub.hint == "runs/step_3"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"size": 4, "rank": 3}, "process 3 was started as one of 4, this run has 3 processes"),
        ({"rank": 3}, "process 3 was started as one of 3, the processes of this run are 0 to 2"),
        ({"rank": 0}, "two processes say that they are process 0; each needs a number of its own"),
    ],
)
def test_wrong_numbers_are_refused_and_the_run_begins(monkeypatch, wrong, text):
    with Run(monkeypatch) as run:
        first = run.member(0)
        other = run.connect(hello(**wrong))
        assert other.read() == [{"welcome": 1}, {"refused": text}]
        other.send(*[{"beat": 1}] * 3, DEEP)  # it may send what it likes
        run.turn()
        members = [first, run.member(1), run.member(2)]
        assert [m.read()[-1].get("go") for m in members] == [1, 1, 1]
        late = run.connect(hello(**wrong))
        assert late.read()[-1] == {"refused": text}
        assert [m.read() for m in members] == [[], [], []]
        assert run.hub.lost is None


def test_where_the_others_never_come_all_read_who_was_refused(monkeypatch):
    with Run(monkeypatch) as run:
        first = run.member(0)
        run.member(1, size=5)
        assert [sorted(m) for m in first.read()] == [["welcome"]]
        run.wait(5.5)
        assert first.read() == [
            {
                "refused": "processes 1, 2 of 3 did not come within 5 seconds; "
                "process 1 was started as one of 5, this run has 3 processes"
            }
        ]


def test_a_timeout_counts_only_while_its_process_is_connected(monkeypatch):
    with Run(monkeypatch) as run:
        first = run.member(0)
        other = run.member(1, patience=600_000)
        other.send(DEEP)
        run.turn()
        run.wait(6)
        assert "did not come within 5 seconds" in first.read()[-1]["refused"]


def test_a_rank_that_left_is_not_taken_again(monkeypatch):
    with Run(monkeypatch) as run:
        members = run.together()
        members[2].send({"leaving": 1})
        members[2].hang_up()
        run.turn()
        other = run.connect(hello(rank=2))
        assert "two processes say" in other.read()[-1]["refused"]
        other.hang_up()
        run.turn()
        assert run.hub.lost is None


def test_half_closed_and_silent_connections_are_closed(monkeypatch):
    with Run(monkeypatch) as run:
        half = run.connect()
        half.sock.shutdown(socket.SHUT_WR)
        run.turn()
        assert half.ends()
        idle, slow = run.connect(), run.connect()
        for byte in raw()[:20]:
            slow.send(bytes([byte]))
            run.wait(0.3)
        for client in (idle, slow):
            assert client.ends()


# The hub and those that it knows


@cases(BROKEN)
def test_a_member_that_sends_rubbish_is_lost_and_named(monkeypatch, data):
    with Run(monkeypatch) as run:
        members = run.together()
        members[2].send(data)
        run.turn()
        for member in members[:2]:
            (message,) = member.read()
            assert (message["lost"], message["host"]) == (2, "there")
            assert message["why"].startswith("it sent what is no message of this run: ")
            assert message["why"].isprintable()
            assert len(message["why"]) < 300
            assert not member.ended
        assert run.hub.hint is None


@cases({"a second hello": raw(), **BROKEN})
def test_a_member_that_sends_rubbish_too_early_may_come_again(monkeypatch, data):
    with Run(monkeypatch) as run:
        first = run.member(0)
        early = run.member(2)
        early.send(data)
        run.turn()
        assert early.ends()
        members = [first, run.member(1), run.member(2)]
        for member in members:
            assert [sorted(m) for m in member.read()] == [["welcome"], ["go", "host"]]
        assert run.hub.lost is None


def test_a_member_that_closes_half_of_its_connection_is_lost(monkeypatch):
    with Run(monkeypatch) as run:
        members = run.together()
        members[2].sock.shutdown(socket.SHUT_WR)
        run.turn()
        why = "its connection closed without a word (killed?)"
        assert [m.read() for m in members[:2]] == [[{"lost": 2, "host": "there", "why": why}]] * 2


def test_a_second_hello_is_a_loss(monkeypatch):
    with Run(monkeypatch) as run:
        members = run.together()
        members[2].send(hello(rank=1))
        run.turn()
        assert [m.read()[0]["lost"] for m in members[:2]] == [2, 2]


def test_single_bytes_are_no_heartbeat(monkeypatch):
    with Run(monkeypatch) as run:
        members = run.together()
        for _ in range(12):
            for member in members[:2]:
                member.send({"beat": 1})
            members[2].send(b" ")
            run.wait(1.0)
        assert members[0].read() == members[1].read()
        assert run.hub.lost.rank == 2
        assert run.hub.lost.why.startswith("no sign of life for 10 seconds")


def test_a_process_that_leaves_says_no_more(monkeypatch):
    with Run(monkeypatch) as run:
        members = run.together()
        members[2].send({"leaving": 1}, {"failed": "a trick"}, {"hint": "elsewhere"}, DEEP)
        run.turn()
        run.wait(1.0)
        assert [m.read() for m in members[:2]] == [[], []]
        assert run.hub.lost is None


def test_the_reason_of_a_failure_comes_with_the_newest_hint(monkeypatch):
    with Run(monkeypatch) as run:
        members = run.together()
        members[1].send({"hint": "runs/step_8"}, {"hint": "runs/step_9"}, {"failed": "ValueError: x"})
        run.turn()
        assert members[0].read() == [
            {"hint": "runs/step_9"},
            {"lost": 1, "host": "there", "why": "ValueError: x"},
        ]


# Limits


def test_two_thousand_idle_connections(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2500:
        pytest.skip(f"this machine allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2500), hard))
    try:
        with Run(monkeypatch) as run:
            first = run.member(0)
            idle = []
            for _ in range(40):
                idle += [Client(run.address) for _ in range(50)]
                run.turn()
            assert len(run.selector.get_map()) < 100
            members = [first, run.member(1), run.member(2)]
            assert [m.read()[-1].get("go") for m in members] == [1, 1, 1]
            run.wait(6.0)
            assert len(run.selector.get_map()) == 4  # the listener and the three
            for client in idle:
                assert client.ends()
                client.sock.close()
            assert run.hub.lost is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_the_hub_does_not_spin(monkeypatch):
    with Run(monkeypatch) as run:
        first, second = run.member(0), run.member(1)
        third = socket.socket()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(third.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            third.connect(run.address)
            assert run.turn(most=20) < 20  # one try, then rest
            first.send({"hint": "runs/step_1"})
            run.wait(1.0)
            assert second.read()[-1] == {"hint": "runs/step_1"}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        third.send(raw())
        run.wait(1.0)
        assert run.hub.over is False
        assert first.read()[-1]["go"] == 1
        third.close()
        run.turn()


def test_a_flood_of_messages_is_read_in_portions(monkeypatch):
    with Run(monkeypatch) as run:
        members = run.together()
        members[2].floods = True
        for _ in range(200):
            members[2].send(b'{"beat": 1}\n' * 5000)
        assert run.turn() < 10
        members[0].send({"hint": "runs/step_2"})
        run.turn()
        run.wait(1.0)
        assert members[1].read() == [{"hint": "runs/step_2"}]
        time.sleep(1.05)  # the next portion
        assert 0 < run.turn() < 10
        assert run.hub.lost is None


def test_a_flood_of_hints_is_passed_on_once(monkeypatch):
    with Run(monkeypatch) as run:
        members = run.together()
        members[2].send(*[{"hint": f"runs/step_{i}"} for i in range(500)])
        run.turn()
        run.wait(1.0)
        assert members[0].read() == [{"hint": "runs/step_499"}]


def test_a_peer_that_does_not_read_gets_whole_messages_or_none(monkeypatch):
    with Run(monkeypatch) as run:
        members = run.together()
        members[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server_side = run.hub.peers[0].line
        server_side.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for i in range(2000):
            server_side.send(hint=f"{i:04d}" + "x" * 4000)
        assert not server_side.closed
        numbers = []
        for _ in range(200):
            numbers += [int(m["hint"][:4]) for m in members[0].read()]  # every line is whole
            server_side.send(beat=1)
        assert numbers == sorted(set(numbers))
        assert 0 < len(numbers) < 2000


# The launcher, and the hub in a thread


def launch(tmp_path, source, *options):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(source))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "SLURM", "OMPI"))}
    return subprocess.run(
        [sys.executable, "-m", "jaxpar", "launch", *options, "--", "python", str(program)],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_the_launcher_outlives_an_attack_on_its_port(tmp_path):
    source = f"""
        import os, socket, time
        from jaxpar import _cluster, _meeting, _monitor
        found = _cluster.find(None, None, None)
        host, port = os.environ["JAXPAR_HUB"].split(":")
        for data in {[DEEP[:200] * 300, *HELLOS.values(), *EARLY.values()]!r}:
            with socket.create_connection((host, port)) as sock:
                sock.sendall(data + b"\\n")
        monitor = _meeting.meet(found, 5.0, 10.0)
        _monitor.watch_exit(monitor)
        monitor.tell_hint("runs/\\x1b[2Jstep_5\\udc80")
        if found.process_id == 1 and os.environ["JAXPAR_RESTART"] == "0":
            time.sleep(1.2)
            raise ValueError("\\x1b]0;owned\\x07 \\u202e")
        if os.environ["JAXPAR_RESTART"] == "0":
            time.sleep(20)
    """
    done = launch(tmp_path, source, "-n", "2", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    own = [line for line in done.stderr.splitlines() if not line.startswith("[1] ")]
    assert all(line.isprintable() for line in own)
    assert own[-1] == r"jaxpar launch: restart 1 of 1 with 2 processes, from runs/\x1b[2Jstep_5\udc80"
    (survivor,) = [line for line in own if line.startswith("[0] ")]
    assert r"was lost: ValueError: \x1b]0;owned\x07 \u202e. Process 0 of 2 ends" in survivor


def test_the_launcher_ends_a_process_that_sends_rubbish(tmp_path):
    source = """
        import json, os, socket, time
        host, port = os.environ["JAXPAR_HUB"].split(":")
        hello = {"hello": 1, "job": os.environ["JAXPAR_JOB"], "rank": 0, "size": 1, "host": "h", "patience": 1}
        with socket.create_connection((host, port)) as sock:
            sock.sendall(json.dumps(hello).encode() + b"\\n")
            assert b"go" in sock.recv(1000) + sock.recv(1000)
            sock.sendall(b"{}\\n")
            time.sleep(60)
    """
    done = launch(tmp_path, source, "-n", "1")
    assert done.returncode == 143
    assert "failed: it sent what is no message of this run: a message is one of: hello, beat" in done.stderr


def test_the_hub_of_process_0_outlives_an_attack():
    hub = HubThread(socket.create_server(("127.0.0.1", 0)), job=JOB, size=2, silence=5, joining=10)
    address = hub.hub._listener.getsockname()
    hub.start()
    for data in (DEEP, *HELLOS.values()):
        with contextlib.closing(Client(address).sock) as sock:
            sock.sendall(data)
    monitors = [HeartbeatClient(rank, 2, job=JOB, silence=5, launched=False, hub=None) for rank in range(2)]
    joining = threading.Thread(target=monitors[1].join_run, args=([address], 5.0, "absent"))
    joining.start()
    monitors[0].join_run([address], 5.0, "absent")
    joining.join(LIMIT)
    with contextlib.closing(Client(address).sock) as sock:
        sock.sendall(DEEP)
    monitors[1].tell_hint("runs/step_4")
    end = time.monotonic() + 5
    while monitors[0].hint is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert monitors[0].hint == "runs/step_4"
    for monitor in monitors:
        assert monitor.is_alive()
        monitor.stop()
    hub.join(LIMIT)
    assert not hub.is_alive()


# The monitor and a hub that is broken


class Ended(Exception):
    pass


@pytest.fixture
def watched(monkeypatch):
    """Runs a monitor against bytes from its hub; its last line, or None where it goes on."""

    lines = []
    monkeypatch.setattr(_client, "last_words", lines.append)
    monkeypatch.setattr(_monitor.os, "_exit", lambda status: (_ for _ in ()).throw(Ended(status)))
    listener = socket.create_server(("127.0.0.1", 0))

    def watch(data):
        lines.clear()
        monitor = HeartbeatClient(1, 3, job=JOB, silence=5, launched=False, hub=None)
        monitor.start = lambda: None
        with contextlib.ExitStack() as stack:

            def serve():
                sock, _ = listener.accept()
                stack.callback(sock.close)
                sock.sendall(b'{"welcome": 1}\n{"go": 1, "host": "h"}\n')
                with contextlib.suppress(OSError):
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)

            server = threading.Thread(target=serve)
            server.start()
            monitor.join_run([listener.getsockname()], 5.0, "absent")
            with contextlib.suppress(Ended):
                monitor.run()
            monitor._line.close()
            server.join(LIMIT)
        (line,) = lines
        return line

    yield watch
    listener.close()


HUBS = {
    **BROKEN,
    "a loss without a rank": b'{"lost": null, "host": "h", "why": "w"}\n',
    "a rank out of range": b'{"lost": -1, "host": "h", "why": "w"}\n',
    "a loss without a reason": b'{"lost": 1}\n',
    "a loss with a name": b'{"lost": 1, "host": "h", "why": "w", "name": "x"}\n',
    "a reason with an escape sequence": b'{"lost": 1, "host": "h", "why": "\\u001b[2J"}\n',
    "a host that is a list": b'{"lost": 1, "host": [], "why": "w"}\n',
    "a refusal that is a number": b'{"refused": 1}\n',
    "go without a host": b'{"go": 1}\n',
    "a message of a process": raw(),
}


@cases(HUBS)
def test_a_broken_hub_ends_the_monitor_with_one_clear_line(watched, data):
    line = watched(data)
    assert line.startswith("jaxpar: process 0 (host h) was lost: it sent what is no message of this run: ")
    assert line.endswith("Process 1 of 3 ends with status 75; no checkpoint is known to resume from")
    assert line.isprintable()


@cases({**BROKEN, "go without a host": b'{"go": 1}\n', "a refusal that is a number": b'{"refused": 1}\n'})
def test_a_broken_hub_refuses_a_process_in_words(data):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(b'{"welcome": 1}\n' + data)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1000)

        server = threading.Thread(target=serve)
        server.start()
        monitor = HeartbeatClient(1, 3, job=JOB, silence=5, launched=False, hub=None)
        with pytest.raises(ConnectionError, match=r"sent what is no message of this run|was closed before|absent"):
            monitor.join_run([listener.getsockname()], 0.2, "absent")
        server.join(LIMIT)


def test_a_flood_from_the_hub_leaves_the_processor_free():
    near, far = socket.socketpair()
    monitor = HeartbeatClient(1, 3, job=JOB, silence=5, launched=False, hub=None)
    with near:
        monitor._line = JsonConnection(far, FROM_HUB)
        monitor.start()
        near.settimeout(0.2)
        used, end = time.process_time(), time.monotonic() + 1.5
        sent = 0
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                sent += near.send(b'{"beat": 1}\n')
            with contextlib.suppress(TimeoutError):
                sent += near.send(b'{"beat": 1}\n' * 4000)
        used = time.process_time() - used
        near.settimeout(None)
        monitor._left = True
    monitor.stop()
    monitor._line.close()
    assert used < 0.75
    assert sent < 5_000_000


def test_a_connection_may_have_a_high_descriptor():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this machine allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    near, far = socket.socketpair()
    try:
        with near, far, socket.socket(fileno=fcntl.fcntl(far.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100)) as high:
            line = JsonConnection(high, FROM_HUB)
            near.sendall(b'{"beat": 1}\n')
            line.wait(5.0)
            assert line.receive() == [{"beat": 1}]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300, -1.0])
@pytest.mark.parametrize("name", ["initialization_timeout", "heartbeat_timeout"])
def test_a_timeout_that_no_hub_takes_is_refused_at_once(name, seconds):
    with pytest.raises(ValueError, match=r"initialization_timeout must be above 0 .*; both at most 604800, a week"):
        distributed.initialize("127.0.0.1:1", 2, 0, **{name: seconds})


# Any bytes, any JSON, any mutation


VALID = [
    HELLO,
    {"beat": 1},
    {"hint": "runs/step_1"},
    {"hint": None},
    {"failed": "ValueError: x"},
    {"interrupted": "KeyboardInterrupt"},
    {"leaving": 1},
    {"welcome": 1},
    {"stranger": 1},
    {"lost": 1, "host": "h", "why": "w"},
    {"refused": "w"},
    {"go": 1, "host": "h"},
    {"closing": 1},
]
NAMES = sorted({name for message in VALID for name in message})
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 4),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from([JOB, "\x1b[2J", "\x00", "\ud800", "x" * 70_000, 10**400, 2**63]),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def mutations(draw):
    """A valid message with a field changed, removed or added, or none of it."""
    message = dict(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*message, *NAMES[:3]]))
        if draw(st.booleans()):
            message[name] = draw(values)
        else:
            message.pop(name, None)
    return message


def as_line(value):
    return json.dumps(value).encode(errors="surrogatepass") + b"\n"


lines = st.one_of(st.binary(max_size=200), values.map(as_line), mutations().map(as_line))
sendings = st.lists(lines, min_size=1, max_size=4)
KNOWN = {"welcome", "go", "hint", "lost", "refused", "closing"}


def attack(run, data, member, early):
    """One run with two healthy processes and one bad peer, which ends its connection last."""
    healthy = [run.member(rank) for rank in (0, 1)]
    if not early:
        third = run.member(2)
    bad = run.connect(*([HELLO] if member and early else []))
    if member and not early:
        bad = third
    bad.send(*data)
    run.turn()
    run.wait(1.0)
    bad.hang_up()
    run.turn()
    return healthy


def check(run, healthy, member):
    """The healthy get true messages only, and go on being served."""
    messages = [client.read() for client in healthy]
    assert [m for m in messages[0] if "closing" not in m] == [m for m in messages[1] if "closing" not in m]
    for message in messages[0]:
        assert len(set(message) & KNOWN) == 1
        assert all(value.isprintable() for value in message.values() if isinstance(value, str))
        assert message.get("lost", 2) == 2
        assert member or not {"lost", "refused", "hint", "closing"} & set(message)
    healthy[0].send({"hint": "the last"})
    run.turn()
    run.wait(1.0)
    assert healthy[1].read()[-1] == {"hint": "the last"}
    assert not any(client.ended for client in healthy)
    assert set(run.hub.peers) - {2} == {0, 1}


def claims_membership(data):
    return JOB.encode() in b"".join(data)


@pytest.fixture(scope="module")
def any_bytes():
    def hold(data, member, early):
        with pytest.MonkeyPatch.context() as patch, Run(patch, size=3) as run:
            check(run, attack(run, data, member, early), member or claims_membership(data))

    return hold


quick = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@settings(quick, max_examples=300)
@given(data=sendings, member=st.booleans(), early=st.booleans())
def test_any_bytes_drop_their_sender_at_most(any_bytes, data, member, early):
    any_bytes(data, member, early)


@settings(quick, max_examples=100)
@given(data=sendings)
def test_any_bytes_end_a_monitor_with_one_printable_line(watched, data):
    line = watched(b"".join(data))
    assert line.isprintable()
    assert "ends with status 75" in line


@pytest.mark.slow
@settings(quick, max_examples=10_000, derandomize=False)
@given(data=sendings, member=st.booleans(), early=st.booleans())
def test_any_bytes_drop_their_sender_at_most_many(any_bytes, data, member, early):
    any_bytes(data, member, early)


# The relay to jax's coordination service


@pytest.fixture
def service():
    """An address where connections are taken, and those that came."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        yield listener


def relayed(target):
    relay = ServiceProxy(f"127.0.0.1:{target.getsockname()[1]}")
    relay.start()
    host, port = relay.address.rsplit(":", 1)
    return relay, (host, int(port))


def pair(address, service):
    near = socket.create_connection(address, timeout=5)
    near.sendall(b"ping")
    far, _ = service.accept()
    far.settimeout(5)
    assert far.recv(4) == b"ping"
    return near, far


def service_address(pair):
    return pair[1].getsockname()


def is_served(near, far):
    near.sendall(b"a")
    far.sendall(b"b")
    return (far.recv(1), near.recv(1)) == (b"a", b"b")


def test_a_peer_that_does_not_read_stops_its_own_pair_only(service):
    _, address = relayed(service)
    good, bad = pair(address, service), pair(address, service)
    bad[0].setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:  # until the relay, which waits for the far end, takes no more
            bad[0].send(b"x" * 65536)
    assert is_served(*good)
    for sock in (*good, *bad):
        sock.close()


def test_a_service_that_cannot_be_reached_keeps_no_other_waiting(service):
    _, address = relayed(service)
    good = pair(address, service)
    service.close()
    impatient, waiting = (socket.create_connection(address, timeout=5) for _ in range(2))
    impatient.sendall(b"x")
    impatient.close()
    waiting.sendall(b"early")
    time.sleep(0.2)
    assert is_served(*good)
    with socket.create_server(service_address(good)) as again:
        again.settimeout(5)
        far, _ = again.accept()
        far.settimeout(5)
        assert far.recv(5) == b"early"  # a slower process 0: what was sent before it came is not lost
    for sock in (*good, waiting, far):
        sock.close()


def test_idle_connections_do_not_keep_the_client_out(service):
    _, address = relayed(service)
    good = pair(address, service)
    before = len(os.listdir("/proc/self/fd"))
    idle = [socket.create_connection(address, timeout=5) for _ in range(200)]
    late = pair(address, service)
    assert is_served(*good)
    assert is_served(*late)
    assert len(os.listdir("/proc/self/fd")) < before + 200 + 60
    for sock in (*good, *late, *idle):
        sock.close()


def test_a_client_that_ends_closes_both_sockets(service):
    _, address = relayed(service)
    good = pair(address, service)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        near, far = pair(address, service)
        near.close()
        assert far.recv(1) == b""
        far.close()
    end = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert is_served(*good)
    for sock in good:
        sock.close()


def test_a_service_that_dies_is_not_noticed_by_its_client(service):
    _, address = relayed(service)
    near, far = pair(address, service)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset, as by SIGKILL
    far.close()
    near.settimeout(0.3)
    with pytest.raises(TimeoutError):
        near.recv(1)
    near.sendall(b"still")
    time.sleep(0.05)
    near.sendall(b"still")
    with pytest.raises(TimeoutError):
        near.recv(1)
    near.close()


def test_without_descriptors_the_relay_goes_on(service, monkeypatch):
    relay, address = relayed(service)
    good = pair(address, service)
    sock = socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(sock.fileno())
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        sock.connect(address)
        sock.sendall(b"ping")
        time.sleep(0.2)
        good[0].sendall(b"a")
        assert good[1].recv(1) == b"a"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    far, _ = service.accept()
    far.settimeout(5)
    assert far.recv(4) == b"ping"
    assert relay.is_alive()
    for each in (*good, sock, far):
        each.close()
