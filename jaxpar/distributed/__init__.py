"""Training in several processes over `jax.distributed`, with heartbeats that detect a lost process.

>>> from jaxpar import distributed
>>> distributed.initialize()  # one process: there is nothing to do

The same script runs in a notebook, under `python -m jaxpar launch`, in Ray Train, under SLURM, Open MPI, Kubernetes and
SkyPilot, and on Cloud TPU.

    _environment   finds the process number, the number of processes and the address of process 0
    _initialize    checks the arguments, joins the other processes through the heartbeat server, then starts jax;
                   `join` is for callers such as `kv.create`
    _elastic       the members of an elastic run
    _gloo          how they give up connecting when one of them is lost
    _runtime       what all of these use of jax beside its public names
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from .._devices.processes import is_elastic as is_elastic
from .._heartbeat.server import LOST as LOST
from ._elastic import (
    Board as _Board,
    end_left_behind as _end_left_behind,
    is_start as _is_start,
    is_starts as _is_starts,
)
from ._environment import ray_worker as _ray_worker
from ._gloo import connecting as _connecting, forget_group as _forget_group
from ._initialize import (
    check_joined as check_joined,
    initialize as initialize,
    join as join,
    known_processes as known_processes,
    losses as _losses,
    report_working as _report_working,
    set_resume_hint as set_resume_hint,
    wait_for_loss_report as wait_for_loss_report,
)
from ._runtime import Client as _Client, live_devices as _live_devices, process_failure as _process_failure
