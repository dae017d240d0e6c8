"""The proxy for jax's coordination service: each connection is independent, and a dead service stays hidden."""

import contextlib
import socket
import time

import pytest
from hostile import descriptors, next_descriptor, open_descriptors
from launched import until

from jaxpar._heartbeat.client import ServiceProxy


class Proxied:
    """A proxy, its service, and a connection through it that was served once."""

    def __init__(self, stack):
        self.stack = stack
        self.service = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.service.settimeout(5)
        self.target = self.service.getsockname()
        self.proxy = ServiceProxy(f"127.0.0.1:{self.target[1]}")
        self.good = self.pair()

    def connect(self, data=b"", sock=None):
        """A connection to the proxy. `sock` is used where no new descriptor may be taken."""
        sock = sock or self.stack.enter_context(socket.socket())
        sock.settimeout(5)
        host, port = self.proxy.address.rsplit(":", 1)
        sock.connect((host, int(port)))
        sock.sendall(data)
        return sock

    def accept(self, data, service=None):
        """The end of a connection at the service, after these bytes have arrived."""
        sock = self.stack.enter_context((service or self.service).accept()[0])
        sock.settimeout(5)
        assert sock.recv(len(data)) == data
        return sock

    def pair(self):
        return self.connect(b"ping"), self.accept(b"ping")

    def is_served(self, pair=None):
        near, far = pair or self.good
        near.sendall(b"a")
        far.sendall(b"b")
        return (far.recv(1), near.recv(1)) == (b"a", b"b")


@pytest.fixture
def proxied():
    with contextlib.ExitStack() as stack:
        yield Proxied(stack)


def test_a_peer_that_does_not_read_stops_only_its_own_pair(proxied):
    bad, _ = proxied.pair()
    bad.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:  # until the proxy, which waits for the service, takes no more
            bad.send(b"x" * 65536)
    assert proxied.is_served()


def test_a_service_that_cannot_be_reached_delays_no_other(proxied):
    proxied.service.close()
    proxied.connect(b"x").close()
    proxied.connect(b"early")
    time.sleep(0.2)
    assert proxied.is_served()
    with socket.create_server(proxied.target) as again:  # a process 0 that starts later
        again.settimeout(5)
        proxied.accept(b"early", again)


def test_idle_connections_do_not_keep_the_client_out(proxied):
    before = open_descriptors()
    for _ in range(200):
        proxied.connect()
    late = proxied.pair()
    assert proxied.is_served()
    assert proxied.is_served(late)
    assert open_descriptors() < before + 200 + 60


def test_a_client_that_ends_closes_both_sockets(proxied):
    before = open_descriptors()
    for _ in range(5):
        near, far = proxied.pair()
        near.close()
        assert far.recv(1) == b""
        far.close()
    until(lambda: open_descriptors() <= before, 5)
    assert proxied.is_served()


def test_a_service_that_dies_is_hidden_from_its_client(proxied):
    near, far = proxied.good
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


@pytest.mark.slow
def test_without_descriptors_the_proxy_goes_on(proxied):
    sock = proxied.stack.enter_context(socket.socket())
    with descriptors(next_descriptor(sock)):
        proxied.connect(b"ping", sock)
        time.sleep(0.2)
        proxied.good[0].sendall(b"a")
        assert proxied.good[1].recv(1) == b"a"
    proxied.accept(b"ping")
    assert proxied.proxy.thread.is_alive()
