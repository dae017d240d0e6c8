"""Several processes, by `jax.distributed`: how they find each other, and how they notice that one is lost.

>>> from jaxpar import distributed
>>> distributed.initialize()  # one process: there is nothing to do

The same script runs in a notebook, under `python -m jaxpar launch`, in Ray Train, under SLURM, Open MPI, Kubernetes and
SkyPilot, and on Cloud TPU.

A start goes one way:

    _environment   which process this is, of how many, and where process 0 is
    _initialize    check the request, choose the way of the start
    _rendezvous    join the others through the heartbeat server
    _start         start jax
    _process       this process's place in the run, from then on

`_elastic` says who computes together in an elastic run. `_attach` joins where other code has started jax. `_ray` knows
the workers of Ray Train.
`_join` is for callers that need all processes, such as `kv.create`.
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from .._heartbeat.messages import LOST as LOST
from ._elastic import (
    Board as _Board,
    end_left_behind as _end_left_behind,
    is_elastic as is_elastic,
    is_start as _is_start,
    is_starts as _is_starts,
    own_start as _own_start,
    release_others as _release_others,
)
from ._initialize import initialize as initialize
from ._join import check_joined as check_joined, join as join
from ._process import (
    known_processes as known_processes,
    report_working as _report_working,
    set_resume_hint as set_resume_hint,
    wait_for_loss_report as wait_for_loss_report,
)
from ._ray import worker as _ray_worker
