"""Ray, which is imported when it is first used, and started for this machine only."""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import re
import warnings
from collections.abc import Generator
from typing import Any

from .._core.text import say_news

_ON_NETWORK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # where it is 0, all of Ray listens on 127.0.0.1, on Linux too
_CONSTANT = "ENABLE_RAY_CLUSTER"
_LEAST = (2, 59)  # the first Ray whose own start asks for a token
START_TIMEOUT = 300.0  # seconds in which a process starts; it imports JAX


def get_ray() -> Any:
    """The module `ray`. Ray is started on this machine if it does not run."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            'jaxpar.free_running needs Ray, which is not installed; pip install "jaxpar[ray]" adds it'
        ) from error
    if not ray.is_initialized():
        _check_asks_for_token(ray)
        with warnings.catch_warnings(), _on_loopback(ray):
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # it starts other programs, without JAX
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
        _say_where(ray.util.get_node_ip_address())
    return ray


@contextlib.contextmanager
def _on_loopback(ray: Any) -> Generator[None]:
    """A block in which Ray starts for this machine only. The user's own setting of the variable stays."""
    # `_node_ip_address="127.0.0.1"` is not enough: on Linux Ray puts the address of the network in its place.
    if os.environ.get(_ON_NETWORK):
        yield
        return
    constants = ray._private.ray_constants
    before = getattr(constants, _CONSTANT, True)
    os.environ[_ON_NETWORK] = "0"  # for the programs that Ray starts
    setattr(constants, _CONSTANT, False)  # Ray has read the variable when it was imported
    try:
        yield
    finally:
        setattr(constants, _CONSTANT, before)
        del os.environ[_ON_NETWORK]


def _say_where(address: str) -> None:
    """Say it where others than this machine can reach Ray."""
    if not ipaddress.ip_address(address).is_loopback and not os.environ.get(_ON_NETWORK):
        say_news(
            f"free_running: this Ray listens at {address}, which others on the network can reach; it asks them for a "
            "token"
        )


def _check_asks_for_token(ray: Any) -> None:
    """`ImportError` for a Ray that would let everybody connect who reaches this machine, and run code there."""
    version = tuple(int(number) for number in re.findall(r"\d+", ray.__version__)[:2])
    if version < _LEAST:
        raise ImportError(
            f"jaxpar.free_running needs Ray {_LEAST[0]}.{_LEAST[1]} or newer, which asks every connection for a token; "
            f'{ray.__version__} is installed, and pip install -U "jaxpar[ray]" brings a newer one'
        )
