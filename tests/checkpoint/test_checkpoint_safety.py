"""Checkpoints: who looks harms nothing; one that cannot be read, or is forged, is passed over for the one before."""

import dataclasses
import errno
import functools
import hashlib
import json
import os
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import world
from hypothesis import given, settings, strategies as st
from launched import python
from world import points, run_on, same

from jaxpar import checkpoint, kv, train
from jaxpar._core import files
from jaxpar.checkpoint import _files, _run
from jaxpar.train._fit.saved import RunInfo, has_good_info

LIKE = {"w": jnp.zeros(3), "n": np.int32(0)}
TX = optax.sgd(0.1, momentum=0.9)
start = functools.partial(world.start_classifier, TX)


def run(directory=None, batch_size=8, **options):
    return run_on(points(24), start(), batch_size=batch_size, checkpoint_dir=directory, **options)


def two(directory):
    """An older and a newer checkpoint, of ones and of twos."""
    for n, name in enumerate(("old", "new"), 1):
        checkpoint.save(directory / name, {"w": jnp.full(3, float(n)), "n": np.int32(n)})
    return directory / "new"


def tree(directory):
    """What is in a directory, with the times of the last changes."""
    files = [p for p in directory.rglob("*") if p.name != ".writer"]  # it is touched every few seconds
    found = {p: (p.lstat().st_mtime_ns, p.lstat().st_size) for p in files}
    return {**found, directory: directory.stat().st_mtime_ns}


# Looking harms nothing.


@pytest.mark.slow
def test_who_looks_while_a_run_writes_harms_nothing(tmp_path, monkeypatch):
    flush, looks = _files._flush_all, []
    directory, metrics = tmp_path / "run", tmp_path / "metrics.jsonl"

    def look(path):
        flush(path)
        before = tree(directory), metrics.read_text()
        assert any(name.startswith(".unfinished-") for name in os.listdir(directory))
        checkpoint.Manager(directory).close()
        found = checkpoint.latest(directory)
        manager = checkpoint.Manager(directory)
        assert (manager.restore_latest(start()) is None) == (found is None)
        if found is not None:
            with pytest.raises(ValueError, match="batches of 8 out of 24 examples, but this run has 12"):
                run(directory, batch_size=12, metrics_file=metrics)
        with pytest.raises(TypeError, match="a callback must be a function"):
            run(directory, callbacks=[3], metrics_file=metrics)
        assert (tree(directory), metrics.read_text()) == before
        looks.append(found)

    monkeypatch.setattr(_files, "_flush_all", look)
    state, _ = run(directory, checkpoint_every=1, metrics_file=metrics, epochs=1)
    monkeypatch.undo()
    assert looks == [None, *(directory / f"step_0000000{n}" for n in (1, 2))]
    same(state, run(epochs=1)[0])
    assert len(metrics.read_text().splitlines()) == 1


def test_a_manager_makes_no_directory_before_it_saves(tmp_path):
    manager = checkpoint.Manager(tmp_path / "a" / "b")
    assert manager.restore_latest(LIKE) is None
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        run(tmp_path / "a" / "b", resume=True)
    assert os.listdir(tmp_path) == []
    manager.save(LIKE)
    manager.close()
    assert os.listdir(tmp_path / "a" / "b") == ["save_00000001"]


def test_leftovers_go_with_a_save_where_their_process_has_certainly_ended(tmp_path):
    ended = python("-c", "from jaxpar._core import process; print(process.tag())").stdout.strip()
    with _files._unfinished(tmp_path) as path:
        mine = path.name.removeprefix(".unfinished-")[:-9]
    machine, number, began = mine.split("-")
    names = {
        f"{ended}-00000001": False,
        f"{machine}-{number}-{int(began) + 1}-00000002": False,  # the number was used again
        f"{mine}-00000003": True,
        f"{machine}-1-0-00000004": True,  # it may have begun at any time
        f"{'a' * 16}-{ended.split('-', 1)[1]}-00000005": True,  # another machine
        f"{'b' * 16}-1-1-00000006": False,  # and one that wrote last a week ago
        "step_00000003-1a2b3c4d": True,  # of an earlier jaxpar
        "step_00000004-1a2b3c4d": False,
    }
    for name in names:
        folder = tmp_path / f".unfinished-{name}"
        folder.mkdir()
        (folder / "part").write_text("some")
        if name.endswith(("6", "4-1a2b3c4d")):
            for path in (folder / "part", folder):
                os.utime(path, (time.time() - 8 * 24 * 3600,) * 2)
    before = tree(tmp_path)
    manager = checkpoint.Manager(tmp_path)
    assert checkpoint.latest(tmp_path) is None
    assert tree(tmp_path) == before
    manager.save(LIKE)
    manager.close()
    assert {n.removeprefix(".unfinished-") for n in os.listdir(tmp_path)} == {
        "save_00000001",
        *(name for name, stays in names.items() if stays),
    }


def leave(directory, name, tag):
    """What a process of this tag left in a directory."""
    folder = directory / f".unfinished-{tag}-{name}"
    shutil.copytree(directory / "step_00000003", folder)
    return folder


def test_what_a_kill_left_beside_a_finished_run_goes_when_it_is_opened_again(tmp_path):
    """No step is left, so nothing is saved."""
    ended = python("-c", "from jaxpar._core import process; print(process.tag())").stdout.strip()
    run(tmp_path, metrics_file=tmp_path / "m.jsonl")
    with _files._unfinished(tmp_path) as path:
        mine = path.name.removeprefix(".unfinished-")[:-9]
    gone, stays = leave(tmp_path, "00000001", ended), leave(tmp_path, "00000002", mine)
    (tmp_path / f".m.jsonl.{ended}").write_text("half a file")
    (tmp_path / f".m.jsonl.{mine}x").write_text("of nobody that is known")
    before = {path.name for path in tmp_path.iterdir()}
    _, history = run(tmp_path, metrics_file=tmp_path / "m.jsonl")
    assert len(history) == 2
    assert before - {path.name for path in tmp_path.iterdir()} == {gone.name, f".m.jsonl.{ended}"}
    checkpoint.save(tmp_path / "mine", LIKE)
    assert stays.exists()


def test_a_save_by_hand_removes_what_one_that_was_killed_left(tmp_path):
    ended = python("-c", "from jaxpar._core import process; print(process.tag())").stdout.strip()
    checkpoint.save(tmp_path / "step_00000003", LIKE)
    gone, stays = leave(tmp_path, "00000001", ended), tmp_path / ".unfinished-thesis"
    stays.mkdir()
    os.utime(stays, (0, 0))  # nobody has the lock of this directory, so what is old may be anybody's
    checkpoint.save(tmp_path / "step_00000006", LIKE)
    assert (gone.exists(), stays.exists()) == (False, True)


# What a save does before, while and after orbax writes. Each may fail: a full disk, a share that is gone, Ctrl-C.
MOMENTS = {
    "the list of checkpoints": (_files, "newest_first"),
    "the records": (_run.Records, "append"),
    "the hashes": (_files.Arrays, "hashes"),
    "the sizes": (_files, "_fingerprints"),
    "the last flush": (_files, "_flush_all"),
}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), KeyboardInterrupt()], ids=["disk", "Ctrl-C"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch, moment, error):
    manager = checkpoint.Manager(tmp_path)
    state = {"w": jnp.ones(1 << 20)}  # long enough that orbax still writes

    def fail(*arguments, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*MOMENTS[moment], fail)
        with pytest.raises(type(error)):
            manager._save(state, {}, records=[{"epoch": 1, "step": 1}]) or manager.wait()
        if moment != "the records":
            with pytest.raises(type(error)):
                checkpoint.save(tmp_path / "by_hand", state)
    assert {path.name for path in tmp_path.iterdir()} <= {".writer", "records.jsonl"}
    manager.save(state)
    manager.close()
    assert checkpoint.latest(tmp_path).name == "save_00000001"


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from jaxpar import checkpoint
from jaxpar.checkpoint import _files
_files.newest_first = lambda directory: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.Manager(sys.argv[1])._save({"w": jnp.ones(1 << 20)}, {})
"""


def test_what_a_save_that_was_killed_before_its_first_file_left_goes_with_the_next(tmp_path):
    python("-c", KILLED, tmp_path, expect=-9)
    assert any(name.startswith(".unfinished-") for name in os.listdir(tmp_path))
    assert checkpoint.latest(tmp_path) is None
    manager = checkpoint.Manager(tmp_path)
    manager.save(LIKE)
    manager.close()
    assert os.listdir(tmp_path) == ["save_00000001"]


def test_a_checkpoint_that_is_rotated_away_while_it_is_read(tmp_path, monkeypatch, capsys):
    new, load = two(tmp_path), _files.read

    def read(path, verified):
        if new.exists():
            shutil.rmtree(new)
            checkpoint.save(tmp_path / "newer", {"w": jnp.full(3, 3.0), "n": np.int32(3)})
        return load(path, verified=verified)

    monkeypatch.setattr(_files, "read", read)
    assert checkpoint.latest(tmp_path) == tmp_path / "newer"
    assert capsys.readouterr().err == ""


# What cannot be read.


def replaced(file, make):
    file.unlink()
    make(file)


DAMAGES = {
    "directory": lambda file: replaced(file, os.mkdir),
    "pipe": lambda file: replaced(file, os.mkfifo),
    "endless": lambda file: replaced(file, lambda path: os.symlink("/dev/zero", path)),
    "circle": lambda file: replaced(file, lambda path: os.symlink(path, path)),
    "gigantic": lambda file: os.truncate(file, 200 << 20),
    "deep": lambda file: file.write_text("[" * 100_000),
    "long number": lambda file: file.write_text("1" * 5000),
}


def passed_over(directory, new, capsys, *words):
    """The newest checkpoint is refused by the package's own error, and every way of looking takes the one before."""
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(new, LIKE)
    assert checkpoint.latest(directory) == directory / "old"
    said = capsys.readouterr().err
    state, _ = checkpoint.Manager(directory).restore_latest(LIKE)
    assert (int(state["n"]), state["w"].tolist()) == (1, [1.0] * 3)
    for text in (str(caught.value), said, capsys.readouterr().err):
        assert all(word in text for word in (str(new), *words)), text


def damages(file):
    """The file cut, changed in one bit, and removed, one after the other."""
    good = file.read_bytes()
    for name, bad in (("cut", good[: len(good) // 2]), ("changed", bytes([good[0] ^ 1]) + good[1:]), ("removed", None)):
        file.write_bytes(bad) if bad is not None else file.unlink()
        yield name
        file.write_bytes(good)


def test_any_damaged_file_is_refused_by_name_and_the_one_before_used(tmp_path, capsys):
    new = two(tmp_path)
    assert checkpoint.latest(tmp_path) == new
    assert capsys.readouterr().err == ""
    names = sorted(p.relative_to(new).as_posix() for p in new.rglob("*") if p.is_file())
    assert "jaxpar.json" in names
    assert len(names) > 4
    found = []
    for name in names:
        for damage in damages(new / name):
            if "/d/" not in name or damage != "changed":
                passed_over(tmp_path, new, capsys, f"{new} is ", name.split("/")[-1])
            # A changed file of arrays is found by the hashes of what is read from it, and the leaf is named. orbax
            # leaves files that nothing is read from.
            elif checkpoint.latest(tmp_path) == new:
                assert checkpoint.restore(new, LIKE)["w"].tolist() == [2.0] * 3
            else:
                found.append(name)
                passed_over(tmp_path, new, capsys, f"{new} is ", "leaf ")
    assert found
    assert checkpoint.latest(tmp_path) == new


def test_a_flipped_bit_that_decodes_is_found_by_the_hash_of_its_leaf(tmp_path):
    """Random bytes do not shrink, so they are on the disk as they are, and a flipped bit still decodes."""
    noise = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
    tree = {"noise": noise, "zeros": jnp.zeros(3)}
    saved = tmp_path / "noise"
    checkpoint.save(saved, tree)
    whole = noise.tobytes()
    (file,) = [p for p in saved.rglob("*") if p.is_file() and whole in p.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(whole) + len(whole) // 2] ^= 1
    file.write_bytes(content)
    for template in (tree, {"noise": jax.ShapeDtypeStruct(noise.shape, noise.dtype), "zeros": jnp.zeros(3)}):
        with pytest.raises(checkpoint.CheckpointError, match="noise"):
            checkpoint.restore(saved, template)


def test_what_can_be_read_again_is_restored_again(tmp_path, capsys):
    """As on a network disk that was away for a while: one `Manager` looks twice."""
    new = two(tmp_path)
    manager, good = checkpoint.Manager(tmp_path), (new / "jaxpar.json").read_bytes()
    for text, n in ((b"", 1), (good, 2), (b"", 1)):
        (new / "jaxpar.json").write_bytes(text)
        assert int(manager.restore_latest(LIKE)[0]["n"]) == n
        assert (f"{new} is " in capsys.readouterr().err) == (n == 1)


@pytest.mark.parametrize("what", DAMAGES)
def test_a_manifest_that_cannot_be_read(tmp_path, capsys, what):
    new = two(tmp_path)
    DAMAGES[what](new / "jaxpar.json")
    passed_over(tmp_path, new, capsys, "jaxpar.json")


def test_an_array_that_cannot_be_read(tmp_path, capsys):
    new = two(tmp_path)
    for what in ("directory", "pipe", "endless", "gigantic"):
        shutil.copytree(new, tmp_path / ".whole", symlinks=True)
        name = next(new.glob("state/ocdbt.process_0/d/*"))
        DAMAGES[what](name)
        passed_over(tmp_path, new, capsys, name.name)
        shutil.rmtree(new)
        os.rename(tmp_path / ".whole", new)
    os.mkfifo(new / "state" / "d" / "pipe")
    passed_over(tmp_path, new, capsys, "state/d/pipe is neither a file nor a directory")


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("name", ["jaxpar.json", "state/_METADATA"])
def test_an_error_of_the_disk(tmp_path, capsys, monkeypatch, number, name):
    new, opens = two(tmp_path), os.open

    def fails(path, *args, **options):
        if os.fspath(path) == os.fspath(new / name):
            raise OSError(number, os.strerror(number), str(path))
        return opens(path, *args, **options)

    monkeypatch.setattr(os, "open", fails)
    passed_over(tmp_path, new, capsys, name, os.strerror(number))


def test_a_run_goes_on_from_the_one_before_to_the_same_bits(tmp_path, capsys):
    expected, history = run(epochs=3)
    run(tmp_path, checkpoint_every=2, epochs=1)  # saves after steps 2 and 3
    replaced(tmp_path / "step_00000003" / "jaxpar.json", os.mkdir)
    state, records = run(tmp_path, checkpoint_every=2, epochs=3)
    news, said = capsys.readouterr()
    assert f"{tmp_path / 'step_00000003'} is unreadable: jaxpar.json: it is not a regular file" in said
    assert "resumed from step 2" in news
    same(state, expected)
    assert [r["loss"] for r in records] == [r["loss"] for r in history]


# What was forged, with the right checksum.


def forge(path, change):
    """Changes the content of a manifest, and gives it its checksum."""
    file = path / "jaxpar.json"
    body = json.loads(file.read_text())["content"]
    changed = change(body)
    text = json.dumps(body if changed is None else changed)
    digest = hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({"sha256": digest, "content": json.loads(text)}))


def entry(path, value):
    """A change that puts a value in a place of the manifest."""

    def change(body):
        *places, last = path
        for place in places:
            body = body[place]
        body[last] = value

    return change


def test_names_that_earlier_releases_gave_params_of_nnx_are_known(tmp_path):
    state = train.create_state(kv.from_params({"a": {"kernel": jnp.arange(3.0)}}, optimizer=optax.sgd(0.1)), 0)
    checkpoint.save(tmp_path / "a", state)
    change = lambda body: json.loads(json.dumps(body).replace("('a/kernel')", "('a/kernel/value')"))  # noqa: E731
    forge(tmp_path / "a", change)
    assert "('a/kernel/value')" in (tmp_path / "a" / "jaxpar.json").read_text()
    restored = checkpoint.restore(tmp_path / "a", jax.tree.map(jnp.zeros_like, state))
    np.testing.assert_array_equal(restored.params["a"]["kernel"], [0, 1, 2])


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


SHA = "0" * 64
BAD_NAMES = ("../old/jaxpar.json", "/dev/zero", "", ".", "a//b", "a\0b", "\ud800", "x" * 300, "jaxpar.json", "\n")
FORGED = [
    lambda body: [],
    lambda body: "text",
    *(entry([name], value) for name in ("order", "format") for value in (-1, 0, True, 1.5, "1", None, float("nan"))),
    entry(["order"], 10**300),
    *(entry(["step"], value) for value in (float("nan"), "7", 10**300, True, [])),
    *(entry([name], value) for name in ("files", "leaves", "info") for value in (None, 3, "text", True)),
    entry(["files"], []),
    entry(["info"], [1]),
    entry(["info"], {"deep": nested(200)}),
    entry(["leaves"], {}),
    entry(["leaves"], [3]),
    *(lambda body, name=name: body.pop(name) and None for name in ("order", "format", "files", "leaves")),
    *(lambda body, n=n: body["leaves"][0].pop(n) and None for n in ("name", "words", "dtype")),
    lambda body: body["leaves"][1].pop("shape") and None,
    *(entry(["leaves", 1, "shape"], v) for v in (3, "33", [-3], [3.0], [None], [2**61, 2**61], [0, 2**63], [3] * 99)),
    *(entry(["leaves", 1, "shape"], v) for v in ([4], [3, 1], [], [2**40], [0])),
    *(entry(["leaves", 1, "dtype"], v) for v in (3, "object", "O", "f4", "float99", "key<fry>", "(" * 9999, "V8", "")),
    *(entry(["leaves", 1, "dtype"], v) for v in ("float64", "int32")),
    *(entry(["leaves", 1, "impl"], v) for v in ("threefry2x32", "none", 3, [])),
    *(entry(["leaves", 1, n], v) for n in ("name", "words") for v in (3, None, [])),
    *(entry(["leaves", 1, "array"], v) for v in (None, 3, "", "n", "../old/w", "w/", "\ud800")),
    *(entry(["leaves", 1, "boxes"], v) for v in (None, 3, [], [[]], [[[[0, 3]], "0"]], [[[[0, 3]], SHA]], [[[], SHA]])),
    *(
        entry(["leaves", 1, "boxes", 0, 0], v)
        for v in ([[0, 2]], [[1, 3]], [[0, 3], [0, 1]], [[0.0, 3]], [[0, 2**62]], [3])
    ),
    *(entry(["leaves", 1, "rows"], v) for v in (None, [], [3], [1, 3], [0, 3], [2, 1], [2**40, 1])),
    lambda body: body["leaves"].append(body["leaves"][0]),
    lambda body: body["leaves"].append({**body["leaves"][0], "name": "more"}),
    *(entry(["files", name], [0, SHA]) for name in BAD_NAMES),
    *(entry(["files", "state/_METADATA"], v) for v in (None, [], [-1, SHA], [1.0, SHA], [10**300, SHA], [3, 3], [3])),
]


@pytest.mark.parametrize("shape", [(5,), (4,), (2, 2), (1, 2, 2)])
def test_what_several_processes_saved_in_rows_is_restored_in_its_shape(tmp_path, shape):
    """A sharded store over processes is on disk as it is in memory, flat in rows, the last of them padded."""
    checkpoint.save(tmp_path / "a", {"w": jnp.arange(6.0).reshape(2, 3)})
    forge(tmp_path / "a", entry(["leaves", 0, "rows"], [2, 3]))
    forge(tmp_path / "a", entry(["leaves", 0, "shape"], list(shape)))
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    if shape[-1] % 2 == 0:  # which each device reads in part
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * (len(shape) - 1), "x"))
        like = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    restored = checkpoint.restore(tmp_path / "a", {"w": like})["w"]
    np.testing.assert_array_equal(restored, np.arange(np.prod(shape)).reshape(shape))


def test_rows_on_disk_have_room_for_the_elements_of_a_leaf(tmp_path):
    """`rows` is the shape on disk of a leaf that a sharded store had in rows."""
    file = two(tmp_path) / "jaxpar.json"
    whole = json.loads(file.read_text())["content"]
    assert whole["leaves"][1]["shape"] == [3]
    for shape, rows in (([3], [1, 2]), ([3], [0, 3]), ([3], [3]), ([0], [0, 0]), ([0], [2, -1]), ([0], [1.0, 0])):
        boxes = whole["leaves"][1]["boxes"] if shape == [3] else []
        leaf = {**whole["leaves"][1], "shape": shape, "rows": rows, "boxes": boxes}
        with pytest.raises(ValueError, match=r"rows|unpack"):
            _files._check({**whole, "leaves": [whole["leaves"][0], leaf]})


@pytest.mark.slow
def test_forged_manifests_are_refused(tmp_path, capsys):
    new = two(tmp_path)
    whole = (new / "jaxpar.json").read_text()
    for i, change in enumerate(FORGED):
        (new / "jaxpar.json").write_text(whole)
        forge(new, change)
        with pytest.raises(checkpoint.CheckpointError, match="new "):
            pytest.fail(f"{i}: {checkpoint.restore(new, LIKE)}")
        assert checkpoint.latest(tmp_path) == tmp_path / "old", i
        assert f"{new} " in capsys.readouterr().err
    (new / "jaxpar.json").write_text(whole)
    assert checkpoint.latest(tmp_path) == new


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tree with everything that a checkpoint can hold: keys, empty arrays, residuals, values that wait."""
    path = tmp_path_factory.mktemp("forged") / "new"
    small = kv.init(kv.create("device"), 5, jnp.zeros(32))
    small = kv.push(kv.set_gradient_compression(small, {"type": "2bit"}), 5, [jnp.full(32, 0.3)] * 2)
    late = kv.push(kv.from_params({"a": jnp.ones(2)}, kind="dist_async", staleness=1, optimizer=TX), 0, jnp.ones(2))
    made = {"n": 3, "e": jnp.zeros((0, 2)), "rng": jax.random.split(jax.random.key(1), 0), "s": small, "l": late}
    checkpoint.save(path, made)
    return path, made, (path / "jaxpar.json").read_text()


HOSTILE = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, 3, 2**40, 2**63, 1e300, float("nan"), "", "..", "/etc/passwd", [], {}, [[]]]
    ),
    st.sampled_from(["residuals/5", "s/residuals/9/x", "l/pending/0/count", "key<fry>", "float32", "int32", [2, 32]]),
    st.recursive(st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)


def places(value, path=()):
    """Every place in a manifest."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield (*path, name)
        yield from places(part, (*path, name))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(choices=st.data())
def test_whatever_is_forged_is_refused_or_restored(whole, choices):
    path, made, text = whole
    (path / "jaxpar.json").write_text(text)
    found = sorted(places(json.loads(text)["content"]), key=str)

    def change(body):
        for place in choices.draw(st.lists(st.sampled_from(found), min_size=1, max_size=2)):
            *above, last = place
            within = body
            try:
                for name in above:
                    within = within[name]
                if choices.draw(st.booleans()):
                    within[last] = choices.draw(HOSTILE)
                else:
                    del within[last]
            except (KeyError, IndexError, TypeError):
                pass  # the first of two changes took it away

    forge(path, change)
    good = checkpoint.latest(path.parent) == path
    try:
        checkpoint.restore(path, made)
        restored = True
    except checkpoint.CheckpointError as error:
        restored, fits = False, "does not fit `like`" not in str(error)
    assert good == (restored or not fits)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of orbax, which opens all at once
def test_arrays_of_another_checkpoint_are_refused_though_every_checksum_is_right(tmp_path):
    new = two(tmp_path)
    for name, change in (("cut", lambda f: os.truncate(f, 5)), ("gone", os.unlink)):
        path = shutil.copytree(new, tmp_path / name)
        for file in path.glob("state/**/d/*"):
            change(file)
        now = {}
        for file in (file for file in path.rglob("*") if file.is_file() and file.suffix != ".json"):
            size, sha256 = files.fingerprint(file, file.stat().st_size)
            now[file.relative_to(path).as_posix()] = [size, "" if file.parent.name == "d" else sha256]
        forge(path, entry(["files"], now))
        forge(path, entry(["order"], 9))
        with pytest.raises(checkpoint.CheckpointError, match=r"is damaged: leaf '.' \(.\): "):
            checkpoint.restore(path, LIKE)
        assert checkpoint.latest(tmp_path) == new
        shutil.rmtree(path)


@pytest.mark.slow
def test_a_forged_info_of_a_run_is_passed_over(tmp_path, capsys):
    expected, _ = run(epochs=2)
    run(tmp_path, checkpoint_every=2, epochs=1)
    shutil.copytree(tmp_path, tmp_path / "copy")
    wrong = {
        "first": [-1, 9, "0", None],
        "batch_size": ["8", None],
        "examples": [-1, None],
        "history": [3, {}, [3], [{}], [{"epoch": "1", "step": 3}]],
        "stopped": [3],
        "interrupted": ["yes"],
        "callbacks": [3, [3], [{"name": 3, "names": [], "values": []}]],
        "ended_by": [3, [3], [""]],
        "limit": [-1, "3"],
        "run": [3],
        "data": [3],
        "epochs_over": [-1],
        "epoch_began": ["0"],
        "place": ["x"],
        "sums": [[], {"loss": "x"}],
        "counted": [-1],
        "seconds": ["x"],
        "rates": [[], {"learning_rate": "x"}],
        "made_by": [[]],
        "left_out": [3, [-1]],
        "certificate": [3],
        "forked_from": [["x"], ["x", -1]],
    }
    assert wrong.keys() == {field.name for field in dataclasses.fields(RunInfo)}
    for name, values in wrong.items():
        for value in values:
            forge(tmp_path / "copy" / "step_00000003", entry(["info", name], value))
            found = checkpoint.Manager(tmp_path / "copy")._restore(start, has_good_info)
            assert int(found[0].step) == 2, (name, value)
            assert f"wrong {name}" in capsys.readouterr().err
            shutil.copy(tmp_path / "step_00000003" / "jaxpar.json", tmp_path / "copy" / "step_00000003")
    forge(tmp_path / "step_00000003", entry(["info", "history"], 3))
    state, _ = run(tmp_path, epochs=2)
    assert "step_00000003 is damaged: wrong history in the info of the run" in capsys.readouterr().err
    same(state, expected)


def test_nothing_is_saved_that_would_be_refused(tmp_path, monkeypatch):
    manager = checkpoint.Manager(tmp_path)
    for info in ([1], {"deep": nested(150)}, {"deep": nested(5000)}, {"set": {1}}):
        with pytest.raises((TypeError, ValueError, RecursionError)):  # of Python, but for the depth
            manager.save(LIKE, info)
    monkeypatch.setattr(_files, "MOST_BYTES", 1500)
    manager.save(LIKE, {"long": "x" * 2000})
    with pytest.raises(OSError, match=r"could not be written \(the manifest has .* bytes, more than 1500"):
        manager.wait()
    manager.close()
    assert os.listdir(tmp_path) == []


def test_what_a_forger_wrote_is_escaped_on_the_terminal(tmp_path, capsys):
    checkpoint.save(tmp_path / "a\x1b[31m", LIKE)
    forge(tmp_path / "a\x1b[31m", entry(["files", "\x1b]0;title\x07"], [0, SHA]))
    assert checkpoint.latest(tmp_path) is None
    said = capsys.readouterr().err
    assert "\\x1b]0;title\\x07" in said
    assert "\x1b" not in said
