"""Several data sets in one batch: which examples come when, what resuming skips, what is refused."""

import itertools
import json
import sys
from collections import OrderedDict, UserDict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launched import launch
from world import step_of

from jaxpar import data, kv, train

A = {"x": np.arange(12, dtype=np.float32)}
B = {"y": np.arange(8, dtype=np.float32) / 8}
LOADER = [np.float32([i, i + 0.5]) for i in range(3)]  # batches of two


def parts(batches):
    return [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batch) for batch in batches]


@pytest.mark.parametrize(("until", "steps"), [("longest", 3), ("shortest", 2)])
def test_each_data_set_is_read_at_its_own_pace(until, steps):
    combined = data.combine({"a": A, "b": B}, until=until)
    assert combined.examples(4) == 4 * steps
    batches = parts(combined.batches(4, rng=jax.random.key(0), epochs=4))
    assert len(batches) == 4 * steps
    for name, array, length in (("a", "x", 12), ("b", "y", 8)):
        seen = [value for batch in batches for value in batch[name][array]]
        passes = [seen[i : i + length] for i in range(0, len(seen) - length + 1, length)]
        assert all(len(set(each)) == length for each in passes)  # none twice before all others came
        assert passes[0] != passes[1]


def test_data_sets_of_one_length_have_orders_of_their_own():
    first, second = next(data.combine((A, A)).batches(12, rng=jax.random.key(0)))
    assert (first["x"] != second["x"]).any()


def of_epoch(epoch):
    return (np.full(2, 10 * epoch + i, np.float32) for i in range(4))


@pytest.mark.parametrize("start", [1, 3, 5, 9])
def test_a_run_that_resumes_sees_the_batches_that_were_to_come(start):
    def combined():
        sources = {"a": A, "b": LOADER, "c": data.from_iterable(of_epoch, steps_per_epoch=4)}
        return data.combine(sources, batch_sizes={"a": 4, "b": None, "c": 2})

    options = {"rng": jax.random.key(1), "epochs": None}
    undisturbed = parts(itertools.islice(combined().batches(4, **options), 12))
    assert undisturbed[start:] == parts(itertools.islice(combined().batches(4, **options, start=start), 12 - start))


class Positioned:
    """As an iterator of Grain: it tells its position, and takes one."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return np.full(4, self.at, np.float32)

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def test_positions_of_iterators_are_kept():
    def combined(iterator):
        return data.combine({"a": A, "b": data.from_iterable(iterator, steps_per_epoch=3)})

    options = {"rng": jax.random.key(1), "epochs": None}
    first = combined(Positioned())
    batches = first.batches(4, **options)
    parts(itertools.islice(batches, 5))
    place = json.loads(json.dumps(first.get_state()))
    resumed = combined(Positioned())
    resumed.set_state(place)
    assert parts([next(resumed.batches(4, **options, start=5))]) == parts([next(batches)])

    lost = combined(batch for batch in Positioned())  # it has no position, and cannot be read again
    parts(itertools.islice(lost.batches(4, **options), 5))
    assert (lost.is_read_once, lost.get_state()) == (True, None)
    assert data.combine({"a": A, "b": B}).get_state() is None  # the number of the batch says it
    both_kept = data.combine([data.from_iterable(Positioned(), steps_per_epoch=3) for _ in "ab"])
    parts(itertools.islice(both_kept.batches(4), 1))
    assert [state is None for state in both_kept.get_state()] == [False, False]


def both(params, batch):
    inside = jnp.sin(batch["a"]["x"]) * params["w"] - 1
    return (inside**2).mean() + ((batch["b"]["y"] * params["w"] - params["v"]) ** 2).mean()


def fitted(folder=None, devices=2, max_steps=None):
    combined = data.combine({"a": A | {"z": A["x"]}, "b": B}, batch_sizes={"a": 8, "b": 4})
    store = kv.from_params({"w": jnp.ones(()), "v": jnp.zeros(())}, optimizer=optax.sgd(0.1))
    state = train.create_state(store, 0, devices=jax.devices()[:devices])
    run = {"epochs": 4, "progress": False, "checkpoint_dir": folder, "max_steps": max_steps}
    state, history = train.fit(state, step_of(both), combined, **run)
    return [*map(float, jax.tree.leaves(state.params)), *(record["loss"] for record in history)]


def test_any_devices_and_a_resume_give_the_same_numbers(tmp_path):
    on_two = fitted()
    np.testing.assert_allclose(fitted(devices=1), on_two, rtol=1e-6)
    fitted(tmp_path, max_steps=3)  # within the second epoch of the run, and the second of each data set
    assert fitted(tmp_path) == on_two


RUN = Path(__file__).parents[1] / "combined_run.py"


def ended(folder, processes, devices, *options, way=()):
    """What each process said at the end: steps, bits, and norms and losses. And all that they said."""
    folder.mkdir()
    words = ("-n", str(processes), "--devices", str(devices), *way, "--", sys.executable, str(RUN), str(folder))
    done = launch(*words, *options, timeout=240)
    ends = [line.partition("END ")[2].split() for line in done.stdout.splitlines() if "END " in line]
    return [(int(steps), bits, [*map(float, numbers)]) for steps, bits, *numbers in ends], done.stdout + done.stderr


@pytest.mark.slow  # seven processes
def test_several_processes_have_the_numbers_of_one_and_resume_to_the_same_bits(tmp_path):
    """Of the loader each process reads its own share."""
    (one,), _ = ended(tmp_path / "one", 1, 4)
    two, _ = ended(tmp_path / "two", 2, 2)
    assert one[0] == 30
    assert len(two) == 2
    assert two[0] == two[1]
    assert two[0][0] == 30
    np.testing.assert_allclose(two[0][2], one[2], rtol=1e-5)
    again, said = ended(tmp_path / "again", 2, 2, "lose", way=("--max-restarts", "1"))
    assert (tmp_path / "again" / "lost").exists()
    assert "resumed from step" in said
    assert again == two


@pytest.mark.slow  # five processes
def test_an_elastic_run_that_loses_a_process_ends_with_the_same_bits(tmp_path):
    (one,), _ = ended(tmp_path / "one", 1, 2, "elastic")
    three, said = ended(tmp_path / "three", 3, 2, "elastic", "lose", way=("--elastic",))
    assert "process 2 was lost" in said
    assert "process 2 joins after step" in said
    assert one[0] == 30
    assert three == [one] * 3


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: data.combine({}), ["expected several"]),
        (lambda: data.combine({"a": A}, batch_sizes={"b": 3}), ["'b'", "'a'"]),
        (lambda: data.combine({"a": A}, until="first"), ["until", "'first'"]),
        (lambda: data.combine({"a": data.from_iterable(of_epoch, steps_per_epoch="all")}), ["'a'", '"all"']),
        (lambda: data.combine((A, B), batch_sizes=(4, 2)).examples(8), ["batch_size is 8", "0: 4, 1: 2"]),
        (lambda: data.combine({"a": A, "b": B}).examples(12), ["'b'", "8 examples", "12"]),
        (lambda: data.from_arrays({"a": A, "b": B}), ["(12,)", "(8,)", "data.combine"]),
        (
            lambda: next(data.from_iterable(lambda epoch: A, steps_per_epoch="all").batches(4)),
            ["epoch 0", "curriculum"],
        ),
    ],
)
def test_mistakes(act, words):
    with pytest.raises((TypeError, ValueError)) as error:
        act()
    assert all(word in str(error.value) for word in words)


class Loader:
    """As a DataLoader of PyTorch."""

    batch_size = 2

    def __len__(self):
        return len(LOADER)

    def __iter__(self):
        return iter(LOADER)


@pytest.mark.parametrize("several", [{"a": Loader(), "b": data.from_arrays(B)}, (Loader(), data.from_arrays(B))])
def test_a_dict_or_a_tuple_of_loaders_is_combined(several):
    source = data.as_source(several)
    assert isinstance(source, data.CombinedSource)
    assert source.usual_batch_size() == 2
    batch = next(source.batches(2))
    assert (type(batch), len(batch)) == (type(several), 2)


def test_what_is_not_combined():
    for given in ((A["x"], A["x"]), {"x": A["x"]}, LOADER, [{"x": A["x"]}]):
        assert not isinstance(data.as_source(given), data.CombinedSource)


def test_a_mapping_that_jax_does_not_know_is_data():
    """As the `BatchEncoding` of a tokenizer of Hugging Face."""
    assert next(data.as_source(UserDict(A)).batches(3))["x"].tolist() == [0, 1, 2]
    batches = [UserDict({"x": A["x"][i : i + 4]}) for i in (0, 4)]
    assert [batch["x"].tolist() for batch in data.as_source(batches).batches(4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_mapping_of_one_array_that_jax_knows_is_data():
    ordered = OrderedDict(x=A["x"])
    assert next(data.as_source(ordered).batches(3))["x"].tolist() == [0, 1, 2]
    assert next(data.as_source([OrderedDict(x=A["x"][:4])]).batches(4))["x"].tolist() == [0, 1, 2, 3]


def test_one_array_is_data():
    assert next(data.as_source(A["x"]).batches(3)).tolist() == [0, 1, 2]
