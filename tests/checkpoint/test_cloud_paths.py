"""Checkpoints in buckets, `gs://` and `s3://`, against a server on loopback that answers as both do."""

import functools
import itertools
import json
import os
import signal
import sys
import threading
import time

import fake_bucket
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import world
from launched import background, python
from several_processes import Run
from world import numbers, points, run_on, same

from jaxpar import checkpoint, kv, train
from jaxpar._core import process
from jaxpar.checkpoint import _bucket, _run

pytestmark = pytest.mark.slow
TX = optax.sgd(0.1, momentum=0.9)
start = functools.partial(world.start_classifier, TX)
LIKE = {"w": np.zeros(3, np.float32), "n": np.int32(0)}
MANIFEST, LOCK = "jaxpar.json", ".writer"
FOREIGN = "0123456789abcdef-77-1"  # the tag of a process of another machine
numbered = itertools.count()


def run(directory=None, **options):
    """Three steps an epoch, two epochs."""
    return run_on(points(24), start(), batch_size=8, checkpoint_dir=directory, **options)


def value(n):
    return {"w": np.full(3, n, np.float32), "n": np.int32(n)}


@pytest.fixture(scope="module")
def server():
    buckets = fake_bucket.Buckets()
    with pytest.MonkeyPatch.context() as patch:
        for name, text in buckets.env().items():
            patch.setenv(name, text)
        yield buckets
    buckets.close()


@pytest.fixture(params=["gs", "s3"])
def folder(request, server, monkeypatch):
    """A path in an empty bucket."""
    monkeypatch.setattr(server, "before", lambda method, bucket, name: None)
    return f"{request.param}://bucket{next(numbered)}/runs/a run [1]"


def names(server, folder):
    """The names of the objects below a path."""
    bucket, _, prefix = folder.partition("://")[2].partition("/")
    return [name.removeprefix(f"{prefix}/") for name in server.names(bucket)]


def change(server, folder, name, edit):
    bucket, _, prefix = folder.partition("://")[2].partition("/")
    content, _ = server.objects[bucket, f"{prefix}/{name}"]
    server.put(bucket, f"{prefix}/{name}", edit(content), lambda found: True)


def temporary():
    """What this process has left in the temporary folder of this machine."""
    return list(_bucket.temporary_folder().glob(f".unfinished-{process.tag()}-*"))


def test_what_is_saved_by_hand_is_restored_to_the_bit(server, folder):
    state = {
        "key": jax.random.key(3),
        "narrow": jnp.arange(5, dtype=jnp.bfloat16),
        "none": np.zeros((0, 3)),
        "number": 2.5,
        "shares": kv.from_params({"w": jnp.arange(7.0)}, kind="sharded"),
    }
    checkpoint.save(f"{folder}/first", state)
    with pytest.raises(FileExistsError, match=r"first exists already"):
        checkpoint.save(f"{folder}/first", state)
    checkpoint.save(f"{folder}/second", state)
    found = checkpoint.latest(folder)
    assert str(found) == os.fspath(found) == f"{folder}/second"
    assert (found.name, str(found.parent)) == ("second", folder)
    for path in (found, str(found)):
        restored = checkpoint.restore(path, state)
        assert str(checkpoint._StateHash(restored)) == str(checkpoint._StateHash(state))
    # Each has its arrays, and nothing is left of the way there: no claim, no file of this machine.
    assert {name.split("/")[0] for name in names(server, folder)} == {"first", "second"}
    assert temporary() == []
    assert checkpoint.best(folder) is None
    assert checkpoint.latest(f"{folder}/first") is None
    with pytest.raises(FileNotFoundError, match="there is nothing at"):
        checkpoint.restore(f"{folder}/third", state)
    with pytest.raises(checkpoint.CheckpointError, match="does not fit `like`"):
        checkpoint.restore(found, LIKE)


def test_the_last_few_and_the_best_stay(server, folder):
    manager = checkpoint.Manager(folder, keep=2)
    assert names(server, folder) == []
    for n in range(1, 6):
        manager.save(value(n), {"n": n}, best=n == 2)
    manager.close()
    assert {name.split("/")[0] for name in names(server, folder)} == {f"save_0000000{n}" for n in (2, 4, 5)}
    assert checkpoint.best(folder).name == "save_00000002"
    assert manager.restore_best(LIKE)[1] == {"n": 2}
    state, info = manager.restore_latest(LIKE)
    assert info == {"n": 5}
    assert state["w"].tolist() == [5, 5, 5]
    assert "save_00000005" in repr(manager)
    assert f"Manager({folder}" in repr(manager)


def test_a_run_goes_on_to_the_same_bits(server, folder, capsys):
    expected, records = run(epochs=4, test_data=points(16), apply_fn=world.apply)
    options = {"test_data": points(16), "apply_fn": world.apply, "callbacks": [train.KeepBest()]}
    run(folder, epochs=1, checkpoint_every=2, **options)
    run(folder, epochs=2, checkpoint_every=2, **options)
    state, history = run(folder, epochs=4, checkpoint_every=2, keep=1, **options)
    same(state, expected)
    assert numbers(history) == numbers(records)
    assert "resumed from step 6 in " + folder in capsys.readouterr().out
    kept = {name.split("/")[0] for name in names(server, folder) if "/" in name}
    assert kept == {"step_00000012", checkpoint.best(folder).name}
    assert LOCK not in names(server, folder)  # given up


KILLED = """
import sys, test_cloud_paths
test_cloud_paths.run(sys.argv[1], checkpoint_every=1, keep=1)
"""


def test_a_run_that_is_killed_in_any_request_goes_on_to_the_same_bits(server, folder, monkeypatch):
    """Also where it removes an old checkpoint, or makes its first one."""
    expected, records = run()
    bucket = folder.partition("://")[2].partition("/")[0]
    monkeypatch.setattr(_run, "_STALE", 0.5)

    def killed_at(number):
        """Run in another process that is killed at its request of this number, before or after it is carried out."""
        for key in [key for key in server.objects if key[0] == bucket]:
            del server.objects[key]
        seen, child = [], background([sys.executable, "-c", KILLED, folder], JAX_NUM_CPU_DEVICES="8")

        def before(method, where, name):
            # The lock is written again every few seconds, however many these are.
            if where == bucket and method not in ("GET", "HEAD") and not name.endswith(LOCK):
                seen.append((method, name))
                if len(seen) == number:
                    child.kill()
                    child.wait()
                    return 503 if number % 2 else None  # a request may be carried out, whether its process lives or not

        server.before = before
        child.communicate()
        server.before = lambda method, where, name: None
        return child.returncode, seen

    code, undisturbed = killed_at(0)
    assert code == 0
    assert len(undisturbed) > 40
    halves = 0
    for number in range(2, len(undisturbed) - 9, len(undisturbed) // 5):
        code, _ = killed_at(number)
        assert code == -signal.SIGKILL
        halves += any("unfinished" in repr(content) for key, (content, _) in server.objects.items() if key[0] == bucket)
        state, history = run(folder, checkpoint_every=1, keep=1)
        same(state, expected)
        assert numbers(history) == numbers(records)
        assert {name.split("/")[0] for name in names(server, folder)} == {"step_00000006", "records.jsonl"}
    assert halves


def test_a_flipped_byte_costs_one_checkpoint(server, folder, capsys):
    """In whichever object, also in the manifest; so does an object that is missing."""
    for n in (1, 2):
        checkpoint.save(f"{folder}/{n}", value(n))
    flip = lambda content: content[:-3] + bytes([content[-3] ^ 4]) + content[-2:]  # noqa: E731
    whole = dict(server.objects)
    found = [name for name in names(server, folder) if name.startswith("2/")]
    seen = 0
    for name in found:
        change(server, folder, name, flip)
        newest = checkpoint.Manager(folder).restore_latest(LIKE)[0]
        if newest["n"] == 2:  # an index of one process, which nobody reads after that of all
            assert newest["w"].tolist() == [2, 2, 2]
            assert "/ocdbt.process_0/d/" in name
        else:
            assert newest["w"].tolist() == [1, 1, 1]
            assert "2 is damaged" in capsys.readouterr().err
            with pytest.raises(checkpoint.CheckpointError, match="damaged"):
                checkpoint.restore(f"{folder}/2", LIKE)
            seen += 1
        server.objects.clear()
        server.objects.update(whole)
    assert seen > len(found) // 2
    for name in found:
        del server.objects[_key(folder, name)]
        assert checkpoint.latest(folder).name == "1"
        server.objects.update(whole)
    assert checkpoint.latest(folder).name == "2"


def claimed(server, folder, name, **more):
    """An object that says that a process of another machine is at work."""
    bucket, _, prefix = folder.partition("://")[2].partition("/")
    holder = {"owner": FOREIGN, "host": "elsewhere", "pid": 77, "token": "t", "time": 0, **more}
    content = {"unfinished": holder} if name.endswith(MANIFEST) else holder
    server.put(bucket, f"{prefix}/{name}", json.dumps(content).encode(), lambda found: True)


def test_one_run_writes_to_a_directory(server, folder, monkeypatch, capsys):
    monkeypatch.setattr(_run, "_STALE", 2.0)
    manager = checkpoint.Manager(folder)
    manager.save(value(1))
    manager.wait()
    program = f"from jaxpar import checkpoint; checkpoint.Manager({folder!r}).save({{'n': 1}})"
    refused = python("-c", program, expect=1).stderr
    assert f"OSError: checkpoint: {folder} belongs to process {os.getpid()} on" in refused
    assert "one run at a time writes to a directory" in refused
    other = checkpoint.Manager(folder)  # of the same process
    other.save(value(2))
    other.close()
    manager.close()
    python("-c", program)

    # One of another machine that goes on, and one that does not.
    claimed(server, folder, LOCK)
    goes_on = threading.Event()

    def write_again():
        for n in itertools.count():
            if goes_on.wait(0.3):
                return
            claimed(server, folder, LOCK, writes=n)

    thread = threading.Thread(target=write_again)
    thread.start()
    with pytest.raises(OSError, match="belongs to process 77 on elsewhere, which runs"):
        checkpoint.Manager(folder).save(value(3))
    goes_on.set()
    thread.join()
    claimed(server, folder, f"step_00000009/{MANIFEST}", time=int(2e9))
    claimed(server, folder, f"step_00000010/{MANIFEST}", time=int(2e9), owner=FOREIGN[:-1] + "2")
    manager.save(value(4))
    manager.close()
    assert "waiting 2 seconds to see whether it runs" in capsys.readouterr().err
    assert manager.restore_latest(LIKE)[0]["n"] == 4
    left = {name.split("/")[0] for name in names(server, folder)}
    assert "step_00000009" not in left  # of the process whose lock was taken over
    assert "step_00000010" in left  # of one that may be at work


def test_a_run_that_was_stopped_for_long_writes_nothing_more(server, folder, monkeypatch):
    manager = checkpoint.Manager(folder)
    manager.save(value(1))
    manager.wait()
    claimed(server, folder, LOCK)
    before = names(server, folder)
    with pytest.raises(OSError, match="was taken over by process 77 on elsewhere while this process was stopped"):
        manager.save(value(2))
    manager.close()
    assert names(server, folder) == before  # also the lock of the other
    assert b"elsewhere" in server.get(*_key(folder, LOCK))[0]


def _key(folder, name):
    bucket, _, prefix = folder.partition("://")[2].partition("/")
    return bucket, f"{prefix}/{name}"


def test_what_was_removed_meanwhile_is_not_completed(server, folder):
    """A process was stopped in the midst of a save, and another one removed what it had sent."""

    def before(method, bucket, name):
        if method in ("PUT", "POST") and name.endswith("manifest.ocdbt"):
            server.before = lambda *request: None
            claimed(server, folder, f"mine/{MANIFEST}")

    server.before = before
    with pytest.raises(OSError, match=r"mine could not be written \(another process has written it meanwhile"):
        checkpoint.save(f"{folder}/mine", value(1))
    assert checkpoint.latest(folder) is None
    assert b"elsewhere" in server.get(*_key(folder, f"mine/{MANIFEST}"))[0]  # the claim of the other stays
    with pytest.raises(checkpoint.CheckpointError, match="is not complete: process 77 on elsewhere has not finished"):
        checkpoint.restore(f"{folder}/mine", LIKE)


def test_an_answer_that_was_lost_is_no_other_writer(server, folder):
    """tensorstore repeats the request, and finds that the object has another generation than it asked for."""
    put, lost = server.put, []

    def put_and_lose(bucket, name, content, is_allowed):
        generation = put(bucket, name, content, is_allowed)
        if generation is not None and name not in lost and (name.endswith(MANIFEST) or name.endswith(LOCK)):
            lost.append(name)
            raise ConnectionError
        return generation

    server.put = put_and_lose
    try:
        manager = checkpoint.Manager(folder)
        manager.save(value(1))
        manager.close()
    finally:
        del server.put
    assert len(lost) == 2
    assert manager.restore_latest(LIKE)[0]["n"] == 1


def test_a_bucket_that_does_not_answer_is_an_error(server, folder, monkeypatch):
    """And no reason to take an earlier checkpoint, or to begin again."""
    monkeypatch.setattr(_bucket, "_RETRIES", {"max_retries": 1, "initial_delay": "10ms"})
    other = folder.replace("://bucket", "://other")
    run(folder, epochs=1)
    checkpoint.save(f"{other}/one", value(1))
    for status in (403, 503):
        server.before = lambda method, bucket, name, status=status: status
        for call in (
            lambda: checkpoint.latest(folder),
            lambda: checkpoint.restore(f"{folder}/step_00000003", start()),
            lambda: checkpoint.save(f"{folder}/more", value(1)),
            lambda: run(folder),
        ):
            with pytest.raises(OSError, match="cannot be read or written"):
                call()
        # While it writes.
        server.before = lambda method, bucket, name, status=status: status if "/d/" in name else None
        with pytest.raises(OSError, match="more could not be written"):
            checkpoint.save(f"{folder}/more", value(1))
        server.before = lambda method, bucket, name: None
        assert checkpoint.latest(folder).name == "step_00000003"
        assert not any(name.startswith("more/") for name in names(server, folder))


@pytest.mark.parametrize("refused", ["d/", "_CHECKPOINT_METADATA", "manifest.ocdbt"])
def test_nothing_arrives_after_a_failed_save(server, folder, refused):
    """Several objects are on their way at a time. One is refused at once, and the others take longer."""

    def before(method, bucket, name):
        if method in ("PUT", "POST") and "/more/" in name and not name.endswith(MANIFEST):
            if refused in name:
                return 403
            time.sleep(0.3)
        return None

    server.before = before
    with pytest.raises(OSError, match="more could not be written"):
        checkpoint.save(f"{folder}/more", value(1))
    assert names(server, folder) == []
    time.sleep(0.5)
    assert names(server, folder) == []


def test_a_store_without_conditions_is_refused(server, folder, monkeypatch):
    monkeypatch.setattr(server, "ignores_conditions", True)
    with pytest.raises(OSError, match="ignores the conditions of a write"):
        checkpoint.save(f"{folder}/one", value(1))
    with pytest.raises(OSError, match="ignores the conditions of a write"):
        checkpoint.Manager(folder).save(value(1))


def test_params_alone(server, folder):
    pytest.importorskip("safetensors")
    checkpoint.export({"dense": {"kernel": jnp.ones((2, 3))}}, f"{folder}/model.safetensors")
    assert checkpoint.load(f"{folder}/model.safetensors")["dense.kernel"].shape == (2, 3)
    with pytest.raises(FileNotFoundError, match="there is nothing at"):
        checkpoint.load(f"{folder}/other.safetensors")


def test_frozen_params_are_in_each_checkpoint(server, folder):
    params = {"base": jnp.arange(4.0), "head": jnp.zeros(2)}
    state, _ = train.start(params, TX, lambda p, batch: (p["head"] ** 2).sum() + 0 * p["base"].sum(), frozen="base")
    for name in ("a", "b"):
        checkpoint.save(f"{folder}/{name}", state)
        assert any(n.startswith(f"{name}/frozen/state/d/") for n in names(server, folder))
    restored = checkpoint.restore(f"{folder}/b", state)
    assert restored.params["base"].tolist() == [0, 1, 2, 3]


def test_a_copy_on_a_disk_is_a_checkpoint_there(server, folder, tmp_path):
    checkpoint.save(f"{folder}/one", value(1))
    for name in names(server, folder):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(server.get(*_key(folder, name))[0])
    assert checkpoint.latest(tmp_path) == tmp_path / "one"
    assert checkpoint.restore(tmp_path / "one", LIKE)["w"].tolist() == [1, 1, 1]


def test_paths(server, folder):
    scheme = folder[:2]
    path = _bucket.parse(f"{scheme}://name//a/b/", "f: x")
    assert str(path) == f"{scheme}://name/a/b"
    assert str(path.parent.parent) == f"{scheme}://name"
    assert repr(path) == f"BucketPath('{scheme}://name/a/b')"
    shown = {name for name in dir(path) if not name.startswith("_")}  # by Tab: parts of a path, and no requests
    assert shown == {"bucket", "key", "name", "parent"}
    assert _bucket.parse(f"{scheme}:/name/a/b", "f: x") == path == _bucket.parse(path, "f: x")  # as pathlib has it
    for wrong in (f"{scheme}://", f"{scheme}://name/../x", f"{scheme}://name/$JOB"):
        with pytest.raises(ValueError, match="f: x is"):
            _bucket.parse(wrong, "f: x")
    for other in ("x", "/x", "file:///x", f"simplecache::{scheme}://x/y", 3, None):
        assert _bucket.parse(other, "f: x") is None
    with pytest.raises(ValueError, match=r"f: x is 'hf://x/y', on another system \(hf\).*gs://bucket/folder"):
        _bucket.as_path("hf://x/y", "f: x")
    with pytest.raises(ValueError, match="on another system"):
        train.open(folder)


@pytest.mark.parametrize("scheme", ["gs"])
def test_several_processes(server, scheme, tmp_path, monkeypatch):
    """Each sends its shards. After a kill of all, as many go on to the same bits, and one with all devices does too."""
    folder = f"{scheme}://bucket{next(numbered)}/runs"
    bucket = folder.partition("://")[2].partition("/")[0]
    monkeypatch.setenv("BUCKET", folder)
    done = f"runs/run/step_00000002/{MANIFEST}"

    def is_saved():
        content, _ = server.get(bucket, done) or (b"unfinished", 0)
        return b"unfinished" not in content

    def refuse(method, where, name):
        return 403 if "/refused/state/ocdbt.process_1/" in name else None

    monkeypatch.setattr(server, "before", refuse)
    with Run("bucket_run.py", tmp_path / "first", 2, 2, "by_hand", "undisturbed", "killed") as first:
        first.wait(until=is_saved)

    # The next one is killed while process 1 sends its shards.
    killed = threading.Event()

    def kill(method, where, name):
        if "/run/step_00000004/state/ocdbt.process_1/" in name and method == "POST":
            killed.set()

    monkeypatch.setattr(server, "before", kill)
    with Run("bucket_run.py", tmp_path / "second", 2, 2, "resumed") as second:
        second.wait(until=killed.is_set)
    assert not server.get(bucket, "runs/run/step_00000006/jaxpar.json")
    monkeypatch.setattr(server, "before", lambda *request: None)
    with Run("bucket_run.py", tmp_path / "again", 2, 2, "resumed") as again:
        again.wait()
    expected, got = first.saved("undisturbed.npz"), again.saved("resumed.npz")
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].tobytes() == expected[name].tobytes(), name
    there = names(server, folder)
    assert any("/ocdbt.process_1/d/" in name for name in there)
    assert {name.split("/")[1] for name in there if name.startswith("run/")} >= {"records.jsonl", "step_00000006"}
    assert not any(".unfinished" in name or name.endswith(LOCK) for name in there if name.startswith("run/"))
    claims = [
        name for name in there if name.endswith(MANIFEST) and b"unfinished" in server.get(bucket, f"runs/{name}")[0]
    ]
    assert claims == [f"refused/{MANIFEST}"]
    assert checkpoint.latest(f"{folder}/run").name == "step_00000006"
