"""`python -m jaxpar launch --elastic`, with programs that do not use JAX."""

import pytest
from launched import HEAD, MEMBER, launch, write

from jaxpar import _launch
from jaxpar._launch import Deaths


@pytest.fixture
def program(tmp_path):
    return lambda source: write(tmp_path, HEAD, MEMBER, source)


def test_a_lost_process_is_started_again_by_itself(program):
    source = """
    mark = here / f"was{rank}"
    def wait_for(name):
        while not (here / name).exists():
            time.sleep(0.02)
    if mark.exists():
        (here / "back").touch()
    elif rank == 1:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for("back")
    time.sleep(0.5)
    print("done", start, os.environ["JAXPAR_ELASTIC"])
    """
    done = launch("-n", "3", "--elastic", *program(source))
    assert sorted(done.stdout.splitlines()) == ["[0] done 0 1", "[1] done 0 1", "[2] done 0 1"]
    assert "failed: killed by SIGKILL; the others continue\n" in done.stderr
    assert "process 1 is started again as pid" in done.stderr
    assert done.stderr.count("\n") == 2


def test_without_process_0_nobody_goes_on(program):
    source = """
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
    """
    done = launch("-n", "2", "--elastic", *program(source), expect=137)
    assert "[1] jaxpar: process 0" in done.stderr
    assert "an elastic run cannot continue without process 0" in done.stderr


def test_only_deaths_in_a_row_are_endless(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_launch.time, "monotonic", lambda: now[0])
    dying = Deaths()
    assert [dying.add(1, 3), dying.add(1, 137), dying.add(1, 3), dying.add(2, 3)] == [""] * 4
    dying.end_row(1)
    assert [dying.add(1, 3), dying.add(1, 3)] == ["", ""]
    assert dying.add(1, 3) == ", 3 times in a row"
    assert [dying.add(3, 137) for _ in range(9)] == [""] * 9
    assert dying.add(3, 75) == ", 10 times in a row"
    dying = Deaths()
    for _ in range(49):
        now[0] += 10.0
        assert dying.add(1, 137) == ""
        dying.end_row(1)
    now[0] += 10.0
    assert dying.add(1, 137) == ", 50 times within 8 minutes"
    now[0] += 590.0
    assert dying.add(1, 137) == ""


@pytest.mark.slow  # each start comes a second after the end before
@pytest.mark.parametrize(
    ("end", "words"),
    [("sys.exit(3)", "status 3, 3 times"), ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL, 10 times")],
)
def test_endless_dying_ends_with_one_line(program, end, words):
    status = 3 if "3 times" in words else 137
    done = launch("-n", "2", "--elastic", *program(f"{end} if rank else time.sleep(50)"), expect=status)
    assert done.stderr.count(f"failed: {words} in a row; ending the others\n") == 1
    assert done.stderr.count("is started again as pid") == int(words.split()[-2]) - 1


@pytest.mark.slow  # five starts
def test_a_process_that_works_in_between_is_started_again(program):
    source = """
    marks = len(list(here.glob("was*")))
    if rank and marks < 4:
        (here / f"was{marks}").touch()
        client.report_working()
        sys.exit(3)
    if rank:
        (here / "done").touch()
    while not (here / "done").exists():
        time.sleep(0.02)
    """
    done = launch("-n", "2", "--elastic", *program(source))
    assert done.stderr.count("failed: status 3; the others continue") == 4


@pytest.mark.slow  # 6 seconds
@pytest.mark.parametrize("options", [(), ("--elastic",)])
def test_a_launcher_that_is_stopped_is_no_loss(program, options):
    source = """
    if rank == 0:
        awake = f"import os, time; time.sleep(6); os.kill({os.getppid()}, {signal.SIGCONT.value})"
        subprocess.Popen([sys.executable, "-c", awake])
        os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(7)
    print("done")
    """
    done = launch("-n", "2", "--heartbeat-timeout", "2", *options, *program(source))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] done", "[1] done"]
