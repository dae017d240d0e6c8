"""`python -m jaxpar launch`, elastic too, with programs that do not use JAX, so that a start takes no time."""

import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launched import HEAD, LIMIT, MEMBER, alive, background, command, launch, python, refused, state_of, until, write

from jaxpar import _launch
from jaxpar._launch import Deaths, share_gpus, visible_gpus


@pytest.fixture
def program(tmp_path):
    """Writes a program; `rank`, `size`, `start` and `here` are there, and with `member` a heartbeat client."""
    return lambda source, member=False: write(tmp_path, HEAD, MEMBER if member else "", source)


class Running:
    """A launcher in the background, ended with its children whatever a test does."""

    def __init__(self, *arguments):
        self.process = background(command(*arguments))

    def __enter__(self):
        return self

    def lines(self, number):
        return sorted(self.process.stdout.readline().rstrip() for _ in range(number))

    def end(self):
        return self.process.communicate(timeout=LIMIT)

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.communicate(timeout=LIMIT)
        finally:
            self.process.kill()


def test_lines_carry_the_rank_and_stay_whole(program):
    source = """
        for i in range(200):
            print("x" * 500, i)
        print("to the error", sys.argv[1:], file=sys.stderr)
        print("no end", end="")
    """
    done = launch("-n", "3", *program(source), "a b", "-n", "--x")
    lines = done.stdout.splitlines()
    assert sorted(done.stderr.splitlines()) == [f"[{r}] to the error ['a b', '-n', '--x']" for r in range(3)]
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] {'x' * 500} {i}" for i in range(200)] + [f"[{rank}] no end"]
    assert len(lines) == 3 * 201


def test_the_variables_of_the_processes(program):
    names = "JAXPAR_COORDINATOR JAXPAR_HUB JAXPAR_NUM_PROCESSES JAX_NUM_CPU_DEVICES JAX_PLATFORMS COLOUR EMPTY"
    source = f"print([os.environ.get(name) for name in {names.split()}])"
    done = launch("-n", "2", "--devices", "3", "--env", "COLOUR=a=b", "--env", "EMPTY=", *program(source))
    first, second = (eval(line.partition(" ")[2]) for line in sorted(done.stdout.splitlines()))
    assert first == second
    assert first[2:] == ["2", "3", "cpu", "a=b", ""]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in first[:2])
    assert first[0] != first[1]
    done = launch("-n", "1", "--coordinator-port", "45678", *program("print(os.environ['JAXPAR_COORDINATOR'])"))
    assert done.stdout == "[0] 127.0.0.1:45678\n"


@pytest.mark.parametrize(
    ("failing", "status", "why"),
    [("sys.exit(7)", 7, "status 7"), ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL")],
)
def test_the_first_failure_ends_all_with_its_status(program, failing, status, why):
    source = f"""
        def leave(*_):
            (here / f"left{{rank}}").touch()
            os._exit(9)  # an exception could come up where Python only reports it
        signal.signal(signal.SIGTERM, leave)
        (here / f"ready{{rank}}").touch()
        while len(list(here.glob("ready*"))) < size:
            time.sleep(0.01)
        if rank == 1:
            {failing}
        time.sleep(60)
    """
    arguments = program(source)
    began = time.monotonic()
    done = launch("-n", "3", *arguments, expect=status)
    assert time.monotonic() - began < 10
    assert re.fullmatch(rf"jaxpar launch: process 1 \(pid \d+\) failed: {why}; ending the others\n", done.stderr)
    here = Path(arguments[-1]).parent
    assert sorted(p.name for p in here.glob("left*")) == ["left0", "left2"]  # they had SIGTERM, not SIGKILL


@pytest.mark.slow
def test_one_that_ignores_sigterm_and_what_it_started_are_killed_after_the_grace_period(program):
    source = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            (here / "pids").write_text(f"{os.getpid()} {child.pid}")
            time.sleep(60)
        while not (here / "pids").exists() or not (here / "pids").read_text():
            time.sleep(0.01)
        sys.exit(3)
    """
    arguments = program(source)
    began = time.monotonic()
    launch("-n", "2", "--grace", "0.5", *arguments, expect=3)
    assert 0.5 < time.monotonic() - began < 10
    pids = (Path(arguments[-1]).parent / "pids").read_text().split()
    assert len(pids) == 2
    until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_reach_every_process_and_leave_time_to_save(program, sent, status):
    source = """
        def save(*_):
            time.sleep(0.5)
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        try:
            print("ready")
            time.sleep(60)
        except KeyboardInterrupt:
            print("saved")
    """
    with Running("-n", "2", "--max-restarts", "3", *program(source)) as running:
        running.lines(2)
        running.process.send_signal(sent)
        out, err = running.end()
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert err == ""
    assert running.process.returncode == status


def test_a_second_ctrl_c_does_not_wait(program):
    source = "signal.signal(signal.SIGINT, lambda *_: print('no')); print('ready')\nwhile True: time.sleep(1)"
    with Running("-n", "2", *program(source)) as running:
        assert running.lines(2) == ["[0] ready", "[1] ready"]  # as soon as they are printed
        running.process.send_signal(signal.SIGINT)
        assert running.lines(2) == ["[0] no", "[1] no"]
        began = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        running.end()
    assert time.monotonic() - began < 5
    assert running.process.returncode == 130


def test_sigterm_kills_after_the_grace_period(program):
    source = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); time.sleep(60)"
    with Running("-n", "2", "--grace", "0.3", *program(source)) as running:
        pids = [line.split()[1] for line in running.lines(2)]
        running.process.send_signal(signal.SIGTERM)
        running.end()
    assert running.process.returncode == 143
    assert not any(alive(pid) for pid in pids)


def test_stopped_and_continued(program):
    source = "print(os.getpid())\nwhile not (here / 'go').exists(): time.sleep(0.05)\nprint('done')"
    arguments = program(source)
    with Running("-n", "1", *arguments) as running:
        (pid,) = [line.split()[1] for line in running.lines(1)]
        running.process.send_signal(signal.SIGTSTP)  # Ctrl-Z
        until(lambda: state_of(pid) == "T")
        (Path(arguments[-1]).parent / "go").touch()
        running.process.send_signal(signal.SIGCONT)
        out, _ = running.end()
    assert out == "[0] done\n"
    assert running.process.returncode == 0


def test_a_reader_that_closes_the_pipe_ends_the_run(program):
    source = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: print('x' * 1000)"
    with Running("-n", "1", "--grace", "0.2", *program(source)) as running:
        running.process.stdout.readline()
        running.process.stdout.close()
        assert running.process.wait(LIMIT) == 128 + signal.SIGPIPE


COUNTING = """
    state = here / f"state{rank}"
    done = int(state.read_text()) if state.exists() else 0
    print(f"from {done}, {size} processes, start {start}, port {os.environ['JAXPAR_COORDINATOR'].split(':')[1]}")
    for done in range(done, 10):
        (here / f"new{rank}").write_text(str(done + 1))
        (here / f"new{rank}").replace(state)
        if rank == 1 and done + 1 in (3, 6) and size > 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if size > 1 and start < 2:
        time.sleep(60)
"""


def test_restarts_go_on_from_what_was_saved(program):
    done = launch("-n", "2", "--max-restarts", "2", *program(COUNTING))
    starts = [line for line in done.stdout.splitlines() if line.startswith("[1]")]
    assert [line.partition(", port")[0] for line in starts] == [
        "[1] from 0, 2 processes, start 0",
        "[1] from 3, 2 processes, start 1",
        "[1] from 6, 2 processes, start 2",
    ]
    assert len({line.split()[-1] for line in starts}) == 3  # a port of its own each time
    lines = done.stderr.splitlines()
    assert lines[1::2] == [f"jaxpar launch: restart {k} of 2 with 2 processes" for k in (1, 2)]
    assert all("process 1 (pid" in line and "killed by SIGKILL" in line for line in lines[0::2])


@pytest.mark.slow
def test_no_restart_is_left(program):
    done = launch("-n", "2", "--max-restarts", "1", *program(COUNTING), expect=137)
    assert done.stderr.count("restart") == 1


def test_a_restart_with_fewer_processes(program):
    done = launch("-n", "2", "--max-restarts", "2", "--min-processes", "1", *program(COUNTING))
    assert done.stderr.splitlines()[1:] == ["jaxpar launch: restart 1 of 2 with 1 process"]
    assert re.search(r"(?m)^\[0\] from \d+, 1 processes, start 1, port \d+$", done.stdout)


def test_the_gpus_of_a_lost_process_are_left_out(program):
    source = """
        print(start, os.environ["CUDA_VISIBLE_DEVICES"])
        if not start:
            sys.exit(rank == 1)
    """
    arguments = ["-n", "3", "--max-restarts", "1", "--min-processes", "2", "--gpus-per-process", "2"]
    done = launch(*arguments, *program(source), CUDA_VISIBLE_DEVICES="0,1,2,3,4,5")
    lines = sorted(done.stdout.splitlines())
    assert set(lines) >= {"[1] 0 2,3", "[0] 1 0,1", "[1] 1 4,5"}


@pytest.mark.slow
def test_a_frozen_process_is_noticed(program):
    source = """
        if not start:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
    """
    began = time.monotonic()
    arguments = ["-n", "3", "--heartbeat-timeout", "2", "--max-restarts", "1"]
    done = launch(*arguments, *program(source, member=True))
    assert time.monotonic() - began < 8
    *lines, last = done.stderr.splitlines()  # in any order: a survivor may print before the launcher does
    launcher, *survivors = sorted(lines, key=lambda line: line.startswith("["))
    assert "process 1 (pid" in launcher
    assert "no heartbeat for 2 seconds" in launcher
    assert sorted(line.partition(": process 1 (host")[0] for line in survivors) == ["[0] jaxpar", "[2] jaxpar"]
    assert all(re.search(r"ends with status 75; resume from runs/step_5$", line) for line in survivors)
    assert last == "jaxpar launch: restart 1 of 1 with 3 processes, from runs/step_5"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("failing", "why"),
    [("raise ValueError('three\\nlines')", "ValueError: three lines"), ("sys.exit(4)", "status 4")],
)
def test_survivors_say_what_failed(program, failing, why):
    status = 4 if "exit" in failing else 1
    done = launch("-n", "2", *program(f"if rank == 0: {failing}\ntime.sleep(60)", member=True), expect=status)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("[1] ")]
    assert re.fullmatch(
        rf"\[1\] jaxpar: process 0 \(host \S+\) was lost: {why}\. Process 1 of 2 ends with status 75; "
        "resume from runs/step_5",
        line,
    )


@pytest.mark.slow
def test_a_report_says_more_than_the_status_that_follows_it(program):
    """The process reports and ends after the launcher has read, and before it looks at the processes."""
    slow = """
        import sys, time
        from jaxpar import _launch
        from jaxpar.__main__ import main

        class Slow(_launch.HeartbeatServer):
            def check(self):
                super().check()
                time.sleep(0.3)

        _launch.HeartbeatServer = Slow
        sys.exit(main(["launch", "-n", "2", "--", *sys.argv[1:]]))
    """
    *_, path = program("time.sleep(0.3 * rank)\nif rank == 0: raise ValueError('why')\ntime.sleep(60)", member=True)
    done = python("-c", textwrap.dedent(slow), sys.executable, path, expect=1)
    assert "failed: ValueError: why; ending the others" in done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("saving", [0.5, 60])
def test_when_one_is_interrupted_the_others_have_time_to_save(program, saving):
    source = f"""
        if rank == 1:
            raise KeyboardInterrupt
        time.sleep({saving})  # a checkpoint, or a collective that waits for process 1
        sys.exit(130)
    """
    began = time.monotonic()
    done = launch("-n", "2", "--grace", "2", *program(source, member=True), expect=130)
    assert ("[0] jaxpar: process 1" in done.stderr) == (saving == 60)
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_process_that_ends_with_0_is_no_loss(program):
    done = launch("-n", "3", *program("if rank == 0: time.sleep(1)", member=True))
    assert (done.returncode, done.stderr) == (0, "")


def test_children_end_when_the_launcher_is_killed(program):
    with Running("-n", "2", *program("print(os.getpid()); time.sleep(60)", member=True)) as running:
        pids = [line.split()[1] for line in running.lines(2)]
        running.process.kill()
        until(lambda: not any(alive(pid) for pid in pids))


def test_the_launcher_needs_no_jax(program):
    arguments = ["launch", "-n", "1", *program("sys.exit(5)")]
    code = f"import sys; from jaxpar.__main__ import main; print(main({arguments}), 'jax' in sys.modules)"
    assert python("-c", code).stdout == "5 False\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "2"], "no command given; end the line with: -- python script.py"),
        (["-n", "0", "--", "true"], "must be an int of 1 or more, got '0'"),
        (["--", "true"], "required: -n/--processes"),
        (["-n", "2", "--", "no-such-program"], "cannot find the command 'no-such-program'"),
        (["-n", "2", "--min-processes", "3", "--", "true"], "--min-processes 3 is more than -n 2"),
        (["-n", "2", "--env", "=x", "--", "true"], "must be NAME=VALUE, got '=x'"),
        (["-n", "2", "--grace", "soon", "--", "true"], "must be a number of 0 or more, got 'soon'"),
        (["-n", "2", "--coordinator-port", "70000", "--", "true"], "must be a port from 1 to 65535, got '70000'"),
        (["-n", "2", "--devices", "1", "--gpus-per-process", "1", "--", "true"], "not allowed with argument --devices"),
        (["-n", "2", "--gpus-per-process", "2", "--", "true"], "2 processes with 2 GPU each need 4, there are 3"),
    ],
)
def test_bad_arguments(arguments, text, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert text in refused(capsys, "launch", *arguments)


def test_sharing_gpus(tmp_path, monkeypatch):
    assert share_gpus(["0", "1", "2", "3"], 2, None) == ["0,1", "2,3"]
    assert share_gpus(["0", "1", "2", "3", "4"], 2, None) == ["0,1", "2,3"]
    assert share_gpus(["GPU-a", "GPU-b"], 2, 1) == ["GPU-a", "GPU-b"]
    lists = tmp_path / "nvidia-smi"
    lists.write_text("#!/bin/sh\necho 'GPU 0: A100'; echo '  MIG 1g.5gb'; echo 'GPU 1: A100'\n")
    lists.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 3"}) == ["2", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert visible_gpus({}) == ["0", "1"]


# Elastic runs


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
    done = launch("-n", "3", "--elastic", *program(source, member=True))
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
    done = launch("-n", "2", "--elastic", *program(source, member=True), expect=137)
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
    done = launch("-n", "2", "--elastic", *program(f"{end} if rank else time.sleep(50)", member=True), expect=status)
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
    done = launch("-n", "2", "--elastic", *program(source, member=True))
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
    done = launch("-n", "2", "--heartbeat-timeout", "2", *options, *program(source, member=True))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] done", "[1] done"]
