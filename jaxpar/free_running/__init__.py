"""Asynchronous parameter servers on Ray actors, as MXNet's `dist_async`.

One or more servers hold the parameters. Each worker pulls them, computes a gradient on its own batch and pushes the
gradient. A server applies each push when it arrives. There is no barrier and no fixed order: a slow or killed worker
delays no other worker, and two runs give different numbers. Kind `dist_async` of `jaxpar.kv` is deterministic and
usually the better choice. docs/async.md compares both.

This module needs Ray (`pip install "jaxpar[ray]"`) and imports it when servers start. Arrays are sent as NumPy arrays
through host memory. Gradient compression is not available.
"""

from ._servers import (
    SPLIT as SPLIT,
    Outcome as Outcome,
    Piece as Piece,
    Running as Running,
    ServerLost as ServerLost,
    Servers as Servers,
    Worker as Worker,
    finish as finish,
    placement as placement,
    run as run,
    start as start,
    status as status,
    stop as stop,
)
