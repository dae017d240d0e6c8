"""Runs tests of a copy of the tree for tools/mutants.py, in forks of one process that has imported jax and others.

No backend of jax is started before a fork, so there are no threads that a fork would miss. A job is a line of JSON on
standard input, and its answer a line on standard output.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path.cwd()
SOURCE = f"{HERE}/jaxpar/"
IMPORTED = "optax flax.linen flax.nnx haiku equinox orbax.checkpoint tensorflow_datasets matplotlib.pyplot".split()


class Recorder:
    """A pytest plugin that writes down which lines of the source each test runs, and how long it takes."""

    def __init__(self):
        self.lines, self.starts, self.tests = {}, False, {}
        events = sys.monitoring
        events.use_tool_id(events.COVERAGE_ID, "mutants")
        events.register_callback(events.COVERAGE_ID, events.events.LINE, self._on_line)
        events.set_events(events.COVERAGE_ID, events.events.LINE)
        sys.addaudithook(self._on_event)

    def _on_line(self, code, line):
        if code.co_filename.startswith(SOURCE):
            self.lines.setdefault(code.co_filename.removeprefix(f"{HERE}/"), set()).add(line)
        return sys.monitoring.DISABLE  # until the next test

    def _on_event(self, event, args):
        self.starts |= event in ("subprocess.Popen", "os.fork", "os.posix_spawn")

    def _taken(self):
        lines, starts = {path: sorted(lines) for path, lines in self.lines.items()}, self.starts
        self.lines, self.starts = {}, False
        sys.monitoring.restart_events()
        return {"lines": lines, "starts": starts}

    def pytest_collection_finish(self, session):
        self.imported = self._taken()["lines"]

    def pytest_runtest_logreport(self, report):
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True})
        test["seconds"] += report.duration
        test["passed"] &= not report.failed
        if report.when == "teardown":
            test |= self._taken()


class Chosen:
    """A pytest plugin that runs the tests of a list, in its order, and notes the first that fails."""

    def __init__(self, tests):
        self.order, self.failed = {test: i for i, test in enumerate(tests)}, None

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((x for x in items if x.nodeid in self.order), key=lambda x: self.order[x.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def run(job, answer):
    """In the fork: the tests of a job. The answer is a file."""
    import pytest

    plugin = Recorder() if job["tests"] is None else Chosen(job["tests"])
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore:Module already imported", "-m", job["marks"]]
    code = pytest.main([*options, *([] if job["tests"] is None else ["-x"]), *job["files"]], [plugin])
    found = {"failed": plugin.failed} if job["tests"] else {"imported": plugin.imported, "tests": plugin.tests}
    answer.write_text(json.dumps({"code": int(code), **found}))


def in_a_fork(job, folder):
    """The answer to a job. Its process group ends with it."""
    answer, said = Path(folder, "answer.json"), Path(folder, "output.txt")
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os.setsid()
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            run(job, answer)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    late, ended, parent = time.monotonic() + job["seconds"], 0, os.getppid()
    while not ended and time.monotonic() < late and os.getppid() == parent:
        ended, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    found = json.loads(answer.read_text()) if answer.exists() else {"code": "late" if not ended else "crash"}
    return {**found, "output": said.read_text(errors="replace")[-3000:]}


def main():
    sys.path[:0] = [str(HERE), str(HERE / "tests")]
    importlib.import_module("conftest")  # sets the devices and the flags before jax is imported
    for name in IMPORTED:
        importlib.import_module(name)
    assert not any(name == "jaxpar" or name.startswith("jaxpar.") for name in sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            answer = in_a_fork(json.loads(line), folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(json.dumps({**answer, "spent": spent}), flush=True)


if __name__ == "__main__":
    main()
