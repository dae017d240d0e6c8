"""`python -m jaxpar launch`: several processes on this machine, as one run."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .._core.text import number
from .._heartbeat.server import ELASTIC_TIMEOUT, HEARTBEAT_TIMEOUT
from . import launcher

_ABOUT = """\
Start n processes on this machine. Each line that they print begins with the rank of its process. A script that begins
with jaxpar.distributed.initialize() needs nothing else. If one process fails, is killed or freezes, the launcher ends
all. With --max-restarts it starts all again. With --elastic it starts only the lost process again, and the others
continue; if process 0 is lost, all end. `python` as the first word is the interpreter that runs the launcher.

The launcher is for one machine. For several, start the same script by SLURM, Open MPI, Kubernetes, Ray Train or
SkyPilot, see docs/cluster.md.

exit status: 0: all ended with 0. 2: bad arguments. 128 + signal: a signal ended the launcher. Otherwise the status of
the process that failed first, or 128 + signal if a signal killed it.
"""


def add_parser(commands: Any) -> None:
    """Add `launch` to the subparsers of the command line."""
    parser = commands.add_parser(
        "launch",
        help="start several processes on this machine",
        description=_ABOUT,
        usage="jaxpar launch -n N [options] -- python script.py [arguments]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, number(int, 1)
    add("-n", "--processes", type=count, required=True, metavar="N", help="how many, required")
    add("--devices", type=count, metavar="K", help="emulated CPU devices of each process, no GPU (default: none)")
    add("--gpus-per-process", type=count, metavar="K", help="GPUs of each process (default: an even share)")
    add("--max-restarts", type=number(int, 0), default=0, metavar="R", help="starts after a failure (default: 0)")
    add("--min-processes", type=count, metavar="M", help="a restart leaves out the lost one, down to M (default: N)")
    add("--elastic", action="store_true", help="continue after a loss, and start the lost process again (default: no)")
    add("--coordinator-port", type=_port, metavar="P", help="where they meet (default: a free one at each start)")
    add("--env", action="append", default=[], type=_pair, metavar="K=V", help="a variable for all (default: none)")
    seconds = "seconds from SIGTERM to SIGKILL (default: 30)"
    add("--grace", type=number(float, 0), default=30.0, metavar="S", help=seconds)
    add(
        "--heartbeat-timeout",
        type=number(float, 2),
        default=os.environ.get("JAXPAR_HEARTBEAT_TIMEOUT") or None,
        metavar="S",
        help="seconds without a heartbeat after which a process counts as frozen "
        f"(default: $JAXPAR_HEARTBEAT_TIMEOUT, or {HEARTBEAT_TIMEOUT:g}, with --elastic {ELASTIC_TIMEOUT:g})",
    )
    add("command", nargs=argparse.REMAINDER, help="after --")
    parser.set_defaults(run=lambda args: run(args, parser), parser=parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Check the arguments, start the processes and wait for them."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command given; end the line with: -- python script.py")
    if command[0] == "python":
        command = [sys.executable, *command[1:]]
    if shutil.which(command[0]) is None:
        parser.error(f"cannot find the command {command[0]!r}, or it may not be executed")
    if args.min_processes is not None and args.min_processes > args.processes:
        parser.error(f"--min-processes {args.min_processes} is more than -n {args.processes}")
    if args.elastic and args.min_processes is not None:
        parser.error("give --min-processes, for restarts of all processes, or --elastic, which continues without one")
    if args.devices is not None and args.gpus_per_process is not None:
        parser.error("--devices emulates devices on the CPU, --gpus-per-process shares out GPUs: give one of them")
    env = dict(args.env)
    gpus: list[str] = []
    if args.devices is not None:
        env = {"JAX_NUM_CPU_DEVICES": str(args.devices), "JAX_PLATFORMS": "cpu", **env}
    else:
        try:
            gpus = _choose_gpus({**os.environ, **env}, args.processes, args.gpus_per_process)
        except ValueError as error:
            parser.error(str(error))
    return launcher.launch(
        launcher.Plan(
            command,
            args.processes,
            env=env,
            gpus=gpus,
            max_restarts=args.max_restarts,
            min_processes=args.min_processes,
            port=args.coordinator_port,
            grace=args.grace,
            heartbeat_timeout=args.heartbeat_timeout or (ELASTIC_TIMEOUT if args.elastic else HEARTBEAT_TIMEOUT),
            elastic=args.elastic,
        )
    )


def _choose_gpus(env: dict[str, str], processes: int, each: int | None) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each process. It is empty where there are no GPUs, or JAX_PLATFORMS excludes them."""
    platforms = env.get("JAX_PLATFORMS", "")
    if each is None and platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    gpus = visible_gpus(env, _gpus_of_driver())
    return [] if each is None and not gpus else share_gpus(gpus, processes, each)


def visible_gpus(env: Mapping[str, str], listing: Sequence[str]) -> list[str]:
    """The GPUs of CUDA_VISIBLE_DEVICES, or those that `nvidia-smi -L` lists."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return [name.strip() for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")]
    return [str(i) for i, _ in enumerate(listing)]


def share_gpus(gpus: Sequence[str], processes: int, each: int | None) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each process. `each` None shares all GPUs evenly."""
    number = len(gpus) // processes if each is None else each
    if number < 1 or number * processes > len(gpus):
        raise ValueError(
            f"{processes} processes with {max(number, 1)} GPU each need {max(number, 1) * processes}, there are "
            f"{len(gpus)}; start fewer processes, or give --devices to emulate devices on the CPU"
        )
    return [",".join(gpus[i * number : (i + 1) * number]) for i in range(processes)]


def _gpus_of_driver() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return []
    return [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65535, got {text!r}")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value
