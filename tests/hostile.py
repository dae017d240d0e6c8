"""A hub on loopback that the test drives turn by turn, and plain sockets that talk to it."""

import array
import contextlib
import fcntl
import json
import select
import selectors
import socket
import termios
import time
import types

from jaxpar._heartbeat import server

JOB = "a-job"
HELLO = {"hello": 1, "job": JOB, "rank": 2, "size": 3, "host": "there", "patience": 5.0}


def on_the_way(sock):
    """How many bytes the other end of a socket has not got yet; on a busy machine even loopback takes its time."""
    number, poll = array.array("i", [0]), select.poll()
    try:
        poll.register(sock, select.POLLRDHUP)
        if not poll.poll(0):  # else nobody reads there any more
            fcntl.ioctl(sock, termios.TIOCOUTQ, number)
    except (OSError, ValueError):  # it is closed at this end
        return 0
    return number[0]


def is_readable(sock, seconds=5.0):
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


class Client:
    """A socket of a peer, good or bad."""

    def __init__(self, address):
        self.sock = socket.create_connection(address)
        self.sock.setblocking(False)
        self._rest = b""
        self.ended = self.floods = False

    def send(self, *messages):
        """Bytes go as they are, anything else as a line of JSON."""
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
        return [message for message in map(json.loads, lines) if "beat" not in message]

    def ends(self):
        """Whether the hub closes the connection; messages on the way are passed over."""
        end = time.monotonic() + 5
        while not self.ended and time.monotonic() < end:
            self.read()
            is_readable(self.sock, 0.1)
        return self.ended

    def hang_up(self):
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Run:
    """A hub for `size` processes, with a clock that moves only when `wait` is called."""

    def __init__(self, monkeypatch, size=3, **options):
        self.clock = types.SimpleNamespace(now=0.0, tick=lambda: self.clock.now)
        monkeypatch.setattr(server, "AwakeClock", lambda: self.clock)
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.size = size
        self.hub = server.HeartbeatServer(self.selector, self.listener, job=JOB, size=size, **options)
        self.clients = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for client in self.clients:
            client.sock.close()
        self.hub.close()
        self.selector.close()

    def connect(self, *messages):
        client = Client(self.address)
        self.clients.append(client)
        assert is_readable(self.listener)
        client.send(*messages)
        self.turn()
        return client

    def member(self, rank, **changes):
        """A healthy process that has said hello."""
        return self.connect({**HELLO, "rank": rank, "size": self.size, **changes})

    def turn(self, most=10_000):
        """The hub works until nothing is left to do; how many turns that took."""
        turns, idle, end = 0, 0, time.monotonic() + 20
        while idle < 2:
            assert time.monotonic() < end, "the hub never reads what was sent"
            ready = self.selector.select(0)
            for key, _ in ready:
                key.data()
            self.hub.look()
            turns += bool(ready)
            idle = 0 if ready or self._is_busy() else idle + 1
            assert turns < most, "the hub never comes to rest"
        return turns

    def _is_busy(self):
        """Whether something is on its way; then it is given a moment."""
        socks = [c.sock for c in self.clients if not c.floods]
        socks += [peer.line.sock for peer in [*self.hub.peers.values(), *self.hub._new]]
        busy = any(map(on_the_way, socks))
        for sock in socks if busy else ():
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # says at once what it has got
        return busy

    def wait(self, seconds):
        self.clock.now += seconds
        self.turn()

    def together(self):
        """All are there; what they were sent on the way is read."""
        members = [self.member(rank) for rank in range(self.size)]
        for member in members:
            assert [set(m) for m in member.read()][-1] == {"go", "host"}
        return members
