"""The secret of a run: who knows it takes part, who does not is dropped, and neither end trusts the other before."""

import itertools
import json
import os
import re
import time

import pytest
from hostile import HELLO, JOB, Run, liar, lines, new_client, serving
from hypothesis import HealthCheck, given, settings

from jaxpar._heartbeat import client as client_module
from jaxpar._heartbeat.server import Secret, find_secret

KEY = Secret(b"0123456789abcdef", "a test")
OTHER = Secret(b"fedcba9876543210", "another test")
LIMIT = 20.0


@pytest.fixture
def run(monkeypatch):
    with Run(monkeypatch, secret=KEY) as run:
        yield run


def answer(run, connection, secret, **changes):
    """The proof of a process that knows `secret`, and says in its proof that it is another where `changes` say so."""
    (message,) = connection.read()
    about = {"job": JOB, "rank": 2, "size": 3, **changes}
    connection.send({"answer": "mine", "proof": secret.proof("process", (message["challenge"], "mine"), **about)})
    run.turn()
    return message["challenge"]


def test_both_ends_prove_that_they_know_the_secret(run):
    connection = run.connect(HELLO)
    assert not run.server.peers  # a hello alone is no process
    challenge = answer(run, connection, KEY)
    proof = KEY.proof("server", (challenge, "mine"), JOB, 2, 3)
    assert connection.read() == [{"proof": proof}, {"welcome": 1}]
    assert set(run.server.peers) == {2}


@pytest.mark.parametrize(
    ("secret", "changes"), [(OTHER, {}), (KEY, {"rank": 1}), (KEY, {"size": 2}), (KEY, {"job": "b"})]
)
def test_a_wrong_proof_is_dropped_and_ends_nothing(run, secret, changes):
    connection = run.connect(HELLO)
    answer(run, connection, secret, **changes)
    assert connection.ends()
    assert not run.server.peers
    assert run.server.lost is None
    good = run.connect(HELLO)
    answer(run, good, KEY)
    assert set(run.server.peers) == {2}


def test_a_proof_is_of_no_use_on_another_connection(run):
    first, second = run.connect(HELLO), run.connect(HELLO)
    (message,) = first.read()
    second.read()
    proof = KEY.proof("process", (message["challenge"], "mine"), JOB, 2, 3)
    second.send({"answer": "mine", "proof": proof})
    run.turn()
    assert second.ends()
    assert not run.server.peers


@pytest.mark.parametrize(
    "message",
    [
        {"heartbeat": 1},
        {"failed": "x"},
        {"hint": "/etc"},
        {"leaving": 1},
        HELLO,
        {"answer": "a", "proof": "b", "rank": 0},
        {"answer": 3, "proof": "b"},
        {"answer": "a" * 65, "proof": "b"},
    ],
    ids=lambda message: "-".join(message)[:20],
)
def test_what_a_process_sends_before_its_proof_changes_nothing(run, message):
    connection = run.connect(HELLO, message)
    assert connection.ends()
    assert (run.server.peers, run.server.lost, run.server.hint) == ({}, None, None)


def test_an_answer_comes_once_and_only_after_a_challenge(run, monkeypatch):
    early = run.connect({"answer": "a", "proof": "b"})
    assert early.ends()
    connection = run.connect(HELLO)
    answer(run, connection, KEY)
    connection.send({"answer": "a", "proof": "b"})
    run.turn()
    assert connection.ends()
    with Run(monkeypatch) as without:  # a server without a secret
        assert without.connect({"answer": "a", "proof": "b"}).ends()


def test_a_hello_without_an_answer_is_dropped_in_time(run):
    connection = run.connect(HELLO)
    run.wait(6.0)
    assert connection.ends()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("server", "client", "text"),
    [
        (KEY, OTHER, "the server has another secret than the one in another test"),
        (KEY, None, "the server asks for the secret of the run, and this process has none; set JAXPAR_SECRET, or "),
        (None, KEY, "the server has no secret, and this process has one, in a test"),
    ],
    ids=["another", "none here", "none there"],
)
def test_a_client_says_what_is_wrong_with_the_secret(monkeypatch, server, client, text):
    monkeypatch.setattr(client_module, "_MISTRUST_TIMEOUT", 0.3)
    address, running = serving(secret=server)
    running.thread.start()
    with pytest.raises(ConnectionError, match=re.escape(text)):
        new_client(secret=client).join_run([address], 60.0, "absent")
    assert running.lost is None
    if server is not None:  # the right process still joins, and the server ends with it
        good = new_client(secret=server)
        good.join_run([address], 5.0, "absent")
        good.leave()
    running.thread.join(LIMIT)
    assert not running.thread.is_alive()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "says",
    [
        [{"welcome": 1}, {"go": 1, "host": "evil"}],
        [{"heartbeat": 1}, {"welcome": 1}, {"go": 1, "host": "evil"}],
        [{"challenge": "x"}, {"welcome": 1}, {"go": 1, "host": "evil"}],
        [{"challenge": "x"}, {"proof": "y"}, {"welcome": 1}, {"go": 1, "host": "evil"}],
        [{"lost": 1, "host": "evil", "why": "nothing"}],
        [{"refused": "no"}],
    ],
    ids=lambda says: "-".join(next(iter(message)) for message in says),
)
@pytest.mark.parametrize("pause", [0.02, 0], ids=["one by one", "at once"])
def test_a_client_obeys_no_server_that_does_not_know_the_secret(monkeypatch, says, pause):
    monkeypatch.setattr(client_module, "_WELCOME_TIMEOUT", 0.3)
    monkeypatch.setattr(client_module, "_MISTRUST_TIMEOUT", 0.3)
    lines = [json.dumps(message).encode() + b"\n" for message in says]
    answer = lines if pause else [b"".join(lines)]
    with liar(answer, pause) as address, pytest.raises(ConnectionError, match=r"secret|absent"):
        new_client(secret=KEY).join_run([address], 1.0, "absent")


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=lines)
def test_any_bytes_of_a_server_make_no_client_believe_it(data):
    client = new_client(secret=KEY)
    with liar([b"".join(data)]) as address:
        assert client._connect([address], 1.0) is None
    assert client._mistrust.isprintable()
    assert client.hint is None


@pytest.mark.parametrize("data", [b"x", b'{"heartbeat": 1}\n' * 1000], ids=["drips", "floods"])
def test_a_server_that_never_ends_its_answer_costs_a_client_little(monkeypatch, data):
    monkeypatch.setattr(client_module, "_WELCOME_TIMEOUT", 0.3)
    began = time.monotonic()
    with liar(itertools.repeat(data), 0.02) as address:
        assert new_client(secret=KEY)._connect([address], 1.0) is None
    assert time.monotonic() - began < 20


def test_the_secret_is_found(tmp_path):
    file = tmp_path / "jaxpar" / "secret"
    file.parent.mkdir()
    file.write_bytes(b"from the default file\n")
    file.chmod(0o600)
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert find_secret({"HOME": str(tmp_path)}) is None
    assert find_secret(home).key == b"from the default file"
    named = tmp_path / "named"
    named.write_bytes(b"from the file with a name")
    named.chmod(0o400)
    assert find_secret({**home, "JAXPAR_SECRET_FILE": str(named)}).key == b"from the file with a name"
    found = find_secret({**home, "JAXPAR_SECRET_FILE": str(named), "JAXPAR_SECRET": "from the variable"})
    assert (found.key, found.source) == (b"from the variable", "the variable JAXPAR_SECRET")
    assert "variable'" not in repr(found).replace("JAXPAR", "")
    assert b"from" not in repr(found).encode()


def made(tmp_path, what):
    path = tmp_path / "secret"
    if what == "folder":
        path.mkdir(mode=0o700)
    elif what == "pipe":
        os.mkfifo(path, 0o600)
    elif what != "nothing":
        path.write_bytes({"short": b"x" * 15, "long": b"x" * 5000, "blank": b" \n" * 20}.get(what, b"x" * 32))
        path.chmod(int(what, 8) if what.isdigit() else 0o600)
    return str(path)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nothing", "cannot be read: No such file"),
        ("folder", r"not a regular file|Is a directory"),
        ("pipe", "not a regular file"),
        ("640", "readable by you only"),
        ("604", "readable by you only"),
        ("short", "must have 16 to 4096 bytes"),
        ("long", "must have 16 to 4096 bytes"),
        ("blank", "must have 16 to 4096 bytes"),
    ],
)
def test_a_file_that_cannot_hold_a_secret_is_refused(tmp_path, what, text):
    with pytest.raises(RuntimeError, match=text) as error:
        find_secret({"JAXPAR_SECRET_FILE": made(tmp_path, what)})
    assert "x" * 15 not in str(error.value)
