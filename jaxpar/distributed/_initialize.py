"""This process's place in the run: how it joins the other processes, and what it knows of them then.

The processes join through the heartbeat server, then each of them starts jax. The server's address follows from the
coordinator's. Under the launcher it is in the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from .._core.text import say, say_news
from .._devices import processes
from .._heartbeat.client import HeartbeatClient, ServiceProxy, watch_end
from .._heartbeat.server import (
    ELASTIC_TIMEOUT,
    HEARTBEAT_TIMEOUT,
    MOST_SECONDS,
    SECRET,
    HeartbeatServer,
    Secret,
    find_secret,
    is_loopback,
    new_secret,
    split,
)
from . import _elastic, _environment
from ._runtime import job

_WHERE = "distributed.initialize"
_PORTS = 8  # the server takes the first free one of these many after the coordinator's
_JOIN_TIMEOUT = 60.0  # seconds, where jax runs already: the processes are there, and may be slow


@dataclasses.dataclass
class Process:
    """This process among the others."""

    client: HeartbeatClient | None = None
    is_joined: bool = False  # whether `initialize` is done; the process may be the only one
    has_failed: bool = False  # whether jax failed during its own start


this = Process()


def start_jax(*settings: Any, **options: Any) -> None:
    """Start jax, and record an error of that, which cannot be repeated. Its ValueErrors come before it begins."""
    try:
        jax.distributed.initialize(*settings, **options)
    except BaseException as error:
        this.has_failed = not isinstance(error, ValueError)
        raise


def is_joined() -> bool:
    """Whether `initialize` is done, or the user's own `jax.distributed.initialize`."""
    if this.has_failed:  # jax may now say that it is initialised, or that it is one of one
        raise RuntimeError(f"{_WHERE}: an earlier call failed in this process; start all processes again")
    return this.is_joined or jax.distributed.is_initialized()


def is_jax_used() -> bool:
    """Whether JAX has started its devices. Their number is fixed from then on."""
    # jax has no public question for it. It refuses to change the number of CPU devices then.
    number = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", max(number, 0) + 1)
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        return True
    return False


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    initialization_timeout: float | None = None,
    heartbeat_timeout: float | None = None,
    monitor: bool = True,
    preemption_service: bool = False,
    elastic: bool = False,
) -> None:
    """Join the other processes of the run. Call it before using JAX.

    Without arguments, the settings come from the first of these that names several processes: `python -m jaxpar
    launch`, which sets JAXPAR_COORDINATOR, JAXPAR_NUM_PROCESSES and JAXPAR_PROCESS_ID, or these variables set by hand;
    Ray Train; the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; SkyPilot; and, as in jax,
    SLURM, Open MPI, Kubernetes and Cloud TPU. If none does, the call returns, and the process trains alone. So every
    script or notebook may begin with `initialize()` (jax raises in that case). A second call does nothing. If other
    code has called `jax.distributed.initialize`, this call uses its processes. Ray Train restarts its own workers, so
    jaxpar sends no heartbeats there. `kv.create` calls `initialize` for the kinds `dist_...`.

    On CPU devices, Gloo runs the collectives between processes.

    Heartbeats detect that another process was killed, froze, or failed. A running collective may then never return. So
    this process ends with one line on standard error and with exit status `distributed.LOST` (75). The line names the
    lost process and the checkpoint to resume from (`set_resume_hint`). A process that ends with status 0, or pauses for
    a few seconds, does not count as lost.

    Args:
        coordinator: "host:port" of process 0. The heartbeat server uses one of the next eight ports.
        num_processes: the number of processes.
        process_id: the number of this process, from 0.
        local_device_ids: the GPUs of this host that belong to this process. None takes all. Under SLURM and Open MPI
            with several processes on a host, None gives each process one GPU.
        initialization_timeout: seconds to wait for the other processes. None: 60, or JAXPAR_INITIALIZATION_TIMEOUT.
        heartbeat_timeout: seconds without a heartbeat after which a process counts as frozen. A killed process is
            detected at once. None: 30, or JAXPAR_HEARTBEAT_TIMEOUT, which the launcher sets.
        monitor: False turns the heartbeats off. jax then detects a loss after 100 seconds and ends with a C++ stack
            trace and status 134. All processes must give the same value.
        preemption_service: True lets jax catch SIGTERM, for `multihost_utils.reached_preemption_sync_point`.
            With False the program handles SIGTERM: `train.fit` saves a checkpoint.
        elastic: True lets `train.fit` continue when a process other than 0 is lost. The remaining processes repeat the
            failed step, and a restarted process joins at the next step. `heartbeat_timeout` is then 4 by default, and
            also limits how long a collective waits. `jaxpar launch --elastic` sets this option. docs/cluster.md lists
            the limits.

    Raises:
        TypeError: `num_processes` or `process_id` is not an int.
        ValueError: settings are incomplete, out of range or contradictory, or `elastic` is set without `monitor`.
        RuntimeError: JAX was used before; the jax version is too old for `elastic`; the port is taken; process 0 does
            not answer; the other processes did not join in time, or joined with other settings; an earlier call failed
            half-way.
    """
    elastic = elastic or os.environ.get(_elastic.VARIABLE) == "1"
    if is_joined():
        if elastic and not processes.is_elastic() and jax.distributed.is_initialized():
            raise RuntimeError(
                f"{_WHERE}: elastic=True comes too late, jax was initialised without it; give it in the first call, "
                "instead of jax.distributed.initialize"
            )
        return _attach(num_processes, process_id)

    # The settings: of the arguments, or else of the environment.
    if initialization_timeout is None:
        initialization_timeout = float(os.environ.get("JAXPAR_INITIALIZATION_TIMEOUT") or 60)
    if heartbeat_timeout is None:
        usual = ELASTIC_TIMEOUT if elastic else HEARTBEAT_TIMEOUT
        heartbeat_timeout = float(os.environ.get("JAXPAR_HEARTBEAT_TIMEOUT") or usual)
    if not 0 < initialization_timeout <= MOST_SECONDS or not 2 <= heartbeat_timeout <= MOST_SECONDS:
        raise ValueError(
            f"{_WHERE}: initialization_timeout must be above 0 and heartbeat_timeout 2 seconds or more, got "
            f"{initialization_timeout:g} and {heartbeat_timeout:g}; both at most {MOST_SECONDS:.0f}, a week"
        )
    cluster = _environment.find(coordinator, num_processes, process_id)
    by_hand = any(x is not None for x in (coordinator, num_processes, process_id))
    is_known = isinstance(cluster, _environment.Cluster)
    if cluster is None or (is_known and cluster.num_processes == 1 and not cluster.server and not by_hand):
        return

    # What jax must be told before it starts its devices.
    if is_jax_used():
        raise RuntimeError(
            f"{_WHERE}: JAX runs already and cannot become one of several processes now; call it before anything else "
            "that uses JAX (in a notebook, restart the kernel and call it first)"
        )
    elastic = elastic and not (is_known and cluster.num_processes == 1)
    if elastic:
        _elastic.check_elastic(cluster, monitor)
    jax.config.update("jax_enable_preemption_service", preemption_service)
    if not jax.config.jax_cpu_collectives_implementation:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # the user's own "mpi" stays
    if cluster == _environment.RAY_TRAIN:  # which watches its workers
        cluster, monitor = _environment.meet_by_ray(_environment.ray_worker()), False
    options: dict[str, Any] = {
        "local_device_ids": local_device_ids,
        "initialization_timeout": max(1, round(initialization_timeout)),
        # jax's own watch ends a process with a stack trace, also after a stop of all (Ctrl-Z, a paused container). 100
        # seconds are its default.
        "heartbeat_timeout_seconds": _elastic.NEVER if monitor else round(max(100, heartbeat_timeout)),
    }
    if elastic:
        options |= _elastic.configure(heartbeat_timeout)

    # The processes meet. Of some clusters only jax knows where: then jax starts before the heartbeats.
    if isinstance(cluster, str):
        _start_by_jax(cluster, options, heartbeat_timeout, monitor)
    else:
        _start(cluster, options, heartbeat_timeout, initialization_timeout, monitor)
        if cluster.source == _environment.RAY_TRAIN:
            _say_ray_watches(cluster.num_processes, cluster.process_id, "jax runs")
    this.is_joined = True


def _attach(num_processes: int | None, process_id: int | None) -> None:
    """Go on in the processes that jax has already. Nothing is started: no heartbeats, no hooks at the end."""
    # The code that started jax also ends it, perhaps while others still work: what closes a connection would be no loss
    # then. In Ray Train, one line says who watches.
    if this.is_joined:  # by ourselves
        return
    size, rank = job().num_processes, job().process_id
    for name, argument, of_jax in (("num_processes", num_processes, size), ("process_id", process_id, rank)):
        if argument is not None and argument != of_jax:
            raise RuntimeError(
                f"{_WHERE}: {name}={argument!r}, but jax.distributed was initialised by other code, and there it is "
                f"{of_jax}; leave the arguments out, or call this first"
            )
    if (train := _environment.ray_worker()) is not None:
        context = train.get_context()
        _say_ray_watches(context.get_world_size(), context.get_world_rank(), "Ray Train has started jax")


def join(caller: str) -> None:
    """Call `initialize()` unless this process has already joined the others.

    `kv.create` calls this for the kinds `dist_...`. With one process it does nothing.

    Args:
        caller: the name of the caller, at the beginning of the message.

    Raises:
        RuntimeError, ValueError: as `initialize`. JAX was used before, and there are others to join.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.join("my_function")  # one process: there is nothing to join
    """
    if is_joined() or _environment.find() is None:
        return
    if not is_jax_used():
        return initialize()
    used = "JAX was used before (by an array, a random key or jax.devices()), so it has one process from then on"
    check_joined(caller, f"it is alone: {used}")


def check_joined(caller: str, harm: str, *, launched: bool = False) -> None:
    """Raise if the run has other processes that this one has not joined.

    Args:
        caller: the name of the caller, at the beginning of the message.
        harm: a clause that says what would go wrong.
        launched: True checks only under `jaxpar launch`, in Ray Train and under jax's own variables, where all
            processes belong to one run. Tasks of SLURM may be separate runs.

    Raises:
        RuntimeError: this process has not joined the others.
        ValueError: as `initialize`.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.check_joined("my_function", "the sum would be too small")  # one process
    """
    if is_joined():
        return
    cluster = _environment.find(launched=launched)
    if isinstance(cluster, _environment.Cluster):
        has_others = cluster.num_processes > 1
        place = f"process {cluster.process_id} of {cluster.num_processes} ({cluster.source})"
    else:  # on Cloud TPU jax counts the processes without being initialised
        has_others, place = cluster not in (None, "Cloud TPU"), f"one of several ({cluster})"
    if has_others:
        call = "Call jp.distributed.initialize() before the first use of JAX"
        if launched:
            call += "; separate runs are trials of Ray Tune, or start without the variables JAXPAR_* and JAX_*"
        raise RuntimeError(f"{caller}: this is {place} and has not joined the others, so {harm}. {call}")


def set_resume_hint(path: str | os.PathLike[str] | None) -> None:
    """Set the checkpoint to name when a process is lost.

    `train.fit` calls this after each checkpoint. All processes receive the path. A process that ends because another
    process was lost prints it.

    Args:
        path: the newest good checkpoint, or None.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.set_resume_hint("runs/lenet/step_00000120")
    """
    if this.client is not None:
        this.client.send_resume_hint(None if path is None else os.fspath(path))


def report_working() -> None:
    """Tell the launcher that this process, which may have been started again, does its work."""
    if this.client is not None:
        this.client.report_working()


def losses() -> list[int]:
    """In process 0 of an elastic run: who was lost, one after the other. It grows while the run goes on."""
    return [] if this.client is None else this.client.losses


def known_processes() -> int:
    """The number of processes that `initialize` found, and 1 before.

    Unlike `jax.process_count`, this call starts no device. If other code has called `jax.distributed.initialize`, the
    result is the number of processes of that call.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.known_processes()
        1
    """
    return job().num_processes


def wait_for_loss_report() -> None:
    """Wait one second for the report of a lost process.

    A collective can raise before the report of its lost peer has arrived, so call this before showing the exception. If
    a process was lost, this process ends with one line on standard error. With one process the call returns at once.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.wait_for_loss_report()
    """
    if this.client is not None:
        this.client.wait_for_loss_report()


# The start of several processes.


def _start(
    cluster: _environment.Cluster, options: dict[str, Any], heartbeat_timeout: float, join_timeout: float, watch: bool
) -> None:
    """Join the others, then start jax with the options. `watch` says whether the processes send heartbeats."""
    several = cluster.num_processes > 1
    with reserve_port(cluster.coordinator) if several and cluster.process_id == 0 else contextlib.nullcontext():
        if watch and (several or cluster.server):
            this.client = join_others(cluster, heartbeat_timeout, join_timeout)
            watch_end(this.client)
    if several or not cluster.server:
        if options["local_device_ids"] is None:
            options = {**options, "local_device_ids": cluster.local_devices}
        host, port = split(cluster.coordinator)
        address = cluster.coordinator
        # In process 0 jax's client ends with its service anyway.
        if this.client is not None and cluster.process_id:
            address = ServiceProxy(address).address
        bind = f"127.0.0.1:{port}" if is_loopback(host) else None  # None for all interfaces
        start_jax(
            address,
            cluster.num_processes,
            cluster.process_id,
            cluster_detection_method="deactivate",  # the settings are complete
            coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or bind,
            **options,
        )
    if processes.is_elastic():
        _elastic.Board().release_others(cluster.process_id)


def _say_ray_watches(size: int, rank: int, what: str) -> None:
    """Say in the first worker of Ray Train who watches it."""
    if rank == 0:
        say_news(f"{what} in {size} processes; Ray watches them and starts them again, so jaxpar sends no heartbeats")


def _start_by_jax(name: str, options: dict[str, Any], heartbeat_timeout: float, watch: bool) -> None:
    """Start jax where only it can find the settings, such as "Kubernetes". The heartbeats begin after that."""
    try:
        start_jax(**options)
    except ValueError as error:
        if "must be defined" not in str(error) and "should be defined" not in str(error):
            raise
        if name == "Cloud TPU":
            return  # a single host
        names = "JAXPAR_COORDINATOR and JAXPAR_NUM_PROCESSES (the number of the process is JOB_COMPLETION_INDEX)"
        raise RuntimeError(f"{_WHERE}: jax finds no settings in {name}; set {names}, or install jax[k8s]") from error
    size, rank = job().num_processes, job().process_id
    if not watch or size == 1:
        return

    # Process 0 sends the port and the secret of its heartbeat server by a collective, and not by jax's key-value store,
    # which everybody can read who reaches it.
    run: dict[str, Any] = {"job": "jax", "heartbeat_timeout": heartbeat_timeout}
    server, port_and_key = None, ""  # of process 0, the others send nothing
    if rank == 0:
        secret, listener = new_secret("process 0"), socket.create_server(("", 0))
        server = HeartbeatServer(listener, **run, size=size, secret=secret, join_timeout=_JOIN_TIMEOUT)
        port_and_key = f"{listener.getsockname()[1]} {secret.key.decode()}"
    with ThreadPoolExecutor(1) as thread:  # in this one jax may be tracing, around a kv.create
        port, key = "".join(thread.submit(processes.exchange, port_and_key).result()).split(" ")
    secret, (host, _) = Secret(key.encode(), "process 0"), split(job().coordinator_address)
    client = HeartbeatClient(rank, size, **run, secret=secret, launched=False, server=server)
    this.client = _join_run(client, [(host, int(port))], _JOIN_TIMEOUT, f"no answer at {host}:{port}")
    watch_end(this.client)


def reserve_port(address: str) -> socket.socket:
    """Reserve the coordinator's port until jax takes it. Close the socket then."""
    # Without this gRPC would silently share the port with another run (SO_REUSEPORT), and processes of the one would
    # connect to the other. The socket does not listen, so that a process which starts jax earlier is refused, and tries
    # again.
    _, port = split(address)
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what is left of an earlier run does not count
        reserved.bind(("", port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # from now on nobody else may bind it
    except OSError as error:
        reserved.close()
        raise RuntimeError(
            f"{_WHERE}: port {port} of the coordinator {address} cannot be used on this host: "
            f"{os.strerror(error.errno or 0)}; another run may have it, choose another port"
        ) from None
    return reserved


def join_others(cluster: _environment.Cluster, heartbeat_timeout: float, join_timeout: float) -> HeartbeatClient:
    """Join the others, and return the heartbeat client. Process 0 starts the server where no launcher has it."""
    rank, size, secret, elastic = cluster.process_id, cluster.num_processes, find_secret(), processes.is_elastic()
    run: dict[str, Any] = {"job": cluster.job, "secret": secret, "heartbeat_timeout": heartbeat_timeout}
    host, port = split(cluster.server or cluster.coordinator)
    step = 1 if port + _PORTS <= 65535 else -1
    ports = [port + step * i for i in range(1, _PORTS + 1)]
    absent = (
        f"process 0 is not there: no answer from the coordinator {cluster.coordinator} at ports {min(ports)} to "
        f"{max(ports)} of the heartbeat server"
    )
    addresses, server = [(host, p) for p in ports], None
    if cluster.server:
        addresses, absent = [(host, port)], f"the launcher is not there: no answer at {cluster.server}"
    elif rank == 0:
        if secret is None and not is_loopback(host):
            danger = "any program that reaches this host's network can take part in the heartbeats of this run and end"
            hint = f"set {SECRET} to one random text in all processes, or write it to ~/.config/jaxpar/secret"
            say_news(f"{danger} it; to prevent that, {hint} (chmod 600)")
        for free_port in ports:
            with contextlib.suppress(OSError):
                listener = socket.create_server(("127.0.0.1" if is_loopback(host) else "", free_port))
                break
        else:
            raise RuntimeError(
                f"{_WHERE}: the heartbeat server takes one of the ports {min(ports)} to {max(ports)} on this host, and "
                "none is free; choose another port for the coordinator"
            )
        addresses = [("127.0.0.1", listener.getsockname()[1])]
        on_leave = (lambda rank, why: say(f"process {rank} was lost: {why}; the others continue")) if elastic else None
        server = HeartbeatServer(listener, **run, size=size, join_timeout=join_timeout, on_leave=on_leave)
    client = HeartbeatClient(rank, size, **run, launched=bool(cluster.server), server=server)
    if elastic:
        client.forget = functools.partial(_elastic.forget, cluster.coordinator, size)
    return _join_run(client, addresses, join_timeout, absent)


def _join_run(
    client: HeartbeatClient, addresses: list[tuple[str, int]], seconds: float, absent: str
) -> HeartbeatClient:
    if client.server is not None:
        client.server.thread.start()
    try:
        client.join_run(addresses, seconds, absent)
    except ConnectionError as error:
        raise RuntimeError(f"{_WHERE}: {error} (this is process {client.rank} of {client.size})") from None
    return client
