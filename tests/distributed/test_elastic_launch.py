"""`python -m jaxpar launch --elastic`, with programs that do not use JAX."""

import pytest
from launched import HEAD, MEMBER, launch, write


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
    done = launch("-n", "3", "--elastic", "--heartbeat-timeout", "2", *program(source))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] done 0 1", "[1] done 0 1", "[2] done 0 1"]
    assert "failed: killed by SIGKILL; the others go on\n" in done.stderr
    assert "process 1 is started again as pid" in done.stderr
    assert done.stderr.count("\n") == 2


@pytest.mark.slow
def test_a_frozen_process_is_killed_and_started_again(program):
    source = """
    if rank == 1 and not (here / "was").exists():
        (here / "was").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    (here / f"done{rank}{rank == 0 or (here / 'was').exists()}").touch()
    while not (here / "done1True").exists():
        time.sleep(0.02)
    """
    done = launch("-n", "2", "--elastic", "--heartbeat-timeout", "2", *program(source))
    assert done.returncode == 0, done.stderr
    assert "is lost: no heartbeat for 2 seconds" in done.stderr


def test_without_process_0_nobody_goes_on(program):
    source = """
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
    """
    done = launch("-n", "2", "--elastic", *program(source))
    assert done.returncode == 137
    assert "[1] jaxpar: process 0" in done.stderr
    assert "an elastic run cannot go on without process 0" in done.stderr


@pytest.mark.slow
def test_a_process_that_always_fails_ends_the_run(program):
    done = launch(
        "-n", "2", "--elastic", "--heartbeat-timeout", "2", *program("sys.exit(3) if rank else time.sleep(30)")
    )
    assert done.returncode == 3
    assert done.stderr.count("is started again as pid") == 2
