"""Training that goes on when processes are lost, and takes them back. The end has the bits of a run without a loss."""

import atexit
import collections
import contextlib
import functools
import inspect
import json
import re
import socket
import struct
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import on_host
from launched import python
from world import mostly_slow

from jaxpar import data, distributed, kv, train
from jaxpar._devices import processes
from jaxpar.distributed import _elastic, _gloo
from jaxpar.distributed._elastic import Board
from jaxpar.train._callbacks.callbacks import Callbacks
from jaxpar.train._callbacks.history import History
from jaxpar.train._elastic.group import Group, _by_rank, _is_terms
from jaxpar.train._elastic.member import Member, Watchdog, check_can_go_on
from jaxpar.train._elastic.program import differences, digest
from jaxpar.train._fit.interrupt import Interrupts
from jaxpar.train._fit.run import FitOptions, Run


@pytest.fixture
def elastic(monkeypatch):
    """As in an elastic run."""
    monkeypatch.setattr(processes.elastic_run, "is_on", True)


def loss_fn(params, batch, rng):
    return (params["w"] * batch["x"]).mean(), {}


def new_state(**options):
    return train.create_state(kv.from_params({"w": jnp.ones(())}, optimizer=optax.sgd(0.1), **options), 0)


def test_what_is_sent_arrives_to_the_last_bit():
    tree = [jnp.asarray([-0.0, np.nan, 1.5]), jnp.int8(-7), jnp.ones(3, "bfloat16"), jax.random.key(3)]
    got = processes.plan_send(tree, tuple(jax.devices()[:3]))()
    assert [x.tobytes() for x in on_host(got)] == [x.tobytes() for x in on_host(tree)]
    assert [x.dtype for x in got] == [x.dtype for x in tree]


def test_a_group_never_has_an_order_twice(monkeypatch):
    devices = [types.SimpleNamespace(id=i, process_index=i) for i in range(3)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    group = Group()
    group.starts = {0: 1, 1: 1, 2: 1}
    orders = [group._next_order() for _ in range(7)]
    assert orders[-1] is None
    assert sorted(map(tuple, orders[:6])) == sorted({tuple(order) for order in orders[:6]})
    group.starts = {0: 1, 2: 1}
    assert group._next_order() == (0, 2)
    group.starts = {0: 1}  # no Gloo
    assert group._next_order() == group._next_order() == [0]


def test_orders_that_are_used_up_end_the_process_in_words(monkeypatch, capfd):
    group = Group()
    monkeypatch.setattr(group, "_next_order", lambda: None)
    monkeypatch.setattr(group, "_in_all", lambda name, work: (work(),))
    monkeypatch.setattr(group._board, "set", lambda name, value: None)
    with pytest.raises(SystemExit) as ended:
        group._try_to_agree(dict, tuple, print)
    assert ended.value.code == distributed.LOST
    assert re.search(r"each order of 0 devices once.*--devices 2", capfd.readouterr().err)


class Service:
    """jax's coordination service, as one process sees it."""

    def __init__(self, own):
        self.own, self.keys, self.barriers, self.in_barrier = own, {}, [], lambda: None

    def key_value_set(self, key, text, allow_overwrite=False):
        self.keys[key] = text

    def key_value_try_get(self, key):
        if key not in self.keys:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.keys[key]

    def key_value_dir_get(self, key):
        return [(name, text) for name, text in self.keys.items() if name.startswith(key)]

    def get_live_nodes(self, ranks):
        self.barriers.append(ranks)
        if len(ranks) > 1:
            self.in_barrier()
        return dict.fromkeys(ranks, self.own)


def test_a_process_that_comes_back_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(_elastic, "_NOTICED", 0.01)
    service = Service(own=7)
    board = Board(service)
    board.release_others(2)  # there are no members yet
    assert service.barriers == [[2]]
    board.set("members", [4, [[0, 1], [1, 1], [2, 1]]])  # 1 is the start of the process that was lost
    service.in_barrier = lambda: board.set("members", [5, [[0, 1], [1, 1]]])
    assert board.release_others(2) == (5, {0: 1, 1: 1})
    assert service.barriers == [[2], [2], [0, 1, 2]]  # it took part in one barrier of theirs
    board.release_others(2)
    assert service.barriers[3:] == [[2]]


Node = collections.namedtuple("Node", "process_index")  # a device


class Live:
    """A `live_devices` whose barrier finds these processes lost. `starts` are those of devices that live after it."""

    class Failure(Exception):
        failed_devices = ()

    def __init__(self, starts=None, lost=()):
        self.lost, self.devices = lost, starts

    @contextlib.contextmanager
    def __call__(self, devices):
        yield
        if self.lost:
            failure = self.Failure()
            failure.failed_devices = [*map(Node, self.lost)]
            raise failure


@pytest.fixture
def live(monkeypatch):
    monkeypatch.setattr(distributed, "_live_devices", Live)
    monkeypatch.setattr(distributed, "_process_failure", lambda: Live.Failure)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    return Live


def test_a_lost_process_is_not_taken_in_again(live):
    board = Board(Service(own=1))
    group = Group(board.client)
    for rank in range(3):
        board.set(f"ready/{rank}", 1)
    group.set_members({0: 1, 1: 1, 2: 1})
    group._live = live({Node(rank): 1 for rank in (0, 1)}, lost=[2])
    assert group.run(4, lambda: "made") is None  # it counts in none
    assert (group.lost, group.starts, group.agrees) == ([2], {0: 1, 1: 1}, False)
    assert group.run(4, lambda: "made") == "made"
    assert (group.lost, group.joined, group.starts) == ([], [], {0: 1, 1: 1})
    board.set("ready/2", 2**64 - 1)  # another one in its place
    assert group.run(5, lambda: "made") == "made"
    assert (group.joined, group.starts) == ([2], {0: 1, 1: 1, 2: 2**64 - 1})


def test_nobody_joins_after_a_step_that_failed(live):
    board = Board(Service(own=1))
    group = Group(board.client)
    board.set("ready/2", 5)
    group.set_members({0: 1, 1: 1})

    def fails():
        raise jax.errors.JaxRuntimeError("Gloo gave up")

    for _ in range(7):
        assert group.run(4, fails) is None
        assert (group.lost, group.joined, group.starts) == ([], [], {0: 1, 1: 1})
    with pytest.raises(RuntimeError, match="failed 8 times, but no process was lost: process 0: Gloo gave up"):
        group.run(4, fails)


WORDS = "x [ null -1 1.5 true".split()
GARBAGE = [*WORDS, "", '{"a": 1}', "[[0]]", "[0, [[1]]]", '[0, [["a", 1]]]', "9" * 5000, "[" * 9999]


@pytest.mark.parametrize("text", GARBAGE)
def test_what_a_stranger_writes_is_dropped(monkeypatch, text):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    service = Service(own=1)
    board = Board(service)
    written = dict.fromkeys(("ready/1", "members", "b/join", "b/x"), text)
    written |= {"ready/x": "1", "ready/7": "1", "ready/2": "5"}
    service.keys |= {f"jaxpar/elastic/{name}": value for name, value in written.items()}
    assert Group(service)._ready() == {2: 5}
    assert board.members() == (0, {})
    entries = board.entries("b")
    assert not _elastic.is_starts(entries.get("join"))
    assert _by_rank(entries) == {}
    texts = iter([text, '{"order": [0], "offer": {"at": 3, "first": 0, "last": 9}}'])
    service.blocking_key_value_get = lambda name, wait: next(texts)
    monkeypatch.setattr(_elastic, "_WAIT", 1)
    assert board.wait("terms", _is_terms)["offer"]["at"] == 3


def test_a_process_that_was_left_behind_ends(monkeypatch, live):
    ends = []
    monkeypatch.setattr(_elastic.os, "_exit", ends.append)
    service = Service(own=1)
    monkeypatch.setattr(service, "get_live_nodes", lambda ranks: {})
    Board(service).own_start(0)
    assert ends == [distributed.LOST]
    members = Group(service)
    members.starts, members._live = {0: 1, 1: 1}, live({}, lost=[0])
    members.run(3, lambda: "made")
    assert ends == [distributed.LOST] * 2


class GlooStore:
    """What Gloo writes to jax's key-value store."""

    def __init__(self, keys):
        self.keys = keys

    def key_value_dir_get_bytes(self, folder):
        return [(name, text) for name, text in self.keys.items() if name.startswith(folder)]

    def key_value_set_bytes(self, name, text):
        if name in self.keys:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.keys[name] = text


def of_gloo(server, numbers):
    """What Gloo writes of a device: the name of the host, the address at which it listens, and its numbers."""
    host, port = server.getsockname()[:2]
    between = b"" if server.family == socket.AF_INET else bytes(4)
    start = server.family.to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + between
    address = (start + socket.inet_pton(server.family, host)).ljust(136, b"x")
    return b"".join(struct.pack("N", len(text)) + text for text in (b"host", address)) + struct.pack("3q", *numbers)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_connects_by_gloo_gives_up_when_a_process_is_lost(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host} here")
    with server:
        server.settimeout(10)
        store = GlooStore({"cpu:gloo/5,3,4/0": of_gloo(server, [-1, 6, 7]), "cpu:gloo/3,4,5/1": b"another group"})
        lost = []
        with _gloo.connecting(store, [5, 3, 4], lambda: bool(lost)):
            lost.append(1)
            numbers = []
            for _ in range(2):  # it waits for two others
                connection, _ = server.accept()
                with connection:
                    numbers.append(connection.recv(99))
                    assert connection.recv(99) == b""
        assert numbers == [struct.pack("q", number) for number in (6, 7)]
        # The others have no address. Gloo raises for one without a name and without an address.
        assert store.keys["cpu:gloo/5,3,4/1"] == store.keys["cpu:gloo/5,3,4/2"] == bytes(16)
        known = {(store.keys["cpu:gloo/5,3,4/0"], number) for number in numbers}
        _gloo._end_waits(store, [5, 3, 4], known)
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("text", [b"", b"x" * 7, b"\xff" * 200, bytes(16), bytes(200), struct.pack("NN", 0, 1 << 60)])
def test_what_is_no_address_of_gloo_is_passed_over(text):
    store = GlooStore({"cpu:gloo/0,1/0": text})
    _gloo._end_waits(store, [0, 1], set())
    assert store.keys == {"cpu:gloo/0,1/0": text, "cpu:gloo/0,1/1": bytes(16)}


EIGHT = {"x": np.ones(8, "float32")}


@pytest.mark.parametrize(
    ("shards", "source", "has_fitted", "error", "words"),
    [
        (None, EIGHT, False, ValueError, "virtual_shards=8"),
        (4, [EIGHT], False, ValueError, "an iterable cannot give a batch again"),
        (4, EIGHT, True, RuntimeError, "one call of fit"),
    ],
)
def test_what_cannot_go_on_is_refused(elastic, monkeypatch, shards, source, has_fitted, error, words):
    monkeypatch.setattr(processes.elastic_run, "has_fitted", has_fitted)
    state, step = new_state(), train.make_train_step(loss_fn, virtual_shards=shards)
    with pytest.raises(error, match=words):
        train.fit(state, step, source, epochs=1, batch_size=8, progress=False)
    assert float(state.params["w"]) == 1


def test_kinds_whose_shares_are_lost_are_refused(elastic):
    step = train.make_train_step(loss_fn, virtual_shards=4)
    run = types.SimpleNamespace(step=step, source=None, callbacks=Callbacks(), left_out=frozenset())
    with pytest.raises(ValueError, match=r"in kind 'sharded' .* resume from a checkpoint"):
        check_can_go_on(run, new_state(kind="sharded", devices=jax.devices()[:2]))
    check_can_go_on(run, new_state())
    run.callbacks = Callbacks(callbacks=train.EarlyStopping(restore_best=True))
    with pytest.raises(ValueError, match="an elastic run calls callbacks in process 0 only"):
        check_can_go_on(run, new_state())
    run.callbacks, run.left_out = Callbacks(), frozenset({3})
    with pytest.raises(ValueError, match="an elastic run leaves out no steps"):
        check_can_go_on(run, new_state())


def test_calls_that_need_all_processes_are_refused(elastic):
    with pytest.raises(RuntimeError, match=r"kv.barrier: .*only `train.fit` computes over all"):
        kv.barrier()
    with pytest.raises(RuntimeError, match=r"train step: in an elastic run only `train.fit` computes"):
        train.make_train_step(loss_fn)(new_state(), {"x": jnp.ones(8)})


def test_elastic_needs_the_launcher_that_goes_on(monkeypatch):
    env = {"HUB": "127.0.0.1:1", "COORDINATOR": "127.0.0.1:2", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}
    for name, value in env.items():
        monkeypatch.setenv(f"JAXPAR_{name}", value)
    monkeypatch.setattr("jaxpar.distributed._initialize.is_jax_used", lambda: False)
    with pytest.raises(RuntimeError, match="jaxpar launch --elastic"):
        distributed.initialize(elastic=True)
    monkeypatch.delattr("jax.experimental.multihost_utils.live_devices")
    with pytest.raises(RuntimeError, match=f"jax {jax.__version__} cannot continue after a loss"):
        distributed.initialize(elastic=True)


WATCHED = """
import os, signal, subprocess, sys, time
from jaxpar.train._elastic.member import Watchdog
watchdog = Watchdog()
watchdog.start()
"""


@pytest.mark.slow
def test_a_stuck_process_names_its_step_and_ends():
    source = """
with watchdog.watch("computes step 1", lambda: False):
    time.sleep(1.5)  # it only takes long
def hang():
    while True:
        pass
with watchdog.watch("loads the batch of step 8"):
    hang()
"""
    done = python("-c", WATCHED + source, expect=distributed.LOST, JAXPAR_STUCK_TIMEOUT="0.5")
    assert "process 0 is stuck: it loads the batch of step 8, for more than 0.5 seconds" in done.stderr
    assert "in hang" in done.stderr


@pytest.mark.slow  # 6 seconds
def test_a_stop_is_no_time_in_which_a_process_is_stuck():
    source = """
with watchdog.watch("computes step 1"):
    subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(5); os.kill({os.getpid()}, 18)"])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1.0)
"""
    assert python("-c", WATCHED + source, JAXPAR_STUCK_TIMEOUT="2.5").stderr == ""


def test_what_only_process_0_does_is_named_and_not_ended(capfd):
    dog = Watchdog()
    clock = dog._clock = types.SimpleNamespace(now=0.0)
    with dog.watch("evaluates after step 4", ends=False):
        clock.now = 9.0
        dog.note_progress()  # a batch is done
        clock.now = 18.0
        dog.look()
        assert capfd.readouterr().err == ""
        clock.now = 29.0
        dog.look()
        dog.look()  # once is enough
        said = capfd.readouterr().err
        assert said.count("process 0 is stuck: it evaluates after step 4, for more than 10 seconds, here:") == 1
        assert "in test_what_only_process_0_does" in said
        assert "It may be slow only, so it is not ended" in said
    clock.now = 99.0
    dog.look()
    assert capfd.readouterr().err == ""


def test_each_batch_of_an_evaluation_is_progress(monkeypatch):
    done = []
    monkeypatch.setattr(processes.elastic_run, "watchers", (lambda: done.append(1),))
    arrays = {"x": np.ones((64, 2), np.float32)}
    eval_fn = lambda params, batch: {"mean": (batch["x"] * params["w"]).mean(-1)}  # noqa: E731
    train.evaluate(new_state(), data=arrays, eval_fn=eval_fn, batch_size=2)
    assert len(done) > 5


def test_what_process_0_does_between_steps_is_watched(monkeypatch):
    member = Member.__new__(Member)
    member._watchdog = Watchdog()
    monkeypatch.setattr(member, "_steps", lambda: iter([("the state", {"loss": 1.0})]), raising=False)
    monkeypatch.setattr(member, "_is_turn", lambda: False)
    member._at, member._group = 4, types.SimpleNamespace(tell=lambda place, word: None)
    assert next(member._lead()) == ("the state", {"loss": 1.0}, None)
    steps = member._lead()
    next(steps)
    work = member._watchdog._work
    assert (work.what, work.ends) == ("is between two steps, after step 4", False)
    assert next(steps, None) is None
    assert member._watchdog._work is None


def test_a_process_that_follows_calls_no_callback_and_has_the_history(monkeypatch):
    # Its run has no callbacks at all here, so that a call of one would be an AttributeError.
    member = Member.__new__(Member)
    member._run, member._at, member._history = types.SimpleNamespace(stops=False), 0, History()
    record = {"step": 2, "loss": 1.0}
    words = {"begin": (False, []), 1: (False, []), 2: (True, [record])}

    def steps():
        while True:
            member._at += 1
            yield f"state {member._at}", {"loss": 1.0}

    def hear(place):
        stop, history = words.pop(place)
        return {"stop": stop, "signal": None, "history": history}

    monkeypatch.setattr(member, "_under_way", lambda state: contextlib.nullcontext(), raising=False)
    monkeypatch.setattr(member, "_is_turn", lambda: True)
    monkeypatch.setattr(member, "_steps", steps)
    monkeypatch.setattr(member, "_local", lambda: f"state {member._at}")
    member._group = types.SimpleNamespace(hear=hear, wait_for_others=lambda: None)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    assert member.follow("state 0", Interrupts()) == ("state 2", [record], 2)
    assert not words


@pytest.mark.slow
def test_a_plain_fit_does_not_load_the_room_of_elastic_runs():
    source = """
import sys, jax.numpy as jnp, numpy as np, optax
from jaxpar import kv, train
state, step = train.start({"w": jnp.ones(2)}, optax.sgd(0.1), lambda p, b, rng: ((b["x"] @ p["w"]).mean(), {}))
train.fit(state, step, {"x": np.ones((8, 2), "float32")}, epochs=1, batch_size=8, progress=False)
print([name for name in sys.modules if name.startswith("jaxpar.train._elastic")])
"""
    assert python("-c", source, timeout=100).stdout == "[]\n"


# ---- What a process of an elastic run would compute is compared with what process 0 computes.


STEP = "the step, with its loss, optimizer and learning rate"
SHAPES = "the shapes of the params or of the optimizer's state"
SIZES = "batch_size, the number of examples or of steps"


def program(scale=1.0, optimizer=optax.adam, rate=0.1, seed=0, shift=0.0, device=0, options=(), wide=2, **sizes):
    """What a process computes whose script has these constants."""

    def loss_fn(params, batch, rng):
        jax.debug.callback(lambda x: None, batch["x"][0, 0])
        table = jnp.asarray(np.arange(2000, dtype=np.float32))[batch["y"].astype(int)]
        return scale * ((batch["x"] @ params["w"]) ** 2).mean() + table.mean(), {}

    examples = {"x": np.ones((96, wide), np.float32), "y": np.arange(96, dtype=np.float32)}
    examples["y"][-1] += shift
    where = jax.devices()[device : device + 1]
    state = train.create_state(kv.from_params({"w": jnp.ones(wide)}, optimizer=optimizer(rate), devices=where), seed)
    step = train.make_train_step(loss_fn, virtual_shards=4, devices=where, **dict(options))
    defaults = {
        name: p.default for name, p in inspect.signature(train.fit).parameters.items() if p.kind is p.KEYWORD_ONLY
    }
    given = FitOptions(**{**defaults, "epochs": 2, "batch_size": 16, "progress": False, **sizes})
    run = Run(state, step, data.from_arrays(examples), given)
    return Member(run, state)._compile(run.check(state))


first = functools.cache(program)
CHANGES = {
    "the rate": ({"rate": 0.2}, STEP),
    "a schedule": ({"rate": optax.cosine_decay_schedule(0.1, 10)}, STEP),
    "a constant of the optimizer": ({"optimizer": lambda rate: optax.adam(rate, b1=0.8)}, STEP),
    "another optimizer with the same state": ({"optimizer": optax.nadam}, STEP),
    "the loss": ({"scale": 1.0000001}, STEP),
    "an option of the step": ({"options": {"grad_transform": optax.clip(1.0)}}, STEP),
    "the seed": ({"seed": 1}, "the seed and the data"),  # another order of the examples
    "one label": ({"shift": 1.0}, "the data"),
    "a wider layer": ({"wide": 3}, f"{SHAPES} and {STEP} and the data"),
    "the epochs": ({"epochs": 3}, SIZES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(CHANGES, "one label"))  # each compiles
def test_what_differs_is_named(name):
    change, words = CHANGES[name]
    found = differences(program(**change), first())
    assert found in (words, f"{SHAPES} and {words}"), found


@pytest.mark.slow
def test_an_equal_program_is_equal_in_another_process_on_other_devices():
    source = "import json, test_elastic as t; print(json.dumps(t.program(device=4)))"
    there = python("-c", source, JAX_NUM_CPU_DEVICES="5", XLA_FLAGS="", PYTHONHASHSEED="7")
    assert json.loads(there.stdout) == first()


def test_another_version_is_shown():
    own = first()
    assert differences({**own, "versions": "jax 9"}, own) == f"versions (jax 9, not {own['versions']})"


def test_a_digest_has_values_dtypes_shapes_and_signs_of_zero():
    one = {"a": np.zeros(4, np.float32), "b": "x"}
    others = [{**one, "a": np.zeros(4, np.int32)}, {**one, "a": np.zeros((2, 2), np.float32)}, {**one, "b": "y"}]
    others += [{**one, "a": -one["a"]}, {"a": one["a"], "c": "x"}]
    assert len({digest(tree) for tree in [one, *others]}) == 6
    assert digest({"k": jax.random.key(1)}) != digest({"k": jax.random.key(2)})
