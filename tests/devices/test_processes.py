"""Several processes on this machine, over Gloo: the same training as in one, and back after all were killed.

Each topology, processes × devices, is one run of process_run.py, or for engine `jit` and the user's mesh of
mesh_run.py, which assert what the processes must agree on.
"""

import concurrent.futures
import threading
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from several_processes import check_same, killed_and_resumed

from jaxpar import kv
from jaxpar._devices import processes as _processes
from jaxpar._store import aggregate
from jaxpar.kv import _push


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    others = (
        ("4x1", 4, 1, "store", "resumed"),
        ("1x4", 1, 4, "store", "training", "compressed", "evaluation", "resumed"),
        ("2x2 again", 2, 2, "resumed"),
    )
    phases = ("store", "failures", "undisturbed", "training", "compressed", "evaluation", "callbacks", "killed")
    folder = tmp_path_factory.mktemp("processes")
    return killed_and_resumed("process_run.py", folder, "step_00000002", phases, others)


@pytest.mark.slow
def test_two_processes_train_the_same_parameters_as_one(runs):
    """Four processes of one device each resume what these two have saved: test_all_killed_and_resumed."""
    expected, got = runs["1x4"].saved("training.npz"), runs["2x2"].saved("training.npz")
    assert got.keys() == expected.keys()
    assert sum("lenet" in name for name in got) == 9
    check_same(got, expected)


@pytest.mark.slow
def test_codes_of_integers_have_the_same_bits_in_several_processes(runs):
    expected, got = runs["1x4"].saved("compressed.npz"), runs["2x2"].saved("compressed.npz")
    assert got.keys() == expected.keys()
    assert sum("int3" in name for name in got) >= 8
    check_same(got, expected, exact=bool)


@pytest.fixture(scope="module")
def mesh_runs(tmp_path_factory):
    phases = ("in_flight", "trained", "undisturbed", "restored", "loaders", "inside", "killed")
    others = (("1x4", 1, 4, "trained", "undisturbed", "resumed"), ("2x2 again", 2, 2, "resumed"))
    folder = tmp_path_factory.mktemp("meshes")
    return killed_and_resumed("mesh_run.py", folder, "step_00000004", phases, others)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trained.npz", "undisturbed.npz"])
def test_the_numbers_of_one_process_with_the_same_mesh(mesh_runs, what):
    """A sum over four devices is made in another order by several processes, as scores are."""
    expected, got = mesh_runs["1x4"].saved(what), mesh_runs["2x2"].saved(what)
    assert got.keys() == expected.keys()
    whole = what == "undisturbed.npz"
    of_two = ("model across", "some made there", "a state a key")  # sums of two terms, in any order the same bits
    check_same(got, expected, exact=lambda name: (whole and "scores" not in name) or name.startswith(of_two))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started", "topology"),
    [*(("runs", t) for t in ("2x2 again", "4x1", "1x4")), *(("mesh_runs", t) for t in ("2x2 again", "1x4"))],
)
def test_all_killed_and_resumed(request, started, topology):
    """Bit for bit on the same topology and mesh. With `mesh_runs` one process resumes on another mesh."""
    runs = request.getfixturevalue(started)
    expected, got = runs["2x2"].saved("undisturbed.npz"), runs[topology].saved("resumed.npz")
    same = topology == "2x2 again"
    assert got.keys() == expected.keys() or not same
    check_same(got, expected, exact=lambda name: same)


@pytest.mark.slow
def test_the_first_process_speaks_and_writes_for_all(runs):
    first, second = (output.read_text() for output in runs["2x2"].outputs)
    assert "epoch 2/2" in first
    assert "epoch" not in second
    lines = (runs["2x2"].folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert "jaxpar: resumed from step 2" in runs["2x2 again"].outputs[0].read_text()
    assert "resumed from" not in runs["2x2 again"].outputs[1].read_text()
    assert "is damaged: jaxpar.json: KeyError" in first
    assert "is damaged: jaxpar.json" not in second


# What crosses between processes; the program is the same over the devices of one.


def program_text(shapes, spec=None):
    """Of the sum of values of these shapes over four devices."""
    devices, keys = tuple(jax.devices()[:4]), list(range(len(shapes)))
    store = kv.init(kv.create("dist_sync"), keys, [jnp.zeros(s) for s in shapes])
    if spec is not None:
        store = kv.set_gradient_compression(store, spec)
    texts, make = [], aggregate.program

    def program(*key):
        run = make(*key)
        return lambda *args: texts.append(run.lower(*args).as_text()) or run(*args)

    with unittest.mock.patch.object(aggregate, "program", program):
        _push._apply_in_process(store, {k: [jax.device_put(jnp.ones(shapes[k]), d) for d in devices] for k in keys}, {})
    (text,) = texts
    return text


def test_small_keys_cross_in_one_bucket_and_large_ones_alone():
    assert program_text(((8,),) * 20).count("all_reduce") == 1
    assert program_text(((8,), (100_000,), (8,))).count("all_reduce") == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["2bit", "int3"])
def test_what_crosses_is_compressed(kind):
    """Of signs a scale crosses too, one for each key, to the owners and back."""
    text = program_text(((64, 64),), {"type": kind})
    assert text.count("all_reduce") == (2 if kind == "int3" else 0)
    crossing = [line for line in text.splitlines() if "all_gather" in line or "all_to_all" in line]
    assert len(crossing) == 2
    assert all("f32" not in line for line in crossing)


# What processes tell each other, without any: each is a thread, and they gather at a barrier.


class Threads:
    """So many processes that make the same calls."""

    def __init__(self, count, monkeypatch):
        self.count, self.own, self.lengths = count, threading.local(), []
        self.rows, self.all_are_here = [b""] * count, threading.Barrier(count)
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(jax, "process_index", lambda: self.own.index)
        monkeypatch.setattr(_processes, "_gather", self.gather)

    def gather(self, raw):
        self.rows[self.own.index] = raw
        self.all_are_here.wait(20)
        rows = np.array([np.frombuffer(row, np.uint8) for row in self.rows])  # of one length, as in a collective
        if self.all_are_here.wait(20) == 0:
            self.lengths.append(len(raw))
        return rows

    def call(self, function):
        """What `function(index)` returns or raises in each."""

        def run(index):
            self.own.index = index
            try:
                return function(index)
            except Exception as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(run, range(self.count)))


@pytest.fixture
def three(monkeypatch):
    return Threads(3, monkeypatch)


def test_texts_of_any_length_reach_every_process(three):
    for lengths in ((0, 1, 2), (3, 40_000, 0), (1020, 1019, 1021), (1022, 1, 300)):
        texts = [chr(0xE9) * (length // 2) + "x" * (length % 2) for length in lengths]
        assert three.call(lambda i, texts=texts: _processes.exchange(texts[i])) == [texts] * 3
    # Short texts cross at once. What is left of long ones has few sizes, since a program is compiled for each.
    assert three.lengths == [1024, 1024, 1 << 16, 1024, 1, 1024, 2]


def test_rows_of_every_process_are_gathered(three):
    counts, rows = [2, 0, 3], [np.arange(12, dtype=np.int16).reshape(3, 2, 2) + 100 * i for i in range(3)]
    got = three.call(lambda i: _processes.gather_rows({"x": rows[i], "n": rows[i][:, 0, 0].astype(float)}, counts))
    want = np.concatenate([rows[0][:2], rows[2]])
    for each in got:
        np.testing.assert_array_equal(each["x"], want)
        np.testing.assert_array_equal(each["n"], want[:, 0, 0])
        assert (each["x"].dtype, each["n"].dtype) == (np.int16, np.float64)


def test_all_answer_as_the_first_one_does(three):
    assert three.call(lambda i: _processes.ask_first(lambda: {"process": i})) == [{"process": 0}] * 3
    assert three.call(lambda i: _processes.all_true(i != 1)) == [False] * 3
    assert three.call(lambda i: _processes.all_true(True)) == [True] * 3
    three.call(lambda i: _processes.agree("epochs", "three"))
    for error in three.call(lambda i: _processes.agree("epochs", f"{i // 2}" * 300)):
        assert type(error) is ValueError
        assert "epochs" in str(error)


def test_an_error_of_one_process_is_raised_in_all(three):
    def fails(i):
        with _processes.raise_together():
            if i == 1:
                raise FileNotFoundError("no such file")

    errors = three.call(fails)
    assert [type(error) for error in errors] == [FileNotFoundError] * 3
    assert [str(error) for error in errors] == ["process 1: no such file", "no such file", "process 1: no such file"]
    assert all(map(_processes.is_in_all, errors))
    assert not _processes.is_in_all(FileNotFoundError("of one process alone"))


def test_an_elastic_run_is_one_process_between_its_steps(three, monkeypatch):
    assert (_processes.count(), len(_processes.devices())) == (3, jax.device_count())
    monkeypatch.setattr(_processes.elastic_run, "is_on", True)
    assert _processes.count() == 1
    assert three.call(lambda i: _processes.exchange(str(i))) == [["0"], ["1"], ["2"]]
    with pytest.raises(RuntimeError, match=r"kv\.push: in an elastic run"):
        _processes.refuse_elastic("kv.push")


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.setattr(_processes, "_gather", None)
    assert _processes.is_in_all(OSError("no room"))
    assert _processes.exchange("a word") == ["a word"]
    assert _processes.ask_first(lambda: {"step": 3}) == {"step": 3}
    assert _processes.from_first({"w": 1}) == {"w": 1}
    assert (_processes.all_true(True), _processes.all_true(False)) == (True, False)
    with pytest.raises(OSError, match="no room"), _processes.raise_together():
        raise OSError("no room")
