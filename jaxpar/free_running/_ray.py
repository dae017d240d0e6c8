"""Ray, which is imported when it is first used, and its answers."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Sequence
from typing import Any

_LEAST = (2, 59)  # the first Ray whose own start asks for a token
START_TIMEOUT = 300.0  # seconds in which a process starts; it imports JAX


class ServerLost(RuntimeError):
    """A server does not answer any more. What it held is lost."""


def get_ray() -> Any:
    """The module `ray`. Ray is started on this machine if it does not run.

    Raises:
        ImportError: Ray is not installed, or asks nobody for a token.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            'jaxpar.free_running needs Ray, which is not installed; pip install "jaxpar[ray]" adds it'
        ) from error
    if not ray.is_initialized():
        _check_asks_for_token(ray)
        with warnings.catch_warnings():  # Ray forks to start other programs at once, which does not harm JAX
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    return ray


def _check_asks_for_token(ray: Any) -> None:
    """`ImportError` for a Ray that would let everybody connect who reaches this machine, and run code there."""
    version = tuple(int(number) for number in re.findall(r"\d+", ray.__version__)[:2])
    if version < _LEAST:
        raise ImportError(
            f"jaxpar.free_running needs Ray {_LEAST[0]}.{_LEAST[1]} or newer, which asks every connection for a token; "
            f'{ray.__version__} is installed, and pip install -U "jaxpar[ray]" brings a newer one'
        )


def get_answers(answers: Sequence[Any], timeout: float, contents: Sequence[Sequence[str]]) -> list[Any]:
    """Wait for the answers of all servers and return them.

    Args:
        answers: Ray's references, one for each server.
        timeout: seconds to wait for each.
        contents: the names of the values that each server holds.

    Raises:
        ServerLost: a server does not answer. The message names the first one and what it held.
    """
    ray = get_ray()
    results: list[Any] = []
    for i, answer in enumerate(answers):
        try:
            results.append(ray.get(answer, timeout=timeout))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            is_silent = isinstance(error, ray.exceptions.GetTimeoutError)
            what = f"has not answered for {timeout:g} s" if is_silent else "is gone"
            raise ServerLost(
                f"free_running: server {i} of {len(answers)} {what}; it held {', '.join(contents[i]) or 'nothing'}. "
                "Start servers again from the last parameters that you kept"
            ) from error
    return results
