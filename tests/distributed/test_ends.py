"""How a process may end, and what the others learn of it: with the launcher, and without one."""

import re
import signal
import sys
import textwrap

import pytest
from hostile import JOB, serving
from launched import HEAD, LIMIT, MEMBER, background, launch, until, write

CLOSED = "its connection closed (killed?)"
ASLEEP = "time.sleep(60)"
# The end of a process, its exit status, and why the others end where no launcher sees it. None: they go on.
ENDS = {
    "sys.exit(3)": (3, "status 3"),
    "print('the last line')": (0, None),
    "raise SystemExit(6)": (6, "status 6" if sys.version_info >= (3, 12) else None),
    "raise ValueError('three\\nlines')": (1, "ValueError: three lines"),
    f"os.kill(os.getpid(), signal.SIGKILL); {ASLEEP}": (-signal.SIGKILL, CLOSED),
    f"os.kill(os.getpid(), signal.SIGSTOP); {ASLEEP}": (None, "no heartbeat for 5 seconds: it is frozen, or its host"),
    f"os.kill(os.getpid(), signal.SIGTERM); {ASLEEP}": (-signal.SIGTERM, CLOSED),
    "os._exit(5)": (5, CLOSED),
    "raise KeyboardInterrupt": (130, "KeyboardInterrupt"),
    "argparse.ArgumentParser().parse_args(['--x'])": (2, "status 2"),
    "sys.exit('words')": (1, "status 1"),
    "sys.exit(256 + 4)": (4, "status 4"),
    "sys.exit()": (0, None),
    "try: sys.exit(4)\nfinally: print('cleaned up')": (4, "status 4"),
    "try: 1 / 0\nexcept ZeroDivisionError: sys.exit(5)": (5, "status 5"),
}
# An exit that somebody catches ends nothing, as a notebook's kernel does.
CAUGHT = (
    "try: sys.exit(4)\nexcept SystemExit: pass",
    "def end(): raise SystemExit(4)\ntry: end()\nexcept SystemExit: pass",
    "try: sys.exit(4)\nexcept SystemExit as error: sys.kept, sys.status = error, error.code",
    "thread = threading.Thread(target=lambda: sys.exit(3)); thread.start(); thread.join()",
    "if not os.fork(): sys.exit(4)\nos.wait()",
    "sys.ps1 = '> '; sys.excepthook(ValueError, ValueError('at a prompt'), None)",
    "InteractiveShell.instance().run_cell('import sys; sys.exit(3)')",
)
NOTEBOOK = "from IPython.core.interactiveshell import InteractiveShell\n"


def table(rows, quick):
    return [row if i < quick else pytest.param(row, marks=pytest.mark.slow) for i, row in enumerate(rows)]


@pytest.mark.parametrize("source", [*table(ENDS, 2), *table(CAUGHT, 1)])
def test_without_a_launcher(tmp_path, source):
    """The server is here, and the process that ends is the only one."""
    status, why = ENDS.get(source, (0, None))
    if "InteractiveShell" in source:
        pytest.importorskip("IPython")
        source = NOTEBOOK + source
    member = """
    import argparse, os, signal, sys, threading, time
    from jaxpar._heartbeat.client import HeartbeatClient, watch_end
    client = HeartbeatClient(0, 1, job=sys.argv[1], heartbeat_timeout=5, launched=False)
    client.join_run([("127.0.0.1", int(sys.argv[2]))], 10.0, "absent")
    watch_end(client)
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(member) + source)
    (_, port), server = serving()
    server.thread.start()
    process = background([sys.executable, str(path), JOB, str(port)])
    try:
        if status is None:  # it is frozen
            until(lambda: server.lost is not None, LIMIT)
        else:
            _, err = process.communicate(timeout=LIMIT)
            assert process.returncode == status
            assert ("Traceback" in err) == (source.startswith("raise ") and "SystemExit" not in source)
    finally:
        process.kill()
        process.communicate()
    server.thread.join(LIMIT)
    reported = server.lost["why"] if server.lost else server._interrupt and server._interrupt[2]  # said seconds later
    assert reported is why is None or reported.startswith(why)


@pytest.mark.parametrize("source", table(ENDS, 2))
def test_with_the_launcher(tmp_path, source):
    """It sees the status of a process. So what is said of a loss does not depend on what the process could say."""
    status, why = ENDS[source]
    why = f"status {status}" if status and not why else why
    if status is None:
        pytest.skip("test_launch has a process that is frozen")
    if status < 0:
        why = f"killed by {signal.Signals(-status).name}"
    elif why == CLOSED:
        why = f"status {status}"
    start = "import argparse, threading\nif rank == 1:\n" + textwrap.indent(source, "    ")
    others = "\nelse:\n    time.sleep(60)" if why else ""
    arguments = write(tmp_path, HEAD, MEMBER, start + others)
    done = launch("-n", "2", *arguments, expect=128 - status if status < 0 else status)
    line = rf"\[0\] jaxpar: process 1 \(host \S+\) was lost: {re.escape(why or '')}.*Process 0 of 2 ends with status 75"
    assert bool(re.search(line, done.stderr)) == bool(why)


def test_a_caught_exit_is_no_status_under_the_launcher(tmp_path):
    caught = "\n".join(CAUGHT[:3])
    done = launch("-n", "2", *write(tmp_path, HEAD, MEMBER, "import threading\n" + caught))
    assert done.stderr == ""


@pytest.mark.slow
def test_a_second_ctrl_c_in_a_callback_is_called_by_its_name(tmp_path):
    """The other process waits for this one in the callback. What it then learns is no word of Gloo's either."""
    program = """
        import os, signal
        import jax.numpy as jnp
        import numpy as np
        import optax
        from jaxpar import distributed, kv, train

        def callback(state, record):
            if kv.rank() == 0:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        distributed.initialize()
        loss_fn = lambda params, batch, rng: ((batch["x"] @ params["w"]).mean(), {})
        state, step = train.start({"w": jnp.ones(2)}, optax.sgd(0.1), loss_fn)
        train.fit(state, step, {"x": np.ones((8, 2), "float32")}, epochs=2, batch_size=8, callbacks=callback)
    """
    done = launch("-n", "2", "--devices", "1", *write(tmp_path, program), expect=130)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[1] [Gloo]")]
    assert [line for line in lines if line.startswith("[0] ")][-1] == "[0] KeyboardInterrupt"
    (other,) = [line for line in lines if line.startswith("[1] ")]
    assert re.search(r"process 0 \(host \S+\) was lost: KeyboardInterrupt\. Process 1 of 2 ends with status 75", other)
