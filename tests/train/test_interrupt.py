"""Ctrl-C, a notebook's interrupt and SIGTERM: the step is finished, the state is saved and is not lost."""

import contextlib
import re
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from interrupted_run import run, start
from launched import background, environment
from several_processes import free_address
from world import crash_after, crash_at, run_on, same

from jaxpar import data
from jaxpar.train._fit import interrupt


def at(step, number):
    """An `on_step` that sends a signal to this very process when the metrics of a step are there."""

    def on_step(now, metrics):
        if now == step:
            signal.raise_signal(number)

    return on_step


def losses(history):
    return [(r["epoch"], r["step"], r["loss"], r["accuracy"]) for r in history]


@pytest.fixture(scope="module")
def whole():
    return run(start(), epochs=4)


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of both signals are after the test what they were before."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(n) for n in numbers]
    yield
    assert [signal.getsignal(n) for n in numbers] == before


def test_sigterm_saves_and_exits(tmp_path, capsys, whole):
    with pytest.raises(SystemExit) as raised:
        run(start(), epochs=4, checkpoint_dir=tmp_path, on_step=at(25, signal.SIGTERM))
    assert raised.value.code == 143
    err = capsys.readouterr().err
    step = int(re.search(r"stopped after step (\d+), in epoch 2 of 4", err)[1])
    place = f"{tmp_path}/step_{step:08d}"
    assert err == f"jaxpar: fit: SIGTERM: stopped after step {step}, in epoch 2 of 4; saved in {place}\n"
    state, history = run(start(), epochs=4, checkpoint_dir=tmp_path)
    same(state, whole[0])
    assert losses(history) == losses(whole[1])
    assert capsys.readouterr().out == f"jaxpar: resumed from step {step} in {tmp_path}\n"


def test_ctrl_c_in_a_script_raises_with_the_state(capsys, whole):
    where = r"after step 33, in epoch 2 of 4; nothing was saved, as there is no checkpoint_dir$"
    with pytest.raises(KeyboardInterrupt, match=where) as raised:
        run(start(), epochs=4, on_step=at(25, signal.SIGINT), steps_per_execution=1)  # read eight steps later
    state, history = raised.value.state, raised.value.history
    assert int(state.step) == 33
    assert [r.get("interrupted") for r in history] == [None, True]
    assert losses(history)[0] == losses(whole[1])[0]
    assert (history[1]["epoch"], history[1]["step"]) == (2, 33)
    assert capsys.readouterr().err == ""
    state, history = run(state, epochs=1)  # on from there
    assert int(state.step) == 53


def test_ctrl_c_at_a_prompt_returns_and_the_same_call_goes_on(tmp_path, capsys, monkeypatch, whole):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    state, history = run(start(), epochs=4, checkpoint_dir=tmp_path, on_step=at(35, signal.SIGINT))
    assert int(state.step) == 40
    assert [r["step"] for r in history] == [20, 40]  # an interrupt between two epochs leaves none unfinished
    err = capsys.readouterr().err
    assert f"interrupted after step 40, in epoch 2 of 4; saved in {tmp_path}/step_00000040\nfit: returns" in err
    state, history = run(state, epochs=4, checkpoint_dir=tmp_path)
    same(state, whole[0])  # the run is finished, not followed by four epochs more
    assert losses(history) == losses(whole[1])
    more, _ = run(state, epochs=1, checkpoint_dir=tmp_path)
    assert int(more.step) == 100  # a finished run is followed by another


def test_the_caller_decides(monkeypatch):
    state, history = run(start(), epochs=4, on_step=at(5, signal.SIGINT), on_interrupt="return", steps_per_execution=1)
    assert (int(state.step), history[-1]["interrupted"]) == (13, True)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt, match="fit: interrupted"):
        run(state, epochs=4, on_step=at(15, signal.SIGINT), on_interrupt="raise")
    with pytest.raises(ValueError, match="fit: unknown on_interrupt 'never'; known are auto, return, raise"):
        run(start(), epochs=1, on_interrupt="never")


def test_a_second_ctrl_c_stops_at_once():
    seen = []

    def on_step(step, metrics):
        seen.append(step)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as raised:
        run(start(), epochs=4, on_step=on_step)
    assert int(raised.value.state.step) >= 1  # it is lost no more
    assert seen == [1]


def test_an_interrupt_that_must_wait_is_confirmed(capsys, monkeypatch):
    monkeypatch.setattr(interrupt, "_CONFIRM_AFTER", 0.05)

    def on_step(step, metrics):
        if step == 1:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)

    run(start(), epochs=1, on_step=on_step, on_interrupt="return")
    assert "interrupted: the training stops after the current step" in capsys.readouterr().err


def test_others_keep_their_handlers():
    got = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append("mine"))
    try:
        state, _ = run(start(), epochs=1, on_step=at(2, signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (got, int(state.step)) == (["mine"], 20)


LATE = [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)]


@pytest.mark.parametrize(("number", "at_prompt"), LATE)
@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_after_the_last_step_is_not_lost(number, at_prompt, saves, monkeypatch, tmp_path, capsys):
    class Late:
        def __call__(self, state, record):
            pass

        def on_end(self, history):
            signal.raise_signal(number)  # while the last checkpoint is being written

    options = {"epochs": 1, "checkpoint_dir": tmp_path if saves else None, "callbacks": Late()}
    words = "after the last step, 20; the run is complete"
    words += f", saved in {tmp_path}/step_00000020" if saves else ""
    if at_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        state, history = run(start(), **options)
        assert (int(state.step), len(history)) == (20, 1)
        assert f"fit: interrupted {words}\n" in capsys.readouterr().err
        return
    with pytest.raises((SystemExit, KeyboardInterrupt)) as raised:
        run(start(), **options)
    assert words in capsys.readouterr().err + str(raised.value)
    assert getattr(raised.value, "code", 143) == 143


def test_another_thread_trains_too():
    got = []
    thread = threading.Thread(target=lambda: got.append(run(start(), epochs=1)))
    thread.start()
    thread.join(60)
    assert int(got[0][0].step) == 20


def test_a_state_that_was_given_away(tmp_path, whole):
    state = start()
    run(state, epochs=2, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="this state was donated to an earlier step; use the state that it returned"):
        run(state, epochs=2, checkpoint_dir=tmp_path, resume=False)
    resumed, history = run(state, epochs=4, checkpoint_dir=tmp_path)  # a cell is run again: the checkpoint knows
    same(resumed, whole[0])
    assert losses(history) == losses(whole[1])


def batches_and(error):
    """Batches of eight, and an error after some of them."""
    for batch in np.random.default_rng(0).random((13, 8, 4), np.float32):
        yield {"image": batch, "label": batch[:, :3].argmax(1)}
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), RuntimeError("mine")], ids=repr)
def test_what_a_loader_raises_brings_the_state_along(error):
    loader = data.from_iterable(lambda: batches_and(error), steps_per_epoch=20)
    with pytest.raises(type(error)) as raised:
        run_on(loader, start(), epochs=1, batch_size=8)
    assert raised.value is error
    assert int(error.state.step) == 13
    state, _ = run(error.state, epochs=1)
    assert int(state.step) == 33


@pytest.mark.parametrize(
    ("kind", "options", "step", "epochs"),
    [
        ("device", {"on_step": crash_at(25), "steps_per_execution": 1}, 33, [1]),  # read eight steps later
        ("device", {"callbacks": crash_after(2)}, 40, [1, 2]),
        ("sharded", {"callbacks": crash_after(2)}, 40, [1, 2]),
    ],
    ids=["on_step", "callback", "callback, sharded"],
)
def test_an_exception_brings_the_state_along(kind, options, step, epochs):
    with pytest.raises(RuntimeError, match="crash") as raised:
        run(start(kind=kind), epochs=4, **options)
    assert int(raised.value.state.step) == step
    assert [r["epoch"] for r in raised.value.history] == epochs
    assert f"history up to step {step} are the attributes" in raised.value.__notes__[0]
    state, _ = run(raised.value.state, epochs=1)
    assert int(state.step) == step + 20


class Process:
    """The program in a process of its own."""

    def __init__(self, *arguments, **variables):
        words = [sys.executable, Path(__file__).parents[1] / "interrupted_run.py", *map(str, arguments)]
        self.process = background(words, **{"JAX_NUM_CPU_DEVICES": "2", **variables})

    def wait_for(self, step):
        for line in self.process.stdout:
            if line.startswith(f"step {step}\n"):
                return
        pytest.fail(f"it ended before step {step}: {self.process.stderr.read()}")

    def end(self):
        """(status, the last whole line of standard output, standard error)"""
        out, err = self.process.stdout.read(), self.process.stderr.read()
        return self.process.wait(60), out.rpartition("\n")[0].rpartition("\n")[2], err


@contextlib.contextmanager
def killed_at_the_end(started):
    try:
        yield
    finally:
        for process in started:
            process.process.kill()
            process.process.communicate()


@pytest.mark.slow
def test_ctrl_c_in_processes(tmp_path):
    started = [Process(tmp_path, 1000, "CATCH"), Process("-", 1000, "PLAIN"), Process("-", 1000, "PLAIN", 1000)]
    with killed_at_the_end(started):
        for process, step in zip(started, (25, 3, 1), strict=True):
            process.wait_for(step)
            process.process.send_signal(signal.SIGINT)
        # It sleeps in the callback of a step for 1000 seconds: the first Ctrl-C waits for it, the second does not.
        for line in started[2].process.stderr:
            if "second interrupt" in line:
                break
        started[2].process.send_signal(signal.SIGINT)
        caught, plain, twice = [process.end() for process in started]

    assert caught[0] == 7
    assert re.match(r"caught (\d+) (\d+) \1 (True|None)$", caught[1])
    assert "Traceback" not in caught[2]
    assert (tmp_path / f"step_{int(caught[1].split()[1]):08d}").is_dir()

    assert plain[0] == -signal.SIGINT  # as Python ends after a KeyboardInterrupt, so that a shell stops its loop
    assert re.search(r"KeyboardInterrupt: fit: interrupted after step \d+, in epoch", plain[2])
    assert twice[0] == -signal.SIGINT
    assert twice[2].splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.slow
def test_one_of_two_processes_is_preempted(tmp_path, whole):
    """It tells the other one, and both stop after the same step, which is saved."""
    env = {"JAXPAR_COORDINATOR": free_address(), "JAXPAR_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "1"}
    both = [Process(tmp_path, 1000, "PLAIN", **env, JAXPAR_PROCESS_ID=str(i)) for i in range(2)]
    with killed_at_the_end(both):
        both[1].wait_for(3)
        both[1].process.send_signal(signal.SIGTERM)
        ended = [process.end() for process in both]
    assert [status for status, *_ in ended] == [143, 143], ended
    said = [re.search(r"SIGTERM: stopped after step (\d+), .*saved in .*/step_(\d+)$", err, re.M) for *_, err in ended]
    steps = {int(number) for found in said for number in found.groups()}
    assert len(steps) == 1
    assert max(steps) % 16 == 0 or max(steps) % 20 == 0
    resumed, history = run(start(), epochs=4, checkpoint_dir=tmp_path)  # in one process
    np.testing.assert_allclose(resumed.params["w"], whole[0].params["w"], rtol=1e-5)
    np.testing.assert_allclose([r["loss"] for r in history], [r["loss"] for r in whole[1]], rtol=1e-5)


@pytest.mark.slow
def test_a_notebook_is_interrupted(tmp_path):
    """In a kernel of its own, by the message that the stop button sends; then the cell is run again."""
    client = pytest.importorskip("jupyter_client")
    manager = client.KernelManager()
    manager.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel(env=environment(JAX_NUM_CPU_DEVICES="2"))
    kernel = manager.client()
    kernel.start_channels()
    try:
        kernel.wait_for_ready(timeout=60)
        ask(kernel, SETUP + f"directory = {str(tmp_path)!r}")
        texts = ask(kernel, CELL, lambda text: "step 5\n" in text and manager.interrupt_kernel())
        step = int(re.search(r"interrupted after step (\d+), in epoch", texts)[1])
        assert f"saved in {tmp_path}/step_{step:08d}\nfit: returns the state and the history" in texts
        assert ask(kernel, "print(int(state.step), history[-1].get('interrupted'))").startswith(f"{step} ")
        ask(kernel, "pause = 0")
        assert f"resumed from step {step}" in ask(kernel, CELL)
        assert ask(kernel, "print(int(state.step), len(history))") == "240 12\n"
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)


SETUP = """
import time
from interrupted_run import run, start
pause = 0.05
state = start()
def on_step(step, metrics):
    print("step", step, flush=True)
    time.sleep(pause)
"""
CELL = "state, history = run(state, epochs=12, checkpoint_dir=directory, on_step=on_step)"


def ask(kernel, code, on_text=lambda text: None):
    """What a cell prints, which ends well."""
    texts = []

    def show(message):
        assert message["msg_type"] != "error", message["content"]
        texts.append(message["content"].get("text", ""))
        on_text(texts[-1])

    reply = kernel.execute_interactive(code, timeout=120, output_hook=show)
    assert reply["content"]["status"] == "ok", reply
    return "".join(texts)


def test_no_timer_is_left_after_both_signals():
    before = set(threading.enumerate())
    with interrupt.Interrupts() as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signals.asked = signal.SIGTERM
    for timer in set(threading.enumerate()) - before:
        timer.join(interrupt._CONFIRM_AFTER / 2)  # one that was cancelled ends at once
        assert not timer.is_alive()
