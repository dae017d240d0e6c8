"""An invalid message ends the connection that it came from, and no other: server, launcher, client and proxy."""

import contextlib
import fcntl
import json
import socket
import threading
import time
import types

import hostile
import pytest
import world
from hostile import HELLO, JOB, Client, Run, descriptors, is_readable, liar, lines, new_client, serving
from hypothesis import HealthCheck, given, settings, strategies as st
from launched import HEAD, MEMBER, launch, until, write

from jaxpar import distributed
from jaxpar._heartbeat import client as client_module
from jaxpar._heartbeat.client import LOST
from jaxpar._heartbeat.server import FROM_SERVER, JsonConnection

LIMIT = 30
DEEP = b"[" * 60_000 + b"\n"
RAW = {name: json.dumps(value).encode() for name, value in HELLO.items()}


def raw(**changes):
    """A hello as bytes, for values that json.dumps would not write."""
    return b"{" + b",".join(b'"%s":%s' % (k.encode(), v) for k, v in {**RAW, **changes}.items()) + b"}\n"


# Bytes that are no message at all, whoever sends them.
BROKEN = {
    "deep nesting": DEEP,
    "deep nesting in a field": raw(host=b'{"a":' * 30_000),
    "balanced nesting": b"[" * 30_000 + b"]" * 30_000 + b"\n",
    "invalid utf-8": b'{"heartbeat": 1, "\xff\xfe": 2}\n',
    "utf-16": '{"heartbeat": 1}\n'.encode("utf-16"),
    "embedded NUL": b'{"heartbeat": 1}\x00\n',
    "a line of NUL": b"\x00" * 100 + b"\n",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "an empty line": b"\n",
    "an empty object": b"{}\n",
    "an array": b"[1]\n",
    "a scalar": b"1\n",
    "null": b"null\n",
    "an unknown message": b'{"reboot": 1}\n',
    "an unknown field": b'{"heartbeat": 1, "more": 1}\n',
    "two messages in one": b'{"heartbeat": 1, "leaving": 1}\n',
    "a field with another type": b'{"heartbeat": "1"}\n',
    "a bool for an int": b'{"heartbeat": true}\n',
    "a number of 5,000 digits": b'{"heartbeat": ' + b"9" * 5000 + b"}\n",
    "a gigantic line": b'{"hint": "' + b"x" * 200_000 + b'"}\n',
    "a line without an end": b'{"hint": "' + b"x" * 200_000,
    "a long hint": b'{"hint": "' + b"x" * 5000 + b'"}\n',
    "escape sequences": b'{"hint": "\\u001b[2J\\u001b]0;owned\\u0007"}\n',
    "a bidirectional override": b'{"hint": "\\u202egnp.exe"}\n',
    "half a surrogate pair": b'{"hint": "\\ud800"}\n',
    "a reason that is a list": b'{"failed": ["x"]}\n',
}
# A hello with one wrong field.
WRONG = {
    "timeout": [b'"abc"', b"NaN", b"Infinity", b"1e999", b"1e300", b"9" * 400, b"-1", b"true"],
    "rank": [b"true", b"2.0", b'"2"', b"[2]", b"null", b"-1", b"9" * 400, b"NaN"],
    "size": [b"true", b"0", b"-3", b"9" * 30, b"3.0"],
    "host": [b'{"a":1}', b'"' + b"h" * 300 + b'"', b'"\\u001b[31m"', b'"a\\u0000b"', b'"a\\nb"'],
    "job": [b'["a-job"]', b'"' + b"j" * 60_000 + b'"'],
    "hello": [b"true"],
    "more": [b"1"],
}
HELLOS = {f"{name} {value[:12].decode()}": raw(**{name: value}) for name in WRONG for value in WRONG[name]}
HELLOS["no timeout"] = b'{"hello":1,"job":"a-job","rank":2,"size":3,"host":"there"}\n'
# Valid messages where a hello of this run is expected.
EARLY = {
    "a heartbeat first": b'{"heartbeat": 1}\n',
    "a hint first": b'{"hint": "elsewhere"}\n',
    "an error first": b'{"failed": "no"}\n',
    "an interrupt first": b'{"interrupted": "no"}\n',
    "leaving first": b'{"leaving": 1}\n',
    "a message of the server": b'{"lost": 0, "host": "h", "why": "w"}\n',
    "another run": raw(job=b'"another"'),
}
# Messages of a server that are invalid.
SERVERS = {
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


def cases(table):
    return pytest.mark.parametrize("data", list(table.values()), ids=list(table))


@pytest.fixture
def run(monkeypatch):
    with Run(monkeypatch) as run:
        yield run


def begin(run, first):
    """The run begins with the right processes. All of them, after their welcome and go."""
    members = [first, run.member(1), run.member(2)]
    for member in members:
        assert [sorted(m) for m in member.read()] == [["welcome"], ["go", "host"]]
        assert not member.ended
    assert run.server.lost is None
    return members


# The server, and peers that are no process of the run


@cases({**BROKEN, **HELLOS, **EARLY})
def test_an_invalid_message_ends_its_own_connection(run, data):
    is_valid_later = data in EARLY.values()
    first, early = run.member(0), run.member(2)
    assert run.connect(data).ends()
    early.send(DEEP if is_valid_later else data)
    run.turn()
    assert early.ends()
    members = begin(run, first)  # process 2 has connected again
    assert run.connect(data).ends()
    members[1].send({"hint": "runs/step_3"})
    run.turn()
    run.wait(1.0)
    assert [member.read() for member in members] == [[{"hint": "runs/step_3"}]] * 3
    assert (run.server.lost, run.server.hint) == (None, "runs/step_3")
    if is_valid_later:
        return
    members[2].send(data)
    run.turn()
    for member in members[:2]:
        (message,) = member.read()
        assert (message["lost"], message["host"]) == (2, "there")
        assert message["why"].startswith("it sent an invalid message: ")
        assert message["why"].isprintable()
        assert len(message["why"]) < 300
        assert not member.ended
    assert run.server.hint == "runs/step_3"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"size": 4, "rank": 3}, "process 3 was started as one of 4, this run has 3 processes"),
        ({"rank": 3}, "process 3 was started as one of 3, the processes of this run are 0 to 2"),
        ({"rank": 0}, "two processes say that they are process 0; each needs its own number"),
    ],
)
def test_wrong_numbers_are_refused_and_the_run_begins(run, wrong, text):
    first = run.member(0)
    other = run.connect({**HELLO, **wrong})
    assert other.read() == [{"welcome": 1}, {"refused": text}]
    other.send(*[{"heartbeat": 1}] * 3, DEEP)  # whatever it sends is ignored
    run.turn()
    members = begin(run, first)
    assert run.connect({**HELLO, **wrong}).read()[-1] == {"refused": text}
    assert [m.read() for m in members] == [[], [], []]
    assert run.server.lost is None


def test_where_the_others_never_join_all_read_who_was_refused(run):
    first = run.member(0)
    run.member(1, size=5)
    assert first.read() == [{"welcome": 1}]
    run.wait(5.5)
    absent = "processes 1, 2 of 3 did not come within 5 seconds"
    assert first.read() == [{"refused": f"{absent}; process 1 was started as one of 5, this run has 3 processes"}]


def test_a_timeout_counts_only_while_its_process_is_connected(run):
    first = run.member(0)
    run.member(1, timeout=600_000).send(HELLO)  # a second one
    run.turn()
    run.wait(6)
    assert "did not come within 5 seconds" in first.read()[-1]["refused"]


def test_a_rank_that_left_is_not_taken_again(run):
    leaving = run.all_members()[2]
    leaving.send({"leaving": 1})
    leaving.shut()
    run.turn()
    other = run.connect(HELLO)
    assert "two processes say" in other.read()[-1]["refused"]
    other.shut()
    run.turn()
    assert run.server.lost is None


def test_half_closed_and_silent_connections_are_closed(run):
    half = run.connect()
    half.shut(socket.SHUT_WR)
    run.turn()
    assert half.ends()
    idle, slow = run.connect(), run.connect()
    for byte in raw()[:20]:
        slow.send(bytes([byte]))
        run.wait(0.3)
    assert idle.ends()
    assert slow.ends()


# The server, and processes of the run


HINTS = [{"hint": f"runs/step_{i}"} for i in range(500)]


REFUSED = "it sent an invalid message: hello comes first, and once"
RECEIVED = {
    "half closed": ([], [{"lost": 2, "host": "there", "why": "its connection closed (killed?)"}]),
    "a second hello": ([HELLO], [{"lost": 2, "host": "there", "why": REFUSED}]),
    "nothing counts after leaving": ([{"leaving": 1}, {"failed": "a trick"}, {"hint": "elsewhere"}, DEEP], []),
    "the newest hint comes with a loss": (
        [*HINTS[:9], {"failed": "ValueError: x"}],
        [HINTS[8], {"lost": 2, "host": "there", "why": "ValueError: x"}],
    ),
    "hints are sent once": (HINTS, [HINTS[-1]]),
}


@pytest.mark.parametrize(("sent", "received"), RECEIVED.values(), ids=RECEIVED)
def test_what_the_others_receive(run, sent, received):
    members = run.all_members()
    members[2].send(*sent)
    if not sent:
        members[2].shut(socket.SHUT_WR)
    run.turn()
    for _ in range(12 if {"leaving": 1} in sent else 1):  # longer than a process may be silent
        members[0].send({"heartbeat": 1})
        members[1].send({"heartbeat": 1})
        run.wait(1.0)
    assert [m.read() for m in members[:2]] == [received, received]


def test_single_bytes_are_no_heartbeat(run):
    members = run.all_members()
    for _ in range(12):
        for member in members[:2]:
            member.send({"heartbeat": 1})
        members[2].send(b" ")
        run.wait(1.0)
    assert members[0].read() == members[1].read()
    assert run.server.lost["lost"] == 2
    assert run.server.lost["why"].startswith("no heartbeat for 10 seconds")


# Limits


@pytest.mark.slow
def test_two_thousand_idle_connections(run):
    with descriptors(2500):
        first, idle = run.member(0, timeout=20), []
        for _ in range(20):
            idle += [Client(run.address) for _ in range(100)]
            first.send({"heartbeat": 1})
            run.wait(0.5)
        assert len(run.server._selector.get_map()) < 100
        begin(run, first)
        run.wait(6.0)
        assert len(run.server._selector.get_map()) == 4  # the listener and the three
        for client in idle:
            assert client.ends()
            client.sock.close()
        assert run.server.lost is None


def test_connections_come_one_after_another(run):
    first = run.member(0)
    floods = []
    for _ in range(3):
        floods += [Client(run.address) for _ in range(100)]
        run.turn()
    assert sum(is_readable(client.sock, 0) for client in floods) == 256 - 1 - 64  # closed, as those before them
    late = Client(run.address)
    late.send({**HELLO, "rank": 1})
    run.wait(0.5)
    assert late.read() == []
    run.wait(0.5)
    assert late.read() == [{"welcome": 1}]
    for client in [*floods, late]:
        client.sock.close()
    assert first.read() == [{"welcome": 1}]


def test_before_its_proof_a_connection_sends_little(run):
    client = run.connect(b'{"hello": 1, "job": "' + b"x" * 8192)
    assert client.ends()
    assert not run.server.peers
    members = run.all_members()
    members[1].send(b'{"hint": "' + b"\\u00e9" * 4000 + b'"}\n')
    run.turn()
    assert run.server.hint == "\u00e9" * 4000


def test_without_descriptors_the_server_does_not_spin(run):
    first, second, third = run.member(0), run.member(1), socket.socket()
    with descriptors(hostile.next_descriptor(third)), third:
        third.connect(run.address)
        assert run.turn(most=20) < 20  # one try, then a pause
        first.send({"hint": "runs/step_1"})
        run.wait(1.0)
        assert second.read()[-1] == {"hint": "runs/step_1"}
        with descriptors(1024):
            third.send(raw())
            run.wait(1.0)
            assert sorted(run.server.peers) == [0, 1, 2]
            assert first.read()[-1]["go"] == 1
    run.turn()


@pytest.mark.slow
def test_a_flood_of_messages_is_read_in_portions(run):
    members = run.all_members()
    members[2].floods = True
    for _ in range(200):
        members[2].send(b'{"heartbeat": 1}\n' * 4000)
    assert run.turn() < 10
    members[0].send({"hint": "runs/step_2"})
    run.turn()
    run.wait(1.0)
    assert members[1].read() == [{"hint": "runs/step_2"}]
    time.sleep(1.05)  # the next portion
    assert 0 < run.turn() < 10
    assert run.server.lost is None


def test_a_peer_that_does_not_read_gets_whole_messages_or_none(run):
    members = run.all_members()
    members[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection = run.server.peers[0].connection
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for i in range(2000):
        connection.send(hint=f"{i:04d}" + "x" * 4000)
    assert not connection.is_closed
    numbers = []
    for _ in range(200):
        numbers += [int(m["hint"][:4]) for m in members[0].read()]  # every line is whole
        connection.send(heartbeat=1)
    assert numbers == sorted(set(numbers))
    assert 0 < len(numbers) < 2000


# The launcher, and the server in a thread


@pytest.mark.slow
def test_what_a_process_says_is_printable_where_others_repeat_it(tmp_path):
    source = """
    client.send_resume_hint("runs/\\x1b[2Jstep_5\\udc80")
    if start == 0:
        if rank == 1:
            raise ValueError("\\x1b]0;owned\\x07 \\u202e")
        time.sleep(20)
    """
    done = launch("-n", "2", "--max-restarts", "1", *write(tmp_path, HEAD, MEMBER, source))
    own = [line for line in done.stderr.splitlines() if not line.startswith("[1] ")]
    assert all(line.isprintable() for line in own)
    assert r"jaxpar launch: restart 1 of 1 with 2 processes, from runs/\x1b[2Jstep_5\udc80" in own
    (survivor,) = [line for line in own if line.startswith("[0] ")]
    assert r"was lost: ValueError: \x1b]0;owned\x07 \u202e. Process 0 of 2 ends" in survivor


def test_the_launcher_ends_a_process_that_sends_an_invalid_message(tmp_path):
    source = """
    client._connection.send = None  # this thread sends from now on
    client._connection.sock.sendall(b"{}\\n")
    os.kill(os.getpid(), signal.SIGSTOP)
    """
    done = launch("-n", "1", *write(tmp_path, HEAD, MEMBER, source), expect=(137, 143))
    assert "failed: it sent an invalid message: a message is one of: hello, answer, heartbeat" in done.stderr


def test_the_server_of_process_0_outlives_an_attack():
    before = hostile.open_descriptors()
    address, server = serving(2, join_timeout=10)
    server.thread.start()
    for data in (DEEP, *HELLOS.values()):
        with contextlib.closing(Client(address).sock) as sock:
            sock.sendall(data)
    clients = [new_client(rank, 2) for rank in range(2)]
    joining = threading.Thread(target=clients[1].join_run, args=([address], 5.0, "absent"))
    joining.start()
    clients[0].join_run([address], 5.0, "absent")
    joining.join(LIMIT)
    with contextlib.closing(Client(address).sock) as sock:
        sock.sendall(DEEP)
    clients[1].send_resume_hint("runs/step_4")
    until(lambda: clients[0].hint is not None, 30)
    assert clients[0].hint == "runs/step_4"
    for client in clients:
        assert client.thread.is_alive()
        client.leave()
    for thread in (server.thread, *(client.thread for client in clients)):  # each closes its own sockets
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert hostile.open_descriptors() <= before


# The client, and a server that is broken


class Ended(Exception):
    pass


@pytest.fixture
def last_line(monkeypatch):
    """A function that runs a client against the bytes of a server. It returns the last line of the process, or None."""
    lines = []
    monkeypatch.setattr(client_module, "say_before_exit", lines.append)
    monkeypatch.setattr(client_module.os, "_exit", lambda status: (_ for _ in ()).throw(Ended(status)))

    def run(data, go=b'{"go": 1, "host": "h"}\n'):
        lines.clear()
        client = new_client(1, 3)
        client.thread.start = lambda: None
        with liar([b'{"welcome": 1}\n' + go + data]) as address:
            client.join_run([address], 5.0, "absent")
            with contextlib.suppress(Ended):
                client._run()
        return lines[0] if lines else None

    return run


@cases(SERVERS)
def test_an_invalid_message_of_a_server_ends_the_process_with_one_clear_line(last_line, data):
    line = last_line(data)
    assert line.startswith("jaxpar: process 0 (host h) was lost: it sent an invalid message: ")
    assert line.endswith("Process 1 of 3 ends with status 75; no checkpoint is known to resume from")
    assert line.isprintable()
    with pytest.raises(ConnectionError, match=r"sent an invalid message|was closed before|absent"):
        last_line(data, go=b"")  # before the run begins it is an error of the start


@pytest.mark.slow
def test_a_flood_from_the_server_leaves_the_processor_free():
    near, far = socket.socketpair()
    client = new_client(1, 3)
    with near:
        client._connection = JsonConnection(far, FROM_SERVER)
        client.thread.start()
        near.settimeout(0.2)
        used, end, sent = time.process_time(), time.monotonic() + 1.5, 0
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                sent += near.send(b'{"heartbeat": 1}\n' * 3000)
        used = time.process_time() - used
        near.settimeout(None)
        client._is_leaving = True
    client.leave()
    assert used < 0.75
    assert sent < 5_000_000


def test_the_last_words_are_read_though_the_connection_is_closed():
    near, far = socket.socketpair()
    connection = JsonConnection(far, FROM_SERVER)
    near.sendall(b'{"refused": "no"}\n')
    near.close()
    connection.send(heartbeat=1)
    assert connection.is_closed
    assert connection.next_message(1.0) == {"refused": "no"}
    assert connection.next_message(1.0) == {}
    connection.close()


def test_a_connection_may_have_a_high_descriptor():
    near, far = socket.socketpair()
    with descriptors(1200), near, far, socket.socket(fileno=fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, 1100)) as high:
        connection = JsonConnection(high, FROM_SERVER)
        near.sendall(b'{"heartbeat": 1}\n')
        connection.wait(5.0)
        assert connection.receive() == [{"heartbeat": 1}]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300, -1.0])
@pytest.mark.parametrize("name", ["initialization_timeout", "heartbeat_timeout"])
def test_a_timeout_that_no_server_takes_is_refused_at_once(name, seconds):
    with pytest.raises(ValueError, match=r"initialization_timeout must be above 0 .*; both at most 604800, a week"):
        distributed.initialize("127.0.0.1:1", 2, 0, **{name: seconds})


# Any bytes, any JSON, any mutation

KNOWN = {"welcome", "go", "hint", "lost", "refused", "closing", "interrupted"}


def check_any_bytes(data, is_member, is_early):
    """A bad peer sends these bytes. The healthy processes receive only true messages, and the server goes on."""
    with pytest.MonkeyPatch.context() as patch, Run(patch) as run:
        healthy = [run.member(rank) for rank in (0, 1)]
        third = None if is_early else run.member(2)
        bad = third if third and is_member else run.connect(*([HELLO] if is_member else []))
        bad.send(*data)
        run.turn()
        run.wait(1.0)
        bad.shut()
        run.turn()
        messages = [client.read() for client in healthy]
        assert [m for m in messages[0] if "closing" not in m] == [m for m in messages[1] if "closing" not in m]
        for message in messages[0]:
            assert len(set(message) & KNOWN) == 1
            assert all(value.isprintable() for value in message.values() if isinstance(value, str))
            assert message.get("lost", 2) == 2
            claims = is_member or JOB.encode() in b"".join(data)
            assert claims or not {"lost", "refused", "hint", "closing"} & set(message)
        healthy[0].send({"hint": "the last"})
        run.turn()
        run.wait(1.0)
        assert healthy[1].read()[-1] == {"hint": "the last"}
        assert not any(client.ended for client in healthy)
        assert set(run.server.peers) - {2} == {0, 1}


quick = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
any_bytes = given(data=lines, is_member=st.booleans(), is_early=st.booleans())


@pytest.mark.parametrize("number", world.mostly_slow([60, 2000, 20_000], 60, most=2))
def test_any_bytes_drop_at_most_their_sender(number):
    settings(quick, max_examples=number, derandomize=number == 60)(any_bytes(check_any_bytes))()


@settings(quick, max_examples=50)
@given(data=lines)
def test_any_bytes_of_a_server_end_the_process_with_one_printable_line(last_line, data):
    line = last_line(b"".join(data))
    if line is None:  # the server announced its end
        assert b"closing" in b"".join(data)
    else:
        assert line.isprintable()
        assert "ends with status 75" in line


def test_a_thread_that_fails_says_so_and_what_follows(capfd, monkeypatch):
    ends = []
    monkeypatch.setattr(client_module.os, "_exit", ends.append)
    (_, server), client = serving(), new_client()
    client._connection = types.SimpleNamespace(wait=None, close=lambda: None)  # a name that became something else
    client.thread.start()
    client.thread.join(LIMIT)
    assert ends == [LOST]
    why = "TypeError: 'NoneType' object is not callable"
    said = capfd.readouterr().err
    assert f"{why}; no loss would be noticed, so process 0 of 1 ends with status 75" in said
    server.check = None
    server.thread.start()
    server.thread.join(LIMIT)
    assert f"the thread jaxpar-heartbeat-server failed: {why}; the run ends" in capfd.readouterr().err
    with pytest.raises(OSError, match="Bad file descriptor"):  # closed, so that the processes notice
        server._listener.getsockname()


def test_an_invalid_message_in_an_elastic_run_ends_its_process_only(monkeypatch):
    left = []
    with Run(monkeypatch, on_leave=lambda rank, why: left.append((rank, why))) as run:
        first, second, third = run.all_members()
        second.send(b"{}\n")
        run.turn()
        assert second.ends()
        assert first.read() == [{"left": 1}]
        assert (third.read(), third.ended, run.server.lost) == ([], False, None)
        ((rank, why),) = left
        assert rank == 1
        assert why.startswith("it sent an invalid message: a message is one of: ")
        again = run.member(1)
        first.send({"released": 1})
        run.turn()
        assert [next(iter(message)) for message in again.read()] == ["welcome", "go"]


def test_another_process_comes_in_the_place_of_a_lost_one_once_process_0_has_let_it_go(monkeypatch):
    """One that dies before all have joined may die again later: jax ran in none, so process 0 had nothing to let go."""
    left = []
    with Run(monkeypatch, on_leave=lambda *lost: left.append(lost), launched=True) as run:
        first, early = run.member(0), run.member(1)
        early.shut()
        run.turn()
        run.server.forget(1)  # its exit status says so too
        second, _ = run.member(1), run.member(2)
        assert [next(iter(message)) for message in first.read()] == ["welcome", "go"]
        first.send({"hint": "runs/step_3"})
        second.shut()
        run.turn()
        assert first.read() == [{"left": 1}]
        run.server.forget(1)
        again = run.member(1)
        assert (first.read(), again.read()) == ([{"left": 1}], [{"welcome": 1}])
        for member in (first, again):  # only process 0 lets go, and of both
            member.send({"released": 1})
            run.turn()
            assert again.read() == []
        first.send({"released": 1})
        run.turn()
        assert [next(iter(message)) for message in again.read()] == ["go", "hint"]
    assert left == []
