"""Compiles the library into the wheel, against the headers of the jaxlib that is installed."""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent
FLAGS = "-O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=fast -Wno-psabi -pthread".split()


def headers() -> Path:
    """The folder of XLA's headers. A build apart from its environment, as pip makes it, still knows where that is."""
    jaxlib = importlib.util.find_spec("jaxlib")
    packages = [Path(jaxlib.origin).parent.parent] if jaxlib and jaxlib.origin else []
    packages += [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    folders = [Path(x) for x in [os.environ.get("JAXPAR_CPU_HEADERS", "")] if x]
    folders += [package / "jaxlib" / "include" for package in packages]
    for folder in folders:
        if (folder / "xla/ffi/api/ffi.h").exists():
            return folder
    looked = ", ".join(map(str, folders))
    raise SystemExit(
        f"jaxpar-cpu needs the headers of jaxlib, and looked in {looked}: install jax in this environment first, or "
        "name the folder that jax.ffi.include_dir() gives in JAXPAR_CPU_HEADERS"
    )


def compiler() -> list[str]:
    """The command, from $CXX, or the first that there is."""
    named = shlex.split(os.environ.get("CXX", ""))
    command = named or [path for path in map(shutil.which, ("g++", "clang++", "c++")) if path][:1]
    if not command:
        raise SystemExit("jaxpar-cpu needs a C++ compiler: install g++ or clang++, or name one in CXX")
    return command


def build(target: Path) -> None:
    """Compiles all of src/ into one library, the files side by side."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # XLA's headers are a system's: their warnings are not ours.
    command = [*compiler(), *FLAGS, "-isystem", str(headers()), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = {str(source): f"{folder}/{source.stem}.o" for source in sorted((HERE / "src").glob("*.cc"))}
        compilations = [[*command, "-c", source, "-o", object] for source, object in objects.items()]
        list(threads.map(lambda compilation: subprocess.run(compilation, check=True), compilations))
        subprocess.run([*command, "-shared", *objects.values(), "-o", str(target)], check=True)


class BuildHook(BuildHookInterface):
    """One wheel a platform, for every Python: nothing in it is compiled against Python."""

    def initialize(self, version, build_data):
        target = HERE / "build" / "libjaxpar_cpu.so"
        build(target)
        name = f"macosx_11_0_{platform.machine()}" if sys.platform == "darwin" else sysconfig.get_platform()
        build_data["tag"] = "py3-none-" + name.replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["force_include"][str(target)] = "jaxpar_cpu/libjaxpar_cpu.so"


if __name__ == "__main__":  # without a wheel: python hatch_build.py TARGET
    build(Path(sys.argv[1]))
