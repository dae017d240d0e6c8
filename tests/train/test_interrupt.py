"""Ctrl-C, a notebook's interrupt and SIGTERM: the step is finished, the state is saved and is not lost."""

import asyncio
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
from world import STEP, apply, crash_after, crash_at, points, run_on, same

from jaxpar import checkpoint, data, train
from jaxpar._core import files
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


def test_sigterm_saves_and_exits(tmp_path, capsys, monkeypatch, whole):
    monkeypatch.setattr(interrupt, "_CONFIRM_AFTER", 600.0)
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
    out, err = capsys.readouterr()
    assert f"interrupted after step 40, in epoch 2 of 4; saved in {tmp_path}/step_00000040\nfit: returns" in out
    assert err == ""  # which a notebook shows in red
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
    assert "interrupted: the training stops after the current step" in capsys.readouterr().out


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
        assert f"fit: interrupted {words}\n" in capsys.readouterr().out
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
        for line in started[2].process.stdout:
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
        # A cell with `await` runs in the loop of the kernel, which has a handler of its own then.
        ask(kernel, SETUP + f"directory = {str(tmp_path / 'loop')!r}")
        texts = ask(kernel, AWAIT, lambda text: "step 5\n" in text and manager.interrupt_kernel())
        assert re.search(r"interrupted after step (\d+), in epoch", texts)
        ask(kernel, "pause = 0")
        ask(kernel, AWAIT)
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
AWAIT = """
async def go():
    return run(state, epochs=12, checkpoint_dir=directory, on_step=on_step)
state, history = await go()
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


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", range(4))
def test_a_signal_while_handlers_change_is_not_lost(call, late, monkeypatch):
    """Two handlers are set, and two are set again."""
    real, calls = signal.signal, []

    def change(number, handler):
        calls.append(number)
        now = len(calls) == call + 1
        if now and not late:
            signal.raise_signal(signal.SIGINT)
        found = real(number, handler)
        if now and late:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(signal, "signal", change)
    signals = interrupt.Interrupts()
    try:
        with signals:
            pass
    except KeyboardInterrupt:
        return
    assert signals.asked == signal.SIGINT


def test_two_interrupts_at_once_are_one(monkeypatch):
    real, signals = signal.signal, interrupt.Interrupts()

    def change(number, handler):
        if handler is signal.default_int_handler and len(signals.received) == 1:  # while the first one is recorded
            signal.raise_signal(signal.SIGINT)
        return real(number, handler)

    monkeypatch.setattr(signal, "signal", change)
    with signals:
        signal.raise_signal(signal.SIGINT)
    assert signals.asked == signal.SIGINT


@pytest.mark.parametrize("where", ["on_start", "while it is locked"])
def test_an_interrupt_before_the_first_step_leaves_nothing_open(where, tmp_path, monkeypatch, whole):
    class Early:
        def __call__(self, state, record):
            pass

        def on_start(self, history):
            if where == "on_start":
                signal.raise_signal(signal.SIGINT)

    create, before, state = files.create, set(threading.enumerate()), start()

    def interrupted(path, content):
        create(path, content)
        signal.raise_signal(signal.SIGINT)

    if where != "on_start":
        monkeypatch.setattr(files, "create", interrupted)
    options = {"epochs": 4, "checkpoint_dir": tmp_path, "certificate": tmp_path / "c", "metrics_file": tmp_path / "m"}
    with pytest.raises(KeyboardInterrupt) as raised:  # whose frames a notebook keeps, and all that they hold
        run(state, callbacks=Early(), **options)
    assert raised.tb is not None
    assert not list(tmp_path.glob(".*writer"))
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()
    monkeypatch.undo()
    same(run(state, **options)[0], whole[0])


def test_a_second_interrupt_at_the_very_end_brings_the_state_along(monkeypatch):
    monkeypatch.setattr(interrupt.text, "say_news", lambda words: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as raised:
        run(start(), epochs=4, on_step=at(25, signal.SIGINT), on_interrupt="return")
    assert int(raised.value.state.step) == raised.value.history[-1]["step"] > 25


def test_a_lock_that_a_second_interrupt_left_is_taken(tmp_path, monkeypatch, whole):
    """Of the certificate, which two runs of one process may not write."""
    options = {"checkpoint_dir": tmp_path / "run", "certificate": tmp_path / "c", "epochs": 4}
    monkeypatch.setattr(checkpoint._DirectoryLock, "_is_mine", interrupted_at_end(checkpoint._DirectoryLock._is_mine))
    with pytest.raises(KeyboardInterrupt):
        run(start(), on_step=at(25, signal.SIGINT), **options)
    monkeypatch.undo()
    assert (tmp_path / ".c.writer").exists()
    same(run(start(), **options)[0], whole[0])
    assert not list(tmp_path.rglob("*.writer"))


def test_the_certificate_has_the_lines_up_to_the_state_that_an_error_brings(tmp_path):
    """Metrics are read some steps late, and so are lines written. Without them no run could go on from that state."""
    options = {"certificate_every": 1, "steps_per_execution": 1}
    run(start(), epochs=4, certificate=tmp_path / "whole", **options)
    options["certificate"] = tmp_path / "c"
    with pytest.raises(RuntimeError, match="crash") as raised:
        run(start(), epochs=4, on_step=crash_at(25), **options)
    state = raised.value.state
    assert int(state.step) > 25
    run(state, epochs=4, max_steps=80 - int(state.step), **options)
    assert (tmp_path / "c").read_text() == (tmp_path / "whole").read_text()


def interrupted_at_end(is_mine):
    """A second Ctrl-C comes while the certificate is closed."""

    def interrupted(lock):
        if sys._getframe(1).f_code.co_name == "release" and lock._file is not None:
            signal.raise_signal(signal.SIGINT)
        return is_mine(lock)

    return interrupted


def test_nothing_runs_after_the_end_of_a_run():
    """A Ctrl-C there would lose the state. Python looks for one where a function begins."""
    seen, state = [], start()

    def note(frame, event, argument):
        name = frame.f_code.co_name
        if (event, name) == ("return", "train"):
            seen.clear()
        if event == "call" and name != "remove":  # of a weak reference, which cannot raise
            seen.append(name)

    sys.setprofile(note)
    try:
        state, _ = train.fit(state, STEP, points(160), epochs=1, batch_size=8, progress=False)
    finally:
        sys.setprofile(None)
    assert int(state.step) == 20
    assert seen == []


def test_an_event_loop_has_the_main_thread(whole):
    """`asyncio.run` has a handler of its own, which cancels the task when `fit` has returned."""

    async def main():
        return run(start(), epochs=4, on_step=at(25, signal.SIGINT))

    with pytest.raises(KeyboardInterrupt, match="in epoch 2 of 4") as raised:
        asyncio.run(main())
    state = raised.value.state
    assert 25 < int(state.step) < 80
    same(run(state, epochs=None, max_steps=80 - int(state.step))[0], whole[0])


def test_a_second_interrupt_within_an_event_loop_stops_at_once():
    seen = []

    def on_step(step, metrics):
        seen.append(step)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    async def main():
        run(start(), epochs=4, on_step=on_step)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert seen == [1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", ["the classes of the model", "the step"])
def test_an_interrupt_waits_until_jax_has_traced(part):
    """One in the midst of it may leave JAX tracing, whatever the process computes next."""
    traced, state = [], start()

    def apply_fn(params, images):
        traced.append("begun")
        if len(traced) == {"the classes of the model": 1, "the step": 3}[part]:
            signal.raise_signal(signal.SIGINT)
        traced.append("over")
        return apply(params, images)

    step = train.make_train_step(train.classification_loss(apply_fn))
    with pytest.raises(KeyboardInterrupt):
        train.fit(state, step, points(160), epochs=1, batch_size=8, progress=False)
    assert traced.count("begun") == traced.count("over")
    state, _ = train.fit(state, step, points(160), epochs=1, batch_size=8, progress=False)  # which has not begun
    assert int(state.step) == 20
