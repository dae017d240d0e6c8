"""Which process this is, of how many, and where process 0 is: from arguments or the environment."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .._core.checks import whole_number

Settings = dict[str, Any]
RAY_TRAIN = "Ray Train"
_WHERE = "distributed.initialize"
_NEEDED = ("coordinator", "num_processes", "process_id")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The settings of one process."""

    coordinator: str  # "host:port" of process 0
    num_processes: int
    process_id: int
    source: str  # where the settings come from, in words
    server: str | None = None  # "host:port" of the launcher's heartbeat server, None without launcher
    job: str = ""  # the name of this run
    local_devices: tuple[int, ...] | None = None  # its GPU, where several processes share a host and each sees all


def find(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    env: Mapping[str, str] = os.environ,
    launched: bool = False,
) -> Cluster | str | None:
    """The settings of this process. An argument goes before the environment.

    None where nothing names several processes. The name of the surroundings where only jax or Ray finds the settings.
    `launched`: only where the processes certainly are one run: JAXPAR_*, the variables of jax, and Ray Train.
    """
    arguments: Settings = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    arguments = {name: value for name, value in arguments.items() if value is not None}

    # What names the processes of one run for certain: the launcher, Ray Train, the variables of jax.
    from_env = _jaxpar(env)
    if not from_env and not arguments and (train := ray_worker()):  # whatever started Ray's own processes
        return RAY_TRAIN if train.get_context().get_world_size() > 1 else None
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if not from_env and all(map(env.get, names)):  # as Kubeflow Trainer and others set them; jax reads only the first
        numbers = {"num_processes": _int(env, names[1]), "process_id": _int(env, names[2])}
        from_env = {"source": "JAX_*", "coordinator": env[names[0]], **numbers}
    if launched and not from_env:
        return None

    # The schedulers of clusters. Their tasks may be separate runs.
    from_env = from_env or _skypilot(env) or _slurm(env) or _open_mpi(env)
    for name in arguments if "server" in from_env else ():
        if arguments[name] != from_env[name]:
            raise ValueError(
                f"{_WHERE}: {name}={arguments[name]!r}, but `jaxpar launch` started this process with "
                f"{from_env[name]!r}; leave the arguments out there"
            )
    if not from_env and not arguments:
        # Where only jax finds the settings, by asking others for them.
        if "JOB_COMPLETION_INDEX" in env and "KUBERNETES_SERVICE_HOST" in env:
            return "Kubernetes"
        # libtpu alone is no TPU: it is the compiler that `jaxpar plan` asks, too.
        chips = (chip for pattern in ("accel[0-9]*", "vfio/[0-9]*") for chip in Path("/dev").glob(pattern))
        if ("TPU_WORKER_HOSTNAMES" in env or any(chips)) and importlib.util.find_spec("libtpu"):
            return "Cloud TPU"
        if "JAX_COORDINATOR_ADDRESS" not in env:
            return None
    source = "the arguments" if arguments else "JAX_COORDINATOR_ADDRESS"
    settings = {"source": source, "coordinator": env.get("JAX_COORDINATOR_ADDRESS"), **from_env, **arguments}

    # They are complete, and each is what it must be.
    if missing := [name for name in _NEEDED if settings.get(name) in (None, "")]:
        got = {name: settings[name] for name in _NEEDED if name not in missing}
        raise ValueError(
            f"{_WHERE}: coordinator, num_processes and process_id belong together, got {got} from "
            f"{settings['source']}; missing: {', '.join(missing)} (or JAXPAR_COORDINATOR, "
            "JAXPAR_NUM_PROCESSES, JAXPAR_PROCESS_ID in the environment)"
        )
    address, size, rank = (settings[name] for name in _NEEDED)
    if not isinstance(address, str) or not re.fullmatch(r"(\[[^\]]+\]|[^:\s]+):\d{1,5}", address):
        raise ValueError(f"{_WHERE}: the coordinator must be 'host:port', got {address!r}")
    size = whole_number(size, _WHERE, "num_processes")
    rank = whole_number(rank, _WHERE, "process_id", 0, size - 1)
    job = settings.get("job") or env.get("JAXPAR_JOB") or address
    checked: Settings = {**settings, "num_processes": size, "process_id": rank, "job": job}
    return Cluster(**checked)


def _jaxpar(env: Mapping[str, str]) -> Settings:
    """The settings of the launcher, or the same variables set by hand."""
    if not {"JAXPAR_COORDINATOR", "JAXPAR_NUM_PROCESSES", "JAXPAR_PROCESS_ID"} & env.keys():
        return {}
    settings: Settings = {
        "source": "JAXPAR_*",
        "coordinator": env.get("JAXPAR_COORDINATOR") or env.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _int(env, "JAXPAR_NUM_PROCESSES"),
        "process_id": _int(env, "JAXPAR_PROCESS_ID", "JOB_COMPLETION_INDEX"),  # the latter in an indexed job
        "job": env.get("JAXPAR_JOB"),
    }
    if env.get("JAXPAR_HUB"):
        settings |= {"source": "jaxpar launch", "server": env["JAXPAR_HUB"]}
    return settings


def _slurm(env: Mapping[str, str]) -> Settings:
    """The settings of `srun`, as jax reads them: the first host of the step, a port by the number of the job."""
    # Only the host of a step on one machine is another one: the loopback address.
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if not all(name in env for name in needed):
        return {}
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", env["SLURM_STEP_NODELIST"])
    host = f"{first[1]}{first[2] or ''}" if first else ""  # node[03-05,07] is node03
    if not re.search(r"[,\[]", env["SLURM_STEP_NODELIST"]):
        host = "127.0.0.1"  # all tasks are on one host, so nothing listens on the network
    alone = re.fullmatch(r"1(\(x\d+\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return {
        "source": "SLURM",
        "coordinator": f"{host}:{_port(env, int(env['SLURM_JOB_ID']))}",
        # An interactive step of `salloc` is one task, whatever the job has.
        "num_processes": _int(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "process_id": _int(env, "SLURM_PROCID"),
        "job": f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}",
        "local_devices": _one_gpu(env, env["SLURM_LOCALID"], bool(alone)),
    }


def _open_mpi(env: Mapping[str, str]) -> Settings:
    """The settings of Open MPI's `mpirun`. From release 5 on they no longer name a host."""
    if "OMPI_COMM_WORLD_SIZE" not in env or "OMPI_COMM_WORLD_RANK" not in env:
        return {}
    size, local = env["OMPI_COMM_WORLD_SIZE"], env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    settings: Settings = {
        "source": "Open MPI",
        "num_processes": _int(env, "OMPI_COMM_WORLD_SIZE"),
        "process_id": _int(env, "OMPI_COMM_WORLD_RANK"),
        "local_devices": _one_gpu(env, env.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"), local == "1"),
    }
    uri = re.match(r"(\d+)\..*?tcp6?://\[?([^,:\]]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    number = int(uri[1]) // 2**12 if uri else sum(env.get("PMIX_NAMESPACE", "").encode())
    if env.get("JAX_COORDINATOR_ADDRESS"):
        settings["coordinator"] = env["JAX_COORDINATOR_ADDRESS"]
    elif size == local:  # on one host nothing listens on the network
        settings["coordinator"] = f"127.0.0.1:{_port(env, number)}"
    elif uri:
        settings["coordinator"] = f"{uri[2]}:{_port(env, number)}"
    else:
        give = "give it: mpirun -x JAX_COORDINATOR_ADDRESS=<first host>:<port> ..."
        raise ValueError(f"{_WHERE}: this release of Open MPI does not say where process 0 is; {give}")
    return settings


def _skypilot(env: Mapping[str, str]) -> Settings:
    """The settings of SkyPilot: one process for each node, and the addresses of the nodes in their order."""
    # They have priority over the variables of SLURM, on which SkyPilot can run, but not over an `mpirun` in the task.
    if "SKYPILOT_NODE_RANK" not in env or "SKYPILOT_NODE_IPS" not in env or "OMPI_COMM_WORLD_SIZE" in env:
        return {}
    nodes, task = env["SKYPILOT_NODE_IPS"].split(), env.get("SKYPILOT_TASK_ID", "")
    size = _int(env, "SKYPILOT_NUM_NODES") or max(1, len(nodes))
    if size == 1:
        return {}
    if len(nodes) != size:
        raise ValueError(f"{_WHERE}: SKYPILOT_NUM_NODES is {size}, but SKYPILOT_NODE_IPS has {len(nodes)} addresses")
    host = f"[{nodes[0]}]" if ":" in nodes[0] else nodes[0]
    return {
        "source": "SkyPilot",
        "coordinator": f"{host}:{_port(env, sum(task.encode()))}",
        "num_processes": size,
        "process_id": _int(env, "SKYPILOT_NODE_RANK"),
        "job": task,
    }


def _int(env: Mapping[str, str], *names: str) -> int | None:
    """The int in the first of these variables that is set."""
    for name in names:
        if env.get(name):
            try:
                return int(env[name])
            except ValueError:
                raise ValueError(f"{_WHERE}: {name} must be an int, got {env[name]!r}") from None
    return None


def _port(env: Mapping[str, str], number: int) -> str:
    """The port as jax chooses it: JAX_COORDINATOR_PORT, or one of the upper 4096, by the number of the job."""
    return env.get("JAX_COORDINATOR_PORT") or str(65535 - 2**12 + 1 + number % 2**12)


def _one_gpu(env: Mapping[str, str], local_rank: str, is_only_one: bool) -> tuple[int, ...] | None:
    """The GPU of this process as jax chooses it. It is None, for all, where the host has no other process."""
    sees_one = len(env.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1 and env.get("CUDA_VISIBLE_DEVICES")
    return None if is_only_one or sees_one else (int(local_rank),)


def ray_worker() -> ModuleType | None:
    """The module `ray.train` in a worker of Ray Train, None elsewhere."""
    # In such a worker Ray has imported it. In other programs it need not even be installed.
    train = sys.modules.get("ray.train")
    if train is None or not hasattr(train, "get_context"):
        return None
    try:
        size = train.get_context().get_world_size()
    except (RuntimeError, DeprecationWarning):  # the driver, a worker of other parts of Ray, a trial of Ray Tune
        return None
    return train if isinstance(size, int) else None


def meet_by_ray(train: Any) -> Cluster:
    """The settings of this worker of Ray Train."""
    # Worker 0 chooses a free port. Ray sends its address to the others, so all of them must call this.
    collective = importlib.import_module("ray.train.collective")  # the releases of the extra `ray` have it
    context = train.get_context()
    rank = context.get_world_rank()
    address = collective.broadcast_from_rank_zero(_free_address_of_ray() if rank == 0 else None)
    return Cluster(address, context.get_world_size(), rank, RAY_TRAIN)


def _free_address_of_ray() -> str:
    """The address by which Ray knows this host, and a free port."""
    host = importlib.import_module("ray.util").get_node_ip_address()
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
