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
    _process       what this process knows of the run from then on

`_members` says who computes together in an elastic run. `_attach` joins where other code has started jax. `_ray` knows
the workers of Ray Train.
`_join` is for callers that need all processes, such as `kv.create`.
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from .._heartbeat.messages import LOST as LOST
from ._elastic import is_elastic as is_elastic
from ._initialize import initialize as initialize
from ._join import check_joined as check_joined, join as join
from ._members import (
    KEYS as _KEYS,
    Members as _Members,
    end_left_behind as _end_left_behind,
    end_run as _end_run,
    get as _get,
    is_over as _is_over,
    jax_client as _jax_client,
    own_start as _own_start,
    parse as _parse,
    refuse as _refuse,
    release_others as _release_others,
    whole_numbers as _whole_numbers,
    write_members as _write_members,
)
from ._process import (
    known_processes as known_processes,
    report_working as _report_working,
    set_resume_hint as set_resume_hint,
    wait_for_loss_report as wait_for_loss_report,
)
from ._ray import worker as _ray_worker
