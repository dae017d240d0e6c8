"""The certificate of a run: the same for the same bits, cut and continued as the run is, and verified."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil

import jax
import numpy as np
import optax
import pytest
from world import adam, line, squares, start, step_of

import jaxpar.__main__
from jaxpar import checkpoint, data, train, viz
from jaxpar.checkpoint import _leaves
from jaxpar.train._fit import certificate
from jaxpar.train._fit.digest import digest_of_data
from jaxpar.train._fit.fault import fault_of
from jaxpar.train._step import virtual as virtual_step

EVERY = 5
HEADER = {*"certificate jax jaxpar processor platform devices processes virtual_shards engine kind run".split()}
DATA = line(64)


def arguments(count=2, kind="device", loss=squares, tx=None, **options):
    step_options = {name: options.pop(name) for name in ("engine", "virtual_shards", "nonfinite") if name in options}
    step = step_of(loss, **step_options)
    given = {"state": start(count, kind, adam() if tx is None else tx), "step": step, "train_data": DATA}
    return {**given, "batch_size": 16, "epochs": 6, "progress": False, "certificate_every": EVERY, **options}


def run(path, *where, **options):
    """The lines of the certificate of a run, without the header."""
    train.fit(**arguments(*where, certificate=path, **options))
    return lines(path)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def header(path):
    return json.loads(path.read_text().partition("\n")[0])


class Decoded:
    """A column of a record file, which reads rows when it is asked for them."""

    shape, dtype = (64, 3), np.float32

    def __len__(self):
        return 64

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("all images are decoded")


def test_data_that_are_decoded_when_they_are_read_have_no_hash():
    source = data.ArraySource({"x": Decoded(), "y": np.zeros(64)}, np.float32)
    assert digest_of_data(source, 64) is None
    assert digest_of_data(data.from_arrays(DATA), 64) is not None


# What a line says


@pytest.mark.slow
def test_lines_are_hashes_of_the_states(tmp_path):
    states = {}
    found = run(tmp_path / "new" / "run.jsonl", callbacks=lambda state, record: states.update({record["step"]: state}))
    assert header(tmp_path / "new" / "run.jsonl").keys() == HEADER
    assert [entry["step"] for entry in found] == [5, 10, 15, 20]
    state = arguments()["state"]
    state, _ = train.fit(**{**arguments(), "state": state, "epochs": None, "max_steps": 10})
    assert found[1]["state"] == str(checkpoint._StateHash(state))
    assert len({entry["state"] for entry in found}) == 4


def exact(params, batch, rng):
    """Its gradients are means of whole numbers."""
    return (batch["x"] @ params["w"] + params["b"]).mean(), {}


WHOLE = {"x": np.random.default_rng(0).integers(-4, 5, (64, 3)).astype(np.float32)}
HALVES = optax.sgd(0.125, momentum=0.5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["device", "local", "sharded", "dist_sync"])
def test_engines_and_kinds_of_equal_bits(tmp_path, engine, kind):
    """Nothing is rounded in eight steps, so the order of sums changes no bit. A hashed state goes to the next step."""
    options = {"loss": exact, "tx": HALVES, "train_data": WHOLE, "certificate_every": 3, "max_steps": 8}
    found = run(tmp_path / "a", 4, kind, engine=engine, **options)
    assert found == run(tmp_path / "b", 1, **options)
    assert found != run(tmp_path / "c", 1, **{**options, "tx": optax.sgd(0.125)})


def images(params, batch, rng):
    return squares(params, {"x": batch["image"], "y": batch["label"]}, rng)


@pytest.mark.slow
@pytest.mark.parametrize("per_program", [4, 1, "auto"])
def test_programs_of_several_steps_are_cut(tmp_path, per_program):
    options = {"loss": images, "train_data": data.Dataset(DATA["x"], np.arange(64)), "steps_per_execution": per_program}
    found = run(tmp_path / "a", **options)
    assert [entry["step"] for entry in found] == [5, 10, 15, 20]
    assert run(tmp_path / "b", **options, max_steps=13)[:2] == found[:2]


@pytest.mark.slow
def test_steps_that_do_not_count_have_no_line(tmp_path):
    """That a step is not finite is found several steps later."""
    broken = {**DATA, "y": np.where(np.arange(64) == 40, np.nan, DATA["y"])}
    batches = [{name: x[i : i + 16] for name, x in broken.items()} for i in range(0, 64, 16)]
    with pytest.raises(train.NonFiniteError) as raised:
        run(tmp_path / "a", train_data=batches, nonfinite="stop", certificate_every=1)
    assert raised.value.step == 2
    assert [entry["step"] for entry in lines(tmp_path / "a")] == [1, 2]
    assert lines(tmp_path / "a")[-1]["state"] == str(checkpoint._StateHash(raised.value.state))


def test_one_program_is_compiled_beside_the_step(tmp_path, caplog):
    """The step is the program that it is without a certificate."""
    train.fit(**arguments())
    _leaves.hash_sums.clear_cache()
    with jax.log_compiles():
        run(tmp_path / "a")
    assert re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text) == ["hash_sums"]


# Files


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_file(tmp_path):
    expected = run(tmp_path / "a")
    ended = {"certificate": tmp_path / "b", "checkpoint_dir": tmp_path / "points", "checkpoint_every": 3}
    train.fit(**arguments(**ended, max_steps=12))
    assert len(lines(tmp_path / "b")) == 2
    with open(tmp_path / "b", "a") as file:  # of steps that were lost with a crash, the last line half written
        file.write('{"step": 15, "state": "lost"}\n{"step": 20, "sta')
    train.fit(**arguments(**ended))
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    for path in (tmp_path / "points").glob("step_*"):
        if int(path.name[5:]) > 9:
            os.rename(path, tmp_path / path.name)
    train.fit(**arguments(**ended))  # again, from step 9
    assert lines(tmp_path / "b") == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"count": 4}, "devices: 2 in the file, 4 now"),
        ({"kind": "sharded"}, "kind: device in the file, sharded now"),
        ({"engine": "jit"}, "engine: auto in the file, jit now"),
        ({"virtual_shards": 4}, "virtual shards: None in the file, 4 now"),
    ],
)
def test_the_file_of_another_run_is_refused(tmp_path, other, words):
    expected = run(tmp_path / "a", epochs=2)
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(ValueError, match=f"{words}.*give another file, or delete it"):
        run(tmp_path / "a", **other)
    assert (tmp_path / "a").read_bytes() == before
    assert run(tmp_path / "a", epochs=2) == expected  # the same run from its beginning


@pytest.mark.slow
def test_a_run_with_virtual_shards_goes_on_anywhere(tmp_path):
    expected = run(tmp_path / "a", 1, virtual_shards=4)
    options = {"virtual_shards": 4, "checkpoint_dir": tmp_path / "points"}
    run(tmp_path / "b", 2, **options, epochs=2)
    assert run(tmp_path / "b", 3, "local", **options) == expected
    assert header(tmp_path / "b")["devices"] == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"epoch": 1}\n', "line 1 is not the header of a certificate"),
        (b"\xff\xfe\n", "line 1 is not the header"),
        (b'{"certificate": 2}\n', "line 1 is not the header"),
        (b"[]\n", "line 1 is not the header"),
        (b"HEADER" + b'{"step": 5}\n', "line 2 is not the hash"),
        (b"HEADER" + b'{"step": "5", "state": "x"}\n', "line 2 is not the hash"),
        (b"HEADER" + b'{"step": 5, "state": "x"}\n{"step": 5, "state": "x"}\n', "line 3 is not the hash"),
        (b"HEADER" + b"[" * 100_000 + b"\n", "line 2 is not the hash"),
    ],
)
def test_what_is_no_certificate_is_refused(tmp_path, content, words):
    run(tmp_path / "a", epochs=1, max_steps=1)
    content = content.replace(b"HEADER", (tmp_path / "a").read_bytes())
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == content


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"certificate_every": 0}, ValueError, "certificate_every must be an int of 1 or more, got 0"),
        ({"certificate_every": True}, TypeError, "certificate_every must be an int of 1 or more, got True"),
        ({"certificate_every": 2.5}, TypeError, "certificate_every must be an int"),
        ({"certificate": 3}, TypeError, "fit: certificate must be a path"),
        ({"certificate": "."}, OSError, "certificate cannot be written to .*it is not a regular file"),
        ({"certificate": "file/below"}, OSError, "certificate cannot be written to .*file/below"),
        ({"certificate": "pipe"}, OSError, "it is not a regular file"),
    ],
)
def test_wrong_arguments_are_refused_before_work(tmp_path, monkeypatch, options, error, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    given = arguments(**{"certificate": "a", **options})
    with pytest.raises(error, match=words):
        train.fit(**given)
    assert not given["state"].step.is_deleted()
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


@pytest.mark.parametrize("other", ["null", '{"jax": "0.9"}'])
def test_processes_that_differ_are_refused(tmp_path, monkeypatch, other):
    answer = lambda text: [text, other if text.startswith("{") else text]  # noqa: E731
    monkeypatch.setattr(certificate.processes, "exchange", answer)
    with pytest.raises(ValueError, match=f"needs the same settings in all processes.*process 1: {other}"):
        run(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_ends_the_run_in_words(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(certificate.files, "append", full)
    with pytest.raises(OSError, match=r"the certificate cannot be written to .* \(No space left on device\)") as raised:
        run(tmp_path / "a")
    assert int(raised.value.state.step) > 0


# Verification


# What `jaxpar verify` is given: functions that return the arguments of a run.

OPTIONS = {"checkpoint_dir": "points", "checkpoint_every": 4, "keep": 20, "certificate": "run.jsonl"}
OPTIONS |= {"metrics_file": "metrics"}
same = functools.partial(arguments, **OPTIONS, eval_data=1, callbacks=print)
other_rate = functools.partial(arguments, **OPTIONS, tx=optax.adam(0.06))
four = functools.partial(arguments, 4, **OPTIONS)
virtual = functools.partial(arguments, 3, virtual_shards=4)
nothing = lambda: None  # noqa: E731
half = lambda: {"state": 3, "step": 4}  # noqa: E731
unknown = lambda: {**same(), "epoks": 3}  # noqa: E731
fails = lambda: 1 / 0  # noqa: E731


def other_seed():
    given = arguments(**OPTIONS)
    return {**given, "state": dataclasses.replace(given["state"], rng=jax.random.key(8))}


def late():
    state, _ = train.fit(**arguments(epochs=2))
    return {**arguments(), "state": state}


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """The folder of a run with a certificate and checkpoints."""
    folder = tmp_path_factory.mktemp("certified")
    places = {"checkpoint_dir": folder / "points", "certificate": folder / "run.jsonl"}
    train.fit(**arguments(**places, checkpoint_every=4, keep=20))
    return folder


@pytest.fixture
def folder(certified, tmp_path, monkeypatch):
    """A copy of it, as the current folder."""
    shutil.copytree(certified, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verify(capsys, file, function, *options):
    """The exit status and all that is printed. The function is one of these unless it says its module."""
    function = function if ":" in function else f"test_certificate:{function}"
    try:
        status = jaxpar.__main__.main(["verify", file, function, *options])
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "__pycache__" not in str(path)}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("same", 0, "4 certified steps, 5 to 20, are the same; started at what the function returns"),
        ("same --from 10", 0, r"3 certified steps, 10 to 20.*started at points.step_00000008"),
        ("same --from 12 --to 16", 0, r"1 certified steps, 15 to 15.*started at points.step_00000012"),
        ("same --to 5", 0, "1 certified steps, 5 to 5"),
        ("same --devices 8", 0, "are the same"),
        ("other_rate", 1, "step 5 differs from run.jsonl; started at what the function returns"),
        ("other_rate --from 12", 1, r"step 15 differs from run.jsonl; started at points.step_00000012"),
        ("other_seed", 1, "step 5 differs"),
        ("four", 2, "is from another run .devices: 2 in the file, 4 now"),
        ("virtual", 2, "devices: 2 in the file, 3 now; virtual shards: None in the file, 4 now"),
        ("same --devices 3", 2, "RuntimeError: use_cpu_devices.3.: JAX runs already"),
        ("same --from 21", 2, "has no step from 21; its steps are 5 to 20"),
        ("same --from 6 --to 9", 2, "has no step from 6 to 9"),
        ("late --from 5", 2, "the state is at step 8, after the first step to compare, 5"),
        ("late --from 9", 0, "3 certified steps, 10 to 20"),
        ("nothing", 2, "TypeError: expected the arguments of fit in a dict, got None"),
        ("half", 2, "TypeError: missing a required argument: .train_data"),
        ("unknown", 2, "TypeError: got an unexpected keyword argument .epoks"),
        ("fails", 2, "ZeroDivisionError"),
        ("absent", 2, "module 'test_certificate' has no attribute 'absent'"),
        ("absent:same", 2, "cannot import absent"),
        ("same --from 0", 2, "must be an int of 1 or more"),
    ],
)
def test_verify(folder, capsys, words, status, said):
    before = contents(folder)
    found = verify(capsys, "run.jsonl", *words.split())
    assert found[0] == status, found
    assert re.search(said, found[1]), found
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("edit", "status", "said"),
    [
        (lambda text: text[:-9], 2, "run.jsonl: line 5 is incomplete"),
        (lambda text: "", 2, "run.jsonl is empty"),
        (lambda text: text.partition("\n")[2], 2, "line 1 is not the header of a certificate"),
        (lambda text: text.partition("\n")[0] + "\n", 2, "has no step from 0; it has none"),
        (lambda text: text.replace(jax.__version__, "0.9"), 2, "jax: 0.9 in the file"),
        (lambda text: re.sub('"processor": "[^"]*"', '"processor": "Z80"', text), 2, "processor: Z80 in the file"),
        (lambda text: re.sub('"processes": 1', '"processes": 2', text), 2, "processes: 2 in the file, 1 now"),
        (lambda text: re.sub('("step": 15, "state": ")(.)', r"\1x", text), 1, "step 15 differs"),
    ],
)
def test_verify_of_changed_certificates(folder, capsys, edit, status, said):
    path = folder / "run.jsonl"
    path.write_text(edit(path.read_text()))
    found = verify(capsys, "run.jsonl", "same")
    assert found[0] == status, found
    assert said in found[1]


def test_the_command_names_what_was_wrong(folder, capsys):
    options = "--from", "12", "--blame", "--picture", "fault.dot"
    status, said = verify(capsys, "run.jsonl", "other_rate", *options)
    assert status == 1
    assert "; drawn in fault.dot" in said
    assert (folder / "fault.dot").read_text().count('fillcolor="#cf222e"') == 1  # the layer of `w` and `b`
    assert "first wrong: one of the steps 13 to 15, params/b, params/w, " in said
    assert "no shard can be named" in said


def test_verify_without_a_file(folder, capsys):
    words = "jaxpar verify: absent.jsonl cannot be read (No such file or directory)\n"
    assert verify(capsys, "absent.jsonl", "same") == (2, words)


@pytest.mark.slow
def test_verify_on_other_devices_with_virtual_shards(folder, capsys):
    run(folder / "virtual.jsonl", 1, virtual_shards=4)
    assert verify(capsys, "virtual.jsonl", "virtual")[0] == 0


def test_a_damaged_checkpoint_is_passed_over(folder, capsys):
    (folder / "points" / "step_00000012" / "jaxpar.json").write_text("{")
    status, said = verify(capsys, "run.jsonl", "same", "--from", "14")
    assert status == 0
    assert "started at points/step_00000008" in said


def test_a_checkpoint_of_other_bits_is_found(folder, capsys):
    """Step 12 is saved with one bit changed."""
    state = checkpoint.restore("points/step_00000012", start(2, "device", adam()))
    changed = dataclasses.replace(state.store, values={k: v + 2e-7 for k, v in state.store.values.items()})
    shutil.rmtree("points/step_00000012")
    checkpoint.save("points/step_00000012", dataclasses.replace(state, store=changed))
    assert verify(capsys, "run.jsonl", "same", "--from", "13")[0] == 1
    assert verify(capsys, "run.jsonl", "same", "--from", "11")[0] == 0


# Blame


@contextlib.contextmanager
def flipped(number, shard, element):
    """One bit of what a shard adds in a step is wrong, in steps that are made and first called here."""
    make = virtual_step._programs_of

    def programs_of(step, structure, platform):
        term, *others = make(step, structure, platform)
        about = structure.unflatten(range(structure.num_leaves))

        def wrong_term(leaves, rng, batch, of_shard):
            (buffer,), not_added = term(leaves, rng, batch, of_shard)
            # `rng` is the first leaf of a state, and not among the donated ones.
            if (int(leaves[about.step - 1]) + 1, int(of_shard)) == (number, shard):
                words = np.array(buffer).view(np.uint32)
                words[0, element] ^= np.uint32(1 << 21)
                buffer = jax.device_put(words.view(np.float32), buffer.device)
            return [buffer], not_added

        wrong_term.trace = term.trace
        return wrong_term, *others

    virtual_step._programs_of = programs_of
    try:
        yield
    finally:
        virtual_step._programs_of = make


def sharded(count, every=1, **options):
    return arguments(count, **{"virtual_shards": 4, "tx": optax.sgd(0.1), "certificate_every": every, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "number", "said"),
    [
        (1, 7, "step 7, shard 3, w (the other shards are right"),
        (5, 10, "step 10, shard 3, w (the other shards are right"),
        (5, 7, "one of the steps 6 to 9 (the params were wrong before step 10"),
    ],
)
def test_a_wrong_bit_is_named_on_another_number_of_devices(tmp_path, every, number, said):
    """That of element 1, the first of `w`. A right run has no fault."""
    with flipped(number, 3, 1):
        wrong = {**sharded(2, every), "step": train.make_train_step(squares, virtual_shards=4)}
        train.fit(**wrong, max_steps=12, certificate=tmp_path / "wrong")
    found = train.verify(tmp_path / "wrong", sharded(1, every))
    assert found.differs == -(-number // every) * every
    assert f"first wrong: {said}" in str(found.fault)
    train.fit(**sharded(1, every), max_steps=12, certificate=tmp_path / "right")
    found = train.verify(tmp_path / "right", sharded(1, every))
    assert (found.steps[-1], found.differs, found.fault) == (12 // every * every, None, None)


def test_a_step_before_those_that_are_asked_for_is_named(tmp_path):
    with flipped(6, 3, 1):
        wrong = {**sharded(2, 1), "step": train.make_train_step(squares, virtual_shards=4)}
        train.fit(**wrong, max_steps=9, certificate=tmp_path / "wrong")
    found = train.verify(tmp_path / "wrong", sharded(1, 1), first=9)
    assert (found.steps, found.differs) == ([], 6)
    assert "first wrong: step 6, shard 3, w" in str(found.fault)
    plot = found.fault.plot()
    assert list(plot.marked.values()) == [["w"]]
    assert plot.source.count('fillcolor="#cf222e"') == 1
    assert "step 6, shard 3, w" in found.fault._repr_html_()


def test_the_fault_is_said_where_it_cannot_be_drawn(folder, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, said = verify(capsys, "run.jsonl", "other_rate", "--from", "12", "--blame", "--picture", "fault.svg")
    assert status == 1
    assert "first wrong: one of the steps 13 to 15" in said
    assert "fault.layers.html instead" in said
    assert verify(capsys, "run.jsonl", "same", "--picture", "fault.nonsense")[0] == 2
    with pytest.raises(ValueError, match="which leaf was wrong is not known"):
        train.Fault(1, 2, (), (), "it is old", lambda: None).plot()
    with pytest.raises(ValueError, match="only a step of make_train_step"):
        train.Fault(1, 2, (), ("w",), "it is old").plot()


def test_marks_are_on_the_layers_of_their_params():
    """A longer name is another param, the statistics of a layer have its name, and what is in no layer is listed."""

    def net(params, x):
        x = jax.nn.relu(x @ params["w"])
        return x @ params["a"]["w"] + params["a"]["b"][None]

    params = {"w": np.ones((3, 4), np.float32), "a": {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}}
    marks = ["store/optimizer_state/0/mu/a/w/value", "params/w", "model_state/a/mean", "step"]
    plot = viz._plot_marked(net, (params, np.ones((5, 3), np.float32)), marks, "here")
    assert sorted(plot.marked.values()) == [[marks[1]], [marks[0], marks[2]]]
    assert "not in this picture: step" in plot.source


NAMES = {"leaves": ["store/values/b", "store/values/w", "step"], "gradient": ["b", "w", "loss"]}
LINE = {
    "step": 4,
    "state": "0",
    "leaves": "AAAABBBBCCCC",
    "before": "DDDD",
    "shards": "EEEEFFFF",
    "gradient": "GGGGHHHHIIII",
}


@pytest.mark.parametrize(
    ("line", "now", "right", "fault"),
    [
        (LINE, {"leaves": "AAAAxBBBCCCC", "shards": "EEEExFFF", "gradient": "GGGGxHHHIIII"}, 3, "step 4, shard 1, w"),
        (LINE, {"leaves": "xAAAxBBBCCCC", "shards": "EEEExFFF"}, 2, "step 4, shard 1, store/values/b, store/values/w"),
        (
            LINE,
            {"shards": "xEEExFFF", "gradient": "xGGGxHHHxIII"},
            3,
            "step 4, shards 0, 1, b, w, loss (all shards differ",
        ),
        (LINE, {"gradient": "GGGGxHHHIIII"}, 2, "step 4, w (all shards are right, and their sum is wrong"),
        (LINE, {"leaves": "AAAAxBBBCCCC"}, 3, "step 4, store/values/w (the gradient is right; the update"),
        (LINE, {"leaves": "AAAAxBBBCCCC"}, 2, "one of the steps 3 to 4, store/values/w (the gradient is right"),
        (
            LINE,
            {"before": "xDDD", "shards": "xEEExFFF"},
            1,
            "one of the steps 2 to 3 (the params were wrong before step 4",
        ),
        (LINE, {"leaves": "AAAAxBBBCCCC"}, 4, "step 4, store/values/w (the state that was begun with differs"),
        ({"step": 4, "state": "0"}, {}, 3, "step 4 (the certificate has no hashes of leaves"),
        (
            {"step": 4, "state": "0", "leaves": "AAAABBBBCCCC"},
            {"leaves": "AAAAxBBBCCCC"},
            3,
            "step 4, store/values/w (no shard",
        ),
        ({**LINE, "leaves": "AAAA"}, {}, 3, "step 4 (the certificate has no hashes of leaves"),
    ],
)
def test_what_can_be_told_and_what_not(line, now, right, fault):
    assert str(fault_of(line, {**LINE, **now}, right, NAMES)).startswith(f"first wrong: {fault}")
