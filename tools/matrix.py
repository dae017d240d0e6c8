"""Installs jaxpar into empty environments, and trains and tests there: every Python, oldest and newest JAX.

    python tools/matrix.py                          # every Python there is, newest packages; the oldest on the first
    python tools/matrix.py --only 3.13-newest -- -k "not notebooks"    # one of them, a part of the tests
    python tools/matrix.py --only 3.11-oldest --no-tests                # only the wheel, the sdist and what they train
    python tools/matrix.py --dist dist --no-tests                       # of a wheel and an sdist that are built already
    python tools/matrix.py --pythons                # only say which supported Pythons there are, the oldest first

Needs uv (pip install uv), but for --pythons; what comes after -- goes to pytest. The wheel and the sdist are built
once. In each environment: install the wheel, train an epoch, run README's script; install the sdist in its place, and
do both again; then run the tests of a copy of this checkout on the wheel. `oldest` takes the lowest version that
pyproject.toml allows of each dependency, and of each package that the tests need; of what those need in turn, the
newest. The log lists what was installed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
TRAIN = ["-m", "jaxpar", "train", "--epochs", "1", "--devices", "2", "--batch-size", "512", "--no-progress"]


def interpreters():
    """The path of each supported Python that starts: on PATH, of pyenv, or of uv."""
    for version in VERSIONS:
        pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
        found = [*filter(None, [shutil.which(f"python{version}")]), *map(str, pyenv)]
        for path in found:
            told = subprocess.run(
                [path, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], capture_output=True
            )
            if told.stdout.decode().strip() == version:
                yield version, path
                break
        else:
            print(f"no Python {version} here", file=sys.stderr, flush=True)


def uv():
    """The command that starts uv."""
    beside = Path(sys.executable).with_name("uv")
    path = shutil.which("uv") or (str(beside) if beside.exists() else None)
    if path is None:
        sys.exit("tools/matrix.py needs uv: pip install uv")
    return path


class Environment:
    """One empty environment, and a log of what was done in it."""

    def __init__(self, folder, name, python):
        self.name, self.folder = name, folder / name
        self.log = folder / f"{name}.log"
        self.run([uv(), "venv", "--quiet", "-p", python, str(self.folder)], folder)
        self.python = str(self.folder / "bin" / "python")

    def run(self, command, cwd, **variables):
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "PYTHON", "VIRTUAL_ENV"))}
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            subprocess.run(command, cwd=cwd, check=True, stdout=log, stderr=log, env={**keep, **variables})

    def install(self, *what):
        self.run([uv(), "pip", "install", "--quiet", "-p", self.python, *what], self.folder)
        self.run([uv(), "pip", "freeze", "--quiet", "-p", self.python], self.folder)


def steps(place, wheel, sdist, sources, oldest, tests):
    """Yields the name of each step before it is done."""
    lowest = ["--resolution", "lowest-direct", "-r", str(sources / "pyproject.toml")]
    yield "install the wheel"
    if oldest:
        place.install(*lowest)
    place.install(*(["--no-deps"] if oldest else []), str(wheel))
    yield "train, README's script"
    script = (sources / "README.md").read_text().split("```python\n")[1].split("```")[0]
    place.run([place.python, *TRAIN], place.folder)
    place.run([place.python, "-c", script], place.folder)
    yield "install the sdist"
    place.install("--no-deps", "--reinstall", str(sdist))
    yield "train, README's script, from the sdist"
    place.run([place.python, *TRAIN], place.folder)
    place.run([place.python, "-c", script], place.folder)
    if tests is not None:
        yield "install what the tests need"
        place.install("--no-deps", "--reinstall", str(wheel))
        place.install(*([*lowest, "--extra", "test"] if oldest else [f"{wheel}[test]"]))
        yield "tests"
        place.run([str(place.folder / "bin" / "pytest"), "-q", *tests], sources, XLA_FLAGS="")  # the code users get


def check(folder, name, python, dist, tests):
    """Goes through the steps; returns the line for the table, and whether all went well."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    sources = ROOT if tests is None else folder / f"{name}-sources"  # tests may write where they are
    if tests is not None:
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout.decode()
        for file in filter(None, listed.split("\0")):
            (sources / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, sources / file)
    start, step = time.monotonic(), "make the environment"
    try:
        place = Environment(folder, name, python)
        for step in steps(place, wheel, sdist, sources, name.endswith("oldest"), tests):
            print(f"{name}: {step}", flush=True)
    except subprocess.CalledProcessError:
        return f"{name}: FAILED: {step}; see {folder / name}.log", False
    return f"{name}: passed in {time.monotonic() - start:.0f} s", True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="such as 3.12-newest; can be given several times")
    parser.add_argument("--dist", type=Path, help="a folder with one wheel and one sdist (default: build them)")
    parser.add_argument("--no-tests", action="store_true", help="stop after training")
    parser.add_argument("--pythons", action="store_true", help="print the paths of the supported Pythons")
    parser.add_argument("pytest_args", nargs="*", help="after --; default: -n 2 --dist worksteal")
    args = parser.parse_args()
    found = list(interpreters())
    if args.pythons:
        print(*(path for _, path in found), sep="\n")
        return
    cells = [(f"{version}-newest", path) for version, path in found]
    cells += [(f"{version}-oldest", path) for version, path in found[:1]]
    cells = [(name, path) for name, path in cells if not args.only or name in args.only]
    if not cells:
        sys.exit(f"nothing to do: {args.only} is none of what can be run here")
    folder = Path(tempfile.mkdtemp(prefix="jaxpar-matrix-"))
    dist = (args.dist or folder / "dist").resolve()  # the steps run in other folders
    if args.dist is None:
        subprocess.run([uv(), "build", "--quiet", "--out-dir", str(dist), str(ROOT)], check=True)
    tests = None if args.no_tests else args.pytest_args or ["-n", "2", "--dist", "worksteal"]
    lines, passed = zip(*[check(folder, *cell, dist, tests) for cell in cells], strict=True)
    print("\n".join(lines))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
