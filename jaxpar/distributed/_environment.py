"""Which process this is, of how many, and where process 0 is: from arguments or the environment."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any

from .._core.checks import whole_number
from . import _ray

RAY_TRAIN = "Ray Train"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The settings of one process.

    Attributes:
        coordinator: "host:port" of process 0.
        num_processes, process_id: how many there are, and which one this is.
        source: where the settings come from, in words.
        server: "host:port" of the launcher's heartbeat server. None without launcher.
        job: the name of this run.
        local_devices: the GPU of this process where several processes share a host and each sees all GPUs.
    """

    coordinator: str
    num_processes: int
    process_id: int
    source: str
    server: str | None = None
    job: str = ""
    local_devices: tuple[int, ...] | None = None

    @property
    def is_single(self) -> bool:
        """Whether there is one process, without a launcher."""
        return self.num_processes == 1 and not self.server


Settings = dict[str, Any]


_NEEDED = ("coordinator", "num_processes", "process_id")


def find(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    env: Mapping[str, str] = os.environ,
) -> Cluster | str | None:
    """The settings of this process. An argument goes before the environment.

    Returns:
        The settings. None where nothing names several processes. The name of the surroundings where only jax or Ray
        can find the settings.

    Raises:
        TypeError: `num_processes` or `process_id` is no int.
        ValueError: settings that are incomplete, out of range, or contradict the launcher.
    """
    given: Settings = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    given = {name: value for name, value in given.items() if value is not None}
    found = _jaxpar(env)
    if not found and not given and (train := _ray.worker()):
        return RAY_TRAIN if train.get_context().get_world_size() > 1 else None  # whatever started Ray's own processes
    found = found or _by_jax_names(env) or _skypilot(env) or _slurm(env) or _open_mpi(env)
    if "server" in found and (other := [n for n, v in given.items() if v != found[n]]):
        name = other[0]
        raise ValueError(
            f"distributed.initialize: {name}={given[name]!r}, but `jaxpar launch` started this process with "
            f"{found[name]!r}; leave the arguments out under the launcher"
        )
    if not found and not given and (elsewhere := _only_jax(env)):
        return elsewhere
    if not found and not given and "JAX_COORDINATOR_ADDRESS" not in env:
        return None
    source = "the arguments" if given else "JAX_COORDINATOR_ADDRESS"
    settings = {"source": source, "coordinator": env.get("JAX_COORDINATOR_ADDRESS"), **found, **given}
    return _cluster(settings, env)


def find_launched(env: Mapping[str, str] = os.environ) -> Cluster | str | None:
    """The settings where the processes certainly are one run, or None.

    Those are the variables JAXPAR_*, of `jaxpar launch` or the user, those of jax's names, and Ray Train.
    """
    return find(None, None, None, env) if _jaxpar(env) or _by_jax_names(env) or _ray.worker() else None


def describe_separate(found: Cluster | str | None) -> str:
    """How separate runs are started, where `find_launched` found one run."""
    if isinstance(found, Cluster):
        names = "JAX_*" if found.source == "JAX_*" else "JAXPAR_*"
        return f"separate runs are started without the variables {names}"
    return "separate runs are trials of Ray Tune"


def has_others(found: Cluster | str | None) -> bool:
    """Whether `find` found several processes. On Cloud TPU jax counts them without being initialised."""
    if isinstance(found, Cluster):
        return found.num_processes > 1
    return found is not None and found != "Cloud TPU"


def describe(found: Cluster | str | None) -> str:
    """Which process of how many, and where that comes from."""
    if isinstance(found, Cluster):
        return f"process {found.process_id} of {found.num_processes} ({found.source})"
    return f"one of several ({found})"


def _jaxpar(env: Mapping[str, str]) -> Settings:
    """The settings of the launcher, or the same variables set by hand."""
    names = {
        "coordinator": ("JAXPAR_COORDINATOR", "JAX_COORDINATOR_ADDRESS"),
        "num_processes": ("JAXPAR_NUM_PROCESSES",),
        "process_id": ("JAXPAR_PROCESS_ID", "JOB_COMPLETION_INDEX"),
    }
    if not any(name.startswith("JAXPAR_") and name in env for tried in names.values() for name in tried):
        return {}
    found: Settings = {"source": "JAXPAR_*", "job": env.get("JAXPAR_JOB", "")}
    for setting, tried in names.items():
        value = next((env[name] for name in tried if env.get(name)), None)
        found[setting] = value if setting == "coordinator" or value is None else _int(tried[0], value)
    if env.get("JAXPAR_HUB"):
        found |= {"server": env["JAXPAR_HUB"], "source": "jaxpar launch"}
    return found


def _by_jax_names(env: Mapping[str, str]) -> Settings:
    """The settings under jax's own names, as Kubeflow Trainer and others set them. jax reads only the first."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if not all(env.get(name) for name in names):
        return {}
    address, size, rank = (env[name] for name in names)
    return {
        "source": "JAX_*",
        "coordinator": address,
        "num_processes": _int(names[1], size),
        "process_id": _int(names[2], rank),
    }


def _slurm(env: Mapping[str, str]) -> Settings:
    """The settings of `srun`, as jax reads them: the first host of the step, a port by the number of the job.

    Only the host of a step on one machine is another one: the loopback address.
    """
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if not all(name in env for name in needed):
        return {}
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", env["SLURM_STEP_NODELIST"])
    host = "".join(part or "" for part in first.groups()) if first else ""
    if not re.search(r"[,\[]", env["SLURM_STEP_NODELIST"]):
        host = "127.0.0.1"  # all tasks are on one host, so nothing listens on the network
    return {
        "source": "SLURM",
        "coordinator": f"{host}:{_port(env, int(env['SLURM_JOB_ID']))}",
        # An interactive step of `salloc` is one task, whatever the job has.
        "num_processes": _int("SLURM_NTASKS", env.get("SLURM_STEP_NUM_TASKS", env["SLURM_NTASKS"])),
        "process_id": _int("SLURM_PROCID", env["SLURM_PROCID"]),
        "job": f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}",
        "local_devices": _one_gpu(
            env, env["SLURM_LOCALID"], re.fullmatch(r"1(\(x\d+\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        ),
    }


def _open_mpi(env: Mapping[str, str]) -> Settings:
    """The settings of Open MPI's `mpirun`. From release 5 on they no longer name a host."""
    if "OMPI_COMM_WORLD_SIZE" not in env or "OMPI_COMM_WORLD_RANK" not in env:
        return {}
    size, local = env["OMPI_COMM_WORLD_SIZE"], env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    found: Settings = {
        "source": "Open MPI",
        "num_processes": _int("OMPI_COMM_WORLD_SIZE", size),
        "process_id": _int("OMPI_COMM_WORLD_RANK", env["OMPI_COMM_WORLD_RANK"]),
        "local_devices": _one_gpu(env, env.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"), local == "1"),
    }
    uri = re.match(r"(\d+)\..*?tcp6?://\[?([^,:\]]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    number = int(uri[1]) // 2**12 if uri else sum(env.get("PMIX_NAMESPACE", "").encode())
    if env.get("JAX_COORDINATOR_ADDRESS"):
        found["coordinator"] = env["JAX_COORDINATOR_ADDRESS"]
    elif size == local:  # on one host nothing listens on the network
        found["coordinator"] = f"127.0.0.1:{_port(env, number)}"
    elif uri:
        found["coordinator"] = f"{uri[2]}:{_port(env, number)}"
    else:
        raise ValueError(
            "distributed.initialize: this release of Open MPI does not say where process 0 is; give it: "
            "mpirun -x JAX_COORDINATOR_ADDRESS=<first host>:<port> ..."
        )
    return found


def _skypilot(env: Mapping[str, str]) -> Settings:
    """The settings of SkyPilot: one process for each node, and the addresses of the nodes in their order.

    They go before those of SLURM, on which SkyPilot can run, and not before those of an `mpirun` in its task.
    """
    if "SKYPILOT_NODE_RANK" not in env or "SKYPILOT_NODE_IPS" not in env or "OMPI_COMM_WORLD_SIZE" in env:
        return {}
    nodes, task = env["SKYPILOT_NODE_IPS"].split(), env.get("SKYPILOT_TASK_ID", "")
    size = _int("SKYPILOT_NUM_NODES", env.get("SKYPILOT_NUM_NODES") or str(max(1, len(nodes))))
    if size == 1:
        return {}
    if len(nodes) != size:
        raise ValueError(
            f"distributed.initialize: SKYPILOT_NUM_NODES is {size}, but SKYPILOT_NODE_IPS has {len(nodes)} addresses"
        )
    host = f"[{nodes[0]}]" if ":" in nodes[0] else nodes[0]
    return {
        "source": "SkyPilot",
        "coordinator": f"{host}:{_port(env, sum(task.encode()))}",
        "num_processes": size,
        "process_id": _int("SKYPILOT_NODE_RANK", env["SKYPILOT_NODE_RANK"]),
        "job": task,
    }


def _only_jax(env: Mapping[str, str]) -> str | None:
    if "JOB_COMPLETION_INDEX" in env and "KUBERNETES_SERVICE_HOST" in env:
        return "Kubernetes"
    return "Cloud TPU" if _has_libtpu() else None


@functools.cache
def _has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def _cluster(settings: Settings, env: Mapping[str, str]) -> Cluster:
    """The settings of a process, after all checks."""
    _check_complete(settings)
    address, size, rank = (settings[name] for name in _NEEDED)
    if not isinstance(address, str) or not re.fullmatch(r"(\[[^\]]+\]|[^:\s]+):\d{1,5}", address):
        raise ValueError(f"distributed.initialize: the coordinator must be 'host:port', got {address!r}")
    size = whole_number(size, "distributed.initialize", "num_processes")
    rank = whole_number(rank, "distributed.initialize", "process_id", 0)
    if rank >= size:
        raise ValueError(f"distributed.initialize: process_id must be an int from 0 to {size - 1}, got {rank}")
    job = settings.get("job") or env.get("JAXPAR_JOB") or address
    checked: Settings = {**settings, "num_processes": size, "process_id": rank, "job": job}
    return Cluster(**checked)


def _check_complete(settings: Settings) -> None:
    """`ValueError` where the coordinator, the number of processes or that of this one is missing."""
    missing = [name for name in _NEEDED if settings.get(name) is None]
    if not missing:
        return
    given = {name: settings[name] for name in _NEEDED if name not in missing}
    raise ValueError(
        f"distributed.initialize: coordinator, num_processes and process_id belong together, got {given} from "
        f"{settings['source']}; missing: {', '.join(missing)} (or "
        "JAXPAR_COORDINATOR, JAXPAR_NUM_PROCESSES, JAXPAR_PROCESS_ID in the environment)"
    )


def _int(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"distributed.initialize: {name} must be an int, got {value!r}") from None


def _port(env: Mapping[str, str], number: int) -> str:
    """The port as jax chooses it: JAX_COORDINATOR_PORT, or one of the upper 4096, by the number of the job."""
    return env.get("JAX_COORDINATOR_PORT") or str(65535 - 2**12 + 1 + number % 2**12)


def _one_gpu(env: Mapping[str, str], local_rank: str, is_only_one: object) -> tuple[int, ...] | None:
    """The GPU of this process as jax chooses it. It is None, for all, where the host has no other process."""
    sees_one = len(env.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1 and env.get("CUDA_VISIBLE_DEVICES")
    return None if is_only_one or sees_one else (int(local_rank),)
