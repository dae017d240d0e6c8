"""All that jaxpar uses of jax beside its public names: the runtime of several processes.

A release of jax may rename any of it. `NAMES` and `ELASTIC_NAMES` list it, each with its reason. No other module uses
it, and `tests/distributed/test_runtime.py` says what is missing in the jax that is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
from jax.experimental import multihost_utils

from .._core.arrays import Device

_STATE, _CLIENT = "distributed.State", "distributed._jax.DistributedRuntimeClient"
# By their place in `jax.experimental.multihost_utils`. A name of jax's configuration begins with "jax_".
NAMES = {
    f"{_STATE}.num_processes": "how many processes there are, before jax starts its devices",
    f"{_STATE}.process_id": "which process this is, before jax starts its devices",
    f"{_STATE}.coordinator_address": "the host of process 0, where only jax finds it, as in Kubernetes",
}
ELASTIC_NAMES = {
    f"{_STATE}.client": "the connection to jax's coordination service",
    f"{_STATE}.initialize": "a connection in the place of a lost process",
    f"{_STATE}.initialize_preemption_sync_manager": "that connection needs none, and jax has one for a process",
    f"{_STATE}.shutdown": "its end, after which the service has forgotten the lost process",
    f"{_CLIENT}.get_live_nodes": "the barrier among living processes, and the number of the start of each",
    f"{_CLIENT}.key_value_set": "what the processes of a run write for each other",
    f"{_CLIENT}.key_value_try_get": "the same, read",
    f"{_CLIENT}.blocking_key_value_get": "the same, waited for",
    f"{_CLIENT}.key_value_dir_get": "the same of all processes",
    f"{_CLIENT}.key_value_delete": "what Gloo knows of an earlier process",
    f"{_CLIENT}.key_value_set_bytes": "an address for Gloo, which ends its wait",
    f"{_CLIENT}.key_value_dir_get_bytes": "the addresses that Gloo has written",
    "live_devices": "whether a block of work has succeeded in all processes or in none",
    "live_devices.devices": "which starts of the processes its next barrier compares with",
    "ProcessFailureError": "which devices a barrier has found lost",
    "jax_enable_recoverability": "that the service goes on after a loss",
}


class Client(Protocol):
    """A connection to jax's coordination service, which process 0 has. Times are milliseconds."""

    def get_live_nodes(self, process_ids: list[int], /) -> dict[int, int]: ...
    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool = False) -> None: ...
    def key_value_try_get(self, key: str, /) -> str: ...
    def blocking_key_value_get(self, key: str, timeout: int, /) -> str: ...
    def key_value_dir_get(self, key: str, /) -> list[tuple[str, str]]: ...
    def key_value_delete(self, key: str, /) -> None: ...
    def key_value_set_bytes(self, key: str, value: bytes, /) -> None: ...
    def key_value_dir_get_bytes(self, key: str, /) -> list[tuple[str, bytes]]: ...


class LiveDevices(Protocol):
    """A block of work among processes, with a barrier at its end. It raises `ProcessFailureError` after a loss."""

    devices: dict[Device, int] | None  # those that lived at the last barrier, with the number of the start of each

    def __call__(self, devices: Sequence[Device], /) -> AbstractContextManager[list[Device]]: ...


def missing(names: dict[str, str]) -> list[str]:
    """Which of the names the installed jax does not have."""

    def exists(name: str) -> bool:
        owner: Any = jax.config if name.startswith("jax_") else multihost_utils
        for attribute in name.split("."):
            if not hasattr(owner, attribute):
                return False
            owner = getattr(owner, attribute)
        return True

    return [name for name in names if not exists(name)]


def job() -> Any:
    """What jax has of this process: `num_processes`, `process_id`, `coordinator_address`. It starts no device."""
    return multihost_utils.distributed.global_state  # pyright: ignore[reportPrivateImportUsage]


def client() -> Client:
    """The connection of this process. There is none before jax has started it, and in a process by itself."""
    return job().client


def live_devices(starts: dict[Device, int] | None = None) -> LiveDevices:
    """Blocks of work of their own, as after a barrier among these devices, or before the first one."""
    live = type(multihost_utils.live_devices)()
    live.devices = starts
    return live


def process_failure() -> Any:
    """The exception after a loss. Its `failed_devices` are those of the lost processes."""
    return multihost_utils.ProcessFailureError


def connect_and_leave(address: str, processes: int, rank: int, **options: Any) -> None:
    """Connect to the coordination service as the process of this rank, and leave in order.

    `options` are those of `jax.distributed.initialize`.
    """
    state = type(job())()
    state.initialize_preemption_sync_manager = lambda: None
    state.initialize(address, processes, rank, cluster_detection_method="deactivate", local_device_ids=[], **options)
    state.shutdown()
