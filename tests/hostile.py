"""A heartbeat server on loopback that the test drives turn by turn, and plain sockets that talk to it."""

import array
import contextlib
import fcntl
import json
import os
import resource
import select
import socket
import termios
import threading
import time
import types

import pytest
from hypothesis import strategies as st

from jaxpar._heartbeat import server
from jaxpar._heartbeat.client import HeartbeatClient

JOB = "a-job"
HELLO = {"hello": 1, "job": JOB, "rank": 2, "size": 3, "host": "there", "timeout": 5.0}


@contextlib.contextmanager
def descriptors(limit):
    """At most `limit` descriptors for this process, or at least that many where it has fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < limit:
        pytest.skip(f"this machine allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def next_descriptor(sock):
    """The smallest free descriptor."""
    free = os.dup(sock.fileno())
    os.close(free)
    return free


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def unsent(sock):
    """How many bytes the other end of a socket has not got yet. On a busy machine even loopback takes its time."""
    number, poll = array.array("i", [0]), select.poll()
    try:
        poll.register(sock, select.POLLRDHUP)
        if not poll.poll(0):  # else the other end does not read any more
            fcntl.ioctl(sock, termios.TIOCOUTQ, number)
    except (OSError, ValueError):  # it is closed at this end
        return 0
    return number[0]


def is_readable(sock, seconds=5.0):
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def serving(size=1, *, job=JOB, join_timeout=5, **options):
    """The address of a server, which begins to work when its thread is started, and the server."""
    listener = socket.create_server(("127.0.0.1", 0))
    options |= {"heartbeat_timeout": 5, "join_timeout": join_timeout}
    return listener.getsockname(), server.HeartbeatServer(listener, job=job, size=size, **options)


def new_client(rank=0, size=1, *, job=JOB, **options):
    return HeartbeatClient(rank, size, job=job, heartbeat_timeout=5, launched=False, **options)


@contextlib.contextmanager
def liar(answer, pause=0):
    """A server that gives each connection these bytes, one after the other, and then listens."""

    def accept():
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    for part in answer:
                        sock.sendall(part)
                        time.sleep(pause)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1000):
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20.0)


class Client:
    """A socket of a peer, good or bad."""

    def __init__(self, address):
        self.sock = socket.create_connection(address)
        self.sock.setblocking(False)
        self._rest = b""
        self.ended = self.floods = False

    def send(self, *messages):
        """Send bytes as they are, anything else as a line of JSON."""
        for message in messages:
            data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
            with contextlib.suppress(OSError):
                self.sock.send(data)

    def read(self):
        """The messages that have arrived, without heartbeats."""
        try:
            while chunk := self.sock.recv(1 << 16):
                self._rest += chunk
            self.ended = True
        except BlockingIOError:
            pass
        except ConnectionError:
            self.ended = True
        *lines, self._rest = self._rest.split(b"\n")
        return [message for message in map(json.loads, lines) if "heartbeat" not in message]

    def ends(self):
        """Whether the server closes the connection. Earlier messages are skipped."""
        end = time.monotonic() + 30
        while not self.ended and time.monotonic() < end:
            self.read()
            is_readable(self.sock, 0.1)
        return self.ended

    def shut(self, direction=socket.SHUT_RDWR):
        with contextlib.suppress(OSError):
            self.sock.shutdown(direction)


class Run:
    """A server for `size` processes, with a clock that moves only when `wait` is called."""

    def __init__(self, monkeypatch, size=3, **options):
        self.clock = types.SimpleNamespace(now=0.0, tick=lambda: self.clock.now)
        monkeypatch.setattr(server, "AwakeClock", lambda: self.clock)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.size = size
        options = {"heartbeat_timeout": 10, **options}
        self.server = server.HeartbeatServer(self.listener, job=JOB, size=size, **options)
        self.clients = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for client in self.clients:
            client.sock.close()
        self.server.close()

    def connect(self, *messages):
        client = Client(self.address)
        self.clients.append(client)
        assert is_readable(self.listener)
        client.send(*messages)
        self.turn()
        return client

    def member(self, rank, **changes):
        """A healthy process that has sent its hello."""
        return self.connect({**HELLO, "rank": rank, "size": self.size, **changes})

    def turn(self, most=10_000):
        """Let the server work until nothing is left to do, and return the number of turns."""
        turns, idle, end = 0, 0, time.monotonic() + 20
        while idle < 2:
            assert time.monotonic() < end, "the server never reads what was sent"
            ready = self.server._selector.select(0)
            for key, _ in ready:
                key.data()
            self.server.check()
            turns += bool(ready)
            idle = 0 if ready or self._is_busy() else idle + 1
            assert turns < most, "the server never comes to rest"
        return turns

    def _is_busy(self):
        """Whether something is unsent."""
        socks = [c.sock for c in self.clients if not c.floods]
        socks += [peer.connection.sock for peer in [*self.server.peers.values(), *self.server._pending]]
        is_busy = any(map(unsent, socks))
        for sock in socks if is_busy else ():
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # acknowledges at once
        return is_busy

    def wait(self, seconds):
        self.clock.now += seconds
        self.turn()

    def all_members(self):
        """All processes of the run, after it has begun."""
        members = [self.member(rank) for rank in range(self.size)]
        for member in members:
            assert [set(m) for m in member.read()][-1] == {"go", "host"}
        return members


# Any bytes, any JSON, any mutation

VALID = [
    HELLO,
    *({name: 1} for name in ("heartbeat", "leaving", "welcome", "other_run", "closing")),
    *({"hint": "runs/step_1"}, {"hint": None}, {"refused": "w"}),
    *({"failed": "ValueError: x"}, {"interrupted": "KeyboardInterrupt"}),
    *({"lost": 1, "host": "h", "why": "w"}, {"go": 1, "host": "h"}),
    *({"challenge": "c"}, {"answer": "a", "proof": "p"}, {"proof": "p"}),
]
NAMES = sorted({name for message in VALID for name in message})
special = st.sampled_from([JOB, "\x1b[2J", "\x00", "\ud800", "x" * 70_000, 10**400, 2**63])
scalars = st.none() | st.booleans() | st.integers() | st.integers(-2, 4) | st.floats() | st.text(max_size=20) | special
keys = st.sampled_from(NAMES) | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
)


@st.composite
def mutations(draw):
    """A valid message with up to two fields changed, removed or added."""
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


line = st.binary(max_size=200) | values.map(as_line) | mutations().map(as_line)
lines = st.lists(line, min_size=1, max_size=4)
