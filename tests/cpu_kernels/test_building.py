"""The kernels build from their sources: a wheel for any Python, and programs for sanitizers and for ARM."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import pytest
from launched import python

HERE = Path(__file__).parent
CPU = HERE.parents[1] / "cpu"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: install g++"),
    pytest.mark.skipif(not CPU.exists(), reason="no folder cpu/ beside the tests"),
]


def run(compiler, flags, kernels, tmp_path, start=()):
    """Compile the program of these kernels and run it."""
    program = tmp_path / kernels
    flags = ["-std=c++17", "-pthread", "-Wno-psabi", "-isystem", jax.ffi.include_dir(), "-I", CPU / "src", *flags]
    subprocess.run([compiler, *flags, HERE / f"program_{kernels}.cc", "-o", program], check=True)
    done = subprocess.run([*start, program, "60"], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize("kernels", ["convolution", "convolution_bf16", "recurrent"])
# Most of the time goes into compiling, and most of that into what optimises code that is full of checks.
@pytest.mark.parametrize(
    ("sanitizer", "level"),
    [("address,undefined", "-O0"), pytest.param("thread", "-O1", marks=pytest.mark.release)],
)
def test_a_program_under_sanitizers(sanitizer, level, kernels, tmp_path):
    run(COMPILER, [level, "-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"], kernels, tmp_path)


@pytest.mark.parametrize("kernels", ["convolution", "convolution_bf16", "recurrent"])
@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="no aarch64-linux-gnu-g++ and qemu-aarch64: install g++-aarch64-linux-gnu and qemu-user",
)
def test_a_program_for_arm(kernels, tmp_path):
    run("aarch64-linux-gnu-g++", ["-O2", "-static"], kernels, tmp_path, start=["qemu-aarch64"])


@pytest.mark.release
def test_a_wheel_is_for_any_python(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=CPU, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("jaxpar_cpu-0.1.0-py3-none-")
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"jaxpar_cpu/__init__.py", "jaxpar_cpu/libjaxpar_cpu.so"} < set(archive.namelist())


def test_a_build_without_headers_says_what_to_do(tmp_path):
    source = f"import sys; sys.path.insert(0, {str(CPU)!r}); import importlib.util, sysconfig, hatch_build\n"
    source += "importlib.util.find_spec = lambda name: None; sysconfig.get_path = lambda name: '/nowhere'\n"
    done = python("-c", source + "hatch_build.headers()", expect=1)
    assert "install jax in this environment first" in done.stderr
