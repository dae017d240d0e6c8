"""Parameter servers that never make a worker wait: MXNet's own `dist_async`, on Ray actors.

One or more servers hold the parameters. Each worker pulls them, computes a gradient on its own batch and pushes it. A
server updates with every push as it arrives. There is no barrier and no order: a slow or killed worker delays no other,
and two runs never give the same numbers. Kind `dist_async` of `jaxpar.kv` is the deterministic way, and usually the
better one. docs/free_running.md compares the two.

It needs Ray (`pip install "jaxpar[ray]"`), which is imported when servers start. Arrays are sent as NumPy arrays
through host memory. Gradient compression is not available here.

    _placement   which server holds what
    _servers     a server, and the start of several
    _workers     pull and push, in processes of their own
    _ray         Ray, and its answers
"""

from ._placement import SPLIT as SPLIT, Piece as Piece, placement as placement
from ._ray import ServerLost as ServerLost
from ._servers import Servers as Servers, start as start, status as status, stop as stop
from ._workers import Outcome as Outcome, Running as Running, Worker as Worker, finish as finish, run as run
