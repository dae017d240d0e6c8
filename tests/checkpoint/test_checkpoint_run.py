"""The directory of a run: one process claims it, and the records of its epochs are appended to a file."""

import errno
import json
import os
import subprocess
import threading

import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from launched import python, until
from world import points, run_on, same, save_by_manager, start_classifier

from jaxpar import checkpoint
from jaxpar._core import files
from jaxpar._core.process import _stat, tag
from jaxpar.checkpoint import _adopt, _files, _run, _whole_copy

LIKE = {"w": jnp.zeros(3)}


def run(directory, **options):
    return run_on(points(16), start_classifier(count=1), batch_size=8, checkpoint_dir=directory, **options)


def content(path):
    return json.loads((path / "jaxpar.json").read_text())["content"]


# Records


def records(number, first=1):
    return [{"epoch": n, "loss": 1 / n, "odd": float("nan")} for n in range(first, first + number)]


def test_a_save_writes_only_what_is_new(tmp_path):
    state, history = run(tmp_path, epochs=3)
    assert content(tmp_path / "step_00000006")["records"]["number"] == 3
    _, longer = run(tmp_path, epochs=4)
    assert longer[:3] == history
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["record"] for line in lines] == longer
    assert checkpoint.Manager(tmp_path).restore_latest(state)[1]["history"] == longer


@pytest.mark.slow
def test_a_record_of_the_epoch_20001_writes_one_line(tmp_path):
    writer, before = _run.Records(tmp_path), records(20_000)
    writer.append(before)
    size = (tmp_path / "records.jsonl").stat().st_size
    place = writer.append(before + records(1, 20_001))
    assert (tmp_path / "records.jsonl").stat().st_size - size < 300
    assert place["number"] == 20_001
    assert len(json.dumps(place)) < 150
    assert str(_run.Records(tmp_path).read(place)) == str(records(20_001))


def test_checkpoints_keep_their_records_where_a_run_goes_on_from_an_older_one(tmp_path):
    places, writer = [], _run.Records(tmp_path)
    for n in (1, 2, 3):
        places.append(writer.append(records(n)))
    older = _run.Records(tmp_path)
    older.read(places[0])
    other = [*records(1), *records(2, first=7)]
    branch = older.append(other)
    for place, expected in [*((p, records(n)) for n, p in enumerate(places, 1)), (branch, other)]:
        assert str(_run.Records(tmp_path).read(place)) == str(expected)
    again = older.append(records(2, first=30))  # another history: all of it is written
    assert str(_run.Records(tmp_path).read(again)) == str(records(2, first=30))


def test_a_line_that_was_cut_short_costs_no_other(tmp_path):
    writer = _run.Records(tmp_path)
    first = writer.append(records(2))
    with open(tmp_path / "records.jsonl", "ab") as file:
        file.write(b'{"record": {"epo')
    second = writer.append(records(3))
    assert str(_run.Records(tmp_path).read(first)) == str(records(2))
    assert str(_run.Records(tmp_path).read(second)) == str(records(3))


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    def fails(handle):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=r"Input/output error: '.*records.jsonl'"):
        run(tmp_path)


@settings(deadline=None, max_examples=200)
@given(at=st.integers(0, 600), bit=st.integers(0, 7), cut=st.booleans())
def test_damaged_records_are_refused_or_whole(tmp_path_factory, at, bit, cut):
    folder = tmp_path_factory.mktemp("records")
    writer = _run.Records(folder)
    place = writer.append(records(4))
    file = folder / "records.jsonl"
    raw = bytearray(file.read_bytes())
    at %= len(raw)
    raw[at] ^= 1 << bit
    file.write_bytes(raw[:at] if cut else raw)
    with pytest.raises(checkpoint.CheckpointError, match=r"records.jsonl is damaged: record [1-4]: "):
        _run.Records(folder).read(place)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", ["missing", "pipe", "endless", "folder", "number", "circle"])
def test_records_that_cannot_be_read_cost_no_state(tmp_path, capsys, monkeypatch, what):
    monkeypatch.setattr(_run, "INSIDE", 1)
    state, history = run(tmp_path, epochs=2)
    file = tmp_path / "records.jsonl"
    place = content(tmp_path / "step_00000004")["records"]
    if what == "number":
        with pytest.raises(checkpoint.CheckpointError, match="does not have the 3 records"):
            _run.Records(tmp_path).read({**place, "number": 3})
        with pytest.raises(checkpoint.CheckpointError, match="does not have the 1 records"):
            _run.Records(tmp_path).read({**place, "number": 1})
        return
    file.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "circle": lambda f: f.symlink_to(f)}.get(what, lambda f: None)(file)
    if what == "endless":
        file.symlink_to("/dev/zero")
    again, info = checkpoint.Manager(tmp_path).restore_latest(state)
    same(again, state)
    assert info["history"] == history[1:]
    assert "step_00000004 is restored with the last 1 of its 2 records" in capsys.readouterr().err


@pytest.mark.parametrize("place", [{}, {"number": 0}, {"at": -1}, {"at": True}, {"sha256": "x"}, {"more": 1}])
def test_a_forged_place_is_refused(place):
    good = {"number": 1, "at": 0, "sha256": "0" * 64}
    with pytest.raises(ValueError, match="must"):
        _files.check_place({**good, **place} if place else {})


def test_a_checkpoint_alone_has_its_last_records(tmp_path, capsys):
    _, history = run(tmp_path / "here", epochs=2)
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "step_00000004").rename(tmp_path / "there" / "moved")
    for _ in range(2):
        _, longer = run(tmp_path / "there", epochs=3)
    assert longer[:2] == history
    assert len((tmp_path / "there" / "records.jsonl").read_text().splitlines()) == 3
    assert capsys.readouterr().err == ""


def test_a_run_does_not_grow(tmp_path):
    manager, sizes = checkpoint.Manager(tmp_path), []
    for number in (64, 65, 2000):
        manager._save(LIKE, {"mine": 1}, records=records(number))
        manager.wait()
        sizes.append((manager.directory / f"save_{len(sizes) + 1:08d}" / "jaxpar.json").stat().st_size)
    manager.close()
    assert max(sizes) - min(sizes) < 0.2 * min(sizes)
    assert str(manager.restore_latest(LIKE)[1]) == str({"mine": 1, "history": records(2000)})


def test_a_checkpoint_of_before_has_its_history(tmp_path):
    _, history = run(tmp_path / "new", epochs=2)
    state, info = checkpoint.Manager(tmp_path / "new").restore_latest(run(None)[0])
    save_by_manager(tmp_path / "old", state, info)  # the history is in the info
    assert not (tmp_path / "old" / "records.jsonl").exists()
    assert run(tmp_path / "old", epochs=3)[1][:2] == history
    assert len((tmp_path / "old" / "records.jsonl").read_text().splitlines()) == 3


# Claims


def claimed_by(directory, owner, pid=77):
    directory.mkdir(exist_ok=True)
    said = {"owner": owner, "host": "far\x1b[2J", "pid": pid, "token": "x"}
    (directory / ".writer").write_text(json.dumps(said))


@pytest.fixture
def sleeper():
    """Another process of this machine, and its name."""
    process = subprocess.Popen(["sleep", "60"])
    machine = tag().split("-")[0]
    yield process, f"{machine}-{process.pid}-{_stat(process.pid)[1]}"
    process.kill()
    process.wait()


def test_one_process_writes_to_a_directory(tmp_path, sleeper):
    process, owner = sleeper
    claimed_by(tmp_path, owner, process.pid)
    before = (tmp_path / ".writer").read_bytes()
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(OSError, match=rf"belongs to process {process.pid} on far\\x1b\[2J, which runs and writes"):
        run(tmp_path, metrics_file=tmp_path / "metrics.jsonl")
    manager = checkpoint.Manager(tmp_path)
    with pytest.raises(OSError, match="one run at a time writes to a directory"):
        manager.save(LIKE)
    manager.close()
    assert (tmp_path / ".writer").read_bytes() == before
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == [".writer", "metrics.jsonl"]
    process.kill()  # it is a zombie now
    until(lambda: _stat(process.pid)[0] == "Z", 60)
    run(tmp_path, epochs=1)
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "records.jsonl", "step_00000002"]


@pytest.mark.parametrize("change", [lambda began: began + 1, lambda began: began])
def test_a_claim_of_a_process_that_ended_is_taken_over(tmp_path, sleeper, change):
    process, owner = sleeper
    machine, number, began = owner.split("-")
    if change(int(began)) == int(began):
        process.kill()
        process.wait()
    claimed_by(tmp_path, f"{machine}-{number}-{change(int(began))}")  # else another process has its number now
    save_by_manager(tmp_path, LIKE)
    assert os.listdir(tmp_path) == ["save_00000001"]


FAR = f"{'a' * 16}-5-5"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("owner", [FAR, "", "no name", "0" * 16 + "-5-5"])
def test_a_claim_of_another_machine_is_watched(tmp_path, monkeypatch, capsys, owner):
    monkeypatch.setattr(_run, "_LOOK_EVERY", 0.02)
    claimed_by(tmp_path, owner)
    ended = threading.Event()

    def touch():
        while not ended.wait(0.05):
            os.utime(tmp_path / ".writer")

    thread = threading.Thread(target=touch)
    thread.start()
    claim = _run.DirectoryLock(tmp_path)
    with pytest.raises(OSError, match="belongs to process 77 on far"):
        claim.acquire()
    ended.set()
    thread.join()
    monkeypatch.setattr(_run, "_STALE", 0.4)  # not before: a busy machine may delay a touch for longer
    claim.acquire()
    claim.release()
    assert os.listdir(tmp_path) == []
    said = capsys.readouterr().err
    assert "was claimed by process 77 on far" in said
    assert "waiting 20 seconds to see whether it runs" in said
    assert "waiting 0 seconds to see whether it runs" in said
    assert "\x1b" not in said


def test_a_claim_that_was_lost_is_not_written_over(tmp_path):
    manager = checkpoint.Manager(tmp_path)
    manager.save(LIKE)
    manager.wait()
    claimed_by(tmp_path, FAR)
    with pytest.raises(OSError, match=r"was taken over by process 77 on far.* while this process was stopped"):
        manager.save(LIKE)
    manager.close()
    assert sorted(os.listdir(tmp_path)) == [".writer", "save_00000001"]


def test_managers_of_one_process_share_a_claim(tmp_path):
    one, two = checkpoint.Manager(tmp_path), checkpoint.Manager(tmp_path)
    one.save(LIKE)
    one.wait()
    two.save(LIKE)
    two.wait()
    one.close()
    assert ".writer" not in os.listdir(tmp_path)
    two.save(LIKE)
    two.wait()
    assert ".writer" in os.listdir(tmp_path)
    del two  # without `close`
    assert ".writer" not in os.listdir(tmp_path)
    one.save(LIKE)
    one.close()
    assert sorted(os.listdir(tmp_path)) == [f"save_{n:08d}" for n in (2, 3, 4)]


def test_of_two_that_take_a_claim_over_one_has_it(tmp_path, monkeypatch, sleeper):
    process, owner = sleeper
    claimed_by(tmp_path, FAR)
    os.utime(tmp_path / ".writer", (1, 1))
    rename = os.rename

    def race(*paths):
        monkeypatch.undo()
        claimed_by(tmp_path, owner, process.pid)  # it was faster
        rename(*paths)

    monkeypatch.setattr(os, "rename", race)
    with pytest.raises(OSError, match=f"belongs to process {process.pid}"):
        _run.DirectoryLock(tmp_path).acquire()
    assert json.loads((tmp_path / ".writer").read_text())["owner"] == owner
    assert os.listdir(tmp_path) == [".writer"]


def test_a_claim_is_refused_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot be written"):
        _run.DirectoryLock(tmp_path / "file" / "below").acquire()
    os.mkfifo(tmp_path / ".writer")
    with pytest.raises(OSError, match=r"\.writer cannot be read"):
        _run.DirectoryLock(tmp_path).acquire()


@pytest.mark.slow
def test_a_fork_cannot_save_with_the_manager_of_its_parent(tmp_path):
    program = f"""
import os, warnings
import jax.numpy as jnp
from jaxpar import checkpoint
warnings.simplefilter("ignore")
manager = checkpoint.Manager({str(tmp_path)!r})
manager.save({{"w": jnp.ones(2)}})
if os.fork() == 0:
    try:
        manager.save({{"w": jnp.ones(2)}})
    except RuntimeError as error:
        print(error, flush=True)
    manager.close()
    os._exit(0)
os.wait()
manager.save({{"w": jnp.ones(2)}})
manager.close()
"""
    assert ", which made this Manager and writes" in python("-c", program).stdout


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOENT])
def test_a_claim_is_touched_again_after_a_read_that_failed(tmp_path, monkeypatch, number):
    failed, read = threading.Event(), files.read
    fails = [True]

    def fail(path, most):
        if fails[0] and threading.current_thread().name == "jaxpar-lock":
            failed.set()
            raise OSError(number, os.strerror(number), str(path))
        return read(path, most)

    monkeypatch.setattr(files, "read", fail)
    monkeypatch.setattr(_run, "_TOUCH_EVERY", 0.01)
    claim = _run.DirectoryLock(tmp_path)
    claim.acquire()
    assert failed.wait(20)
    os.utime(tmp_path / ".writer", (1, 1))
    fails[0] = False
    until(lambda: (tmp_path / ".writer").stat().st_mtime > 1, 20)
    claim.release()


def test_a_link_to_nothing_in_place_of_a_claim(tmp_path):
    (tmp_path / ".writer").symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match=r"\.writer is a link to a file that does not exist; remove it"):
        _run.DirectoryLock(tmp_path).acquire()
    (tmp_path / ".writer").unlink()
    (tmp_path / ".writer").symlink_to(".writer")
    with pytest.raises(OSError, match=r"\.writer cannot be read"):
        _run.DirectoryLock(tmp_path).acquire()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.ESTALE, errno.EMLINK])
def test_a_file_system_without_hard_links(tmp_path, monkeypatch, sleeper, number):
    def link(*paths):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    run(tmp_path / "old", epochs=2)
    with _whole_copy(checkpoint.latest(tmp_path / "old")) as copy:
        for _ in range(2):  # the second one finds all of it there
            _adopt(copy, tmp_path / "new")
        assert not (tmp_path / "new" / checkpoint.latest(tmp_path / "new").name / "records.jsonl").exists()
    assert (tmp_path / "new/records.jsonl").read_bytes() == (tmp_path / "old/records.jsonl").read_bytes()
    run(tmp_path / "new", epochs=3)
    test_of_two_that_take_a_claim_over_one_has_it(tmp_path / "claim", monkeypatch, sleeper)


@pytest.mark.parametrize("other_is_good", [True, False])
def test_a_copy_that_another_process_has_made_meanwhile(other_is_good, tmp_path, monkeypatch):
    """The renaming fails. That is an error only where there is no good checkpoint of the same content."""
    run(tmp_path / "old", epochs=1)
    source, rename = checkpoint.latest(tmp_path / "old"), os.rename

    def fails(path, target):
        if other_is_good:
            rename(path, tmp_path / "new" / "step_of_the_other")
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(_files.os, "rename", fails)
    if other_is_good:
        _adopt(source, tmp_path / "new")
        assert _files.load(tmp_path / "new" / "step_of_the_other") == _files.load(source)
    else:
        with pytest.raises(OSError, match="not empty"):
            _adopt(source, tmp_path / "new")


def test_a_directory_that_this_user_may_not_write_to(tmp_path, monkeypatch):
    """By what the system answers: root, as which tests may run, may write everywhere."""
    monkeypatch.setattr(_files.os, "access", lambda path, mode: mode in (os.F_OK, os.R_OK))
    with pytest.raises(OSError, match=r"nothing can be written to .*new \(Permission denied\)"):
        _files.check_writable(tmp_path / "new", "test")
