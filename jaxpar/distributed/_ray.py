"""A worker of Ray Train: which one it is, of how many, and where they meet. Ray is not imported before that."""

from __future__ import annotations

import importlib
import socket
import sys
from typing import Any


def worker() -> Any | None:
    """The module `ray.train` in a worker of Ray Train, None elsewhere.

    In such a worker Ray has imported it. In other programs it need not even be installed.
    """
    train = sys.modules.get("ray.train")
    if train is None or not hasattr(train, "get_context"):
        return None
    try:
        size = train.get_context().get_world_size()
    except (RuntimeError, DeprecationWarning):  # the driver, a worker of other parts of Ray, a trial of Ray Tune
        return None
    return train if isinstance(size, int) else None


def meet(train: Any) -> tuple[str, int, int]:
    """ "host:port" of worker 0, the number of workers, and that of this one.

    Worker 0 chooses a free port. Ray sends its address to the others, so all of them must call this.

    Args:
        train: from `worker`.

    Raises:
        RuntimeError: this Ray is too old to send it.
    """
    try:
        collective = importlib.import_module("ray.train.collective")
    except ModuleNotFoundError:
        raise RuntimeError(
            "distributed.initialize: this Ray has no ray.train.collective, by which its workers could meet; install "
            "the extra jaxpar[ray], or let Ray start jax: JaxTrainer(..., jax_config=JaxConfig(use_gpu=True))"
        ) from None
    context = train.get_context()
    rank = context.get_world_rank()
    address = collective.broadcast_from_rank_zero(_free_address() if rank == 0 else None)
    return address, context.get_world_size(), rank


def _free_address() -> str:
    """The address by which Ray knows this host, and a free port."""
    host = importlib.import_module("ray.util").get_node_ip_address()
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
