"""Several processes, by `jax.distributed`: how they find each other, and how they notice that one is lost.

>>> from jaxpar import distributed
>>> distributed.initialize()  # one process: there is nothing to do

The same script runs in a notebook, under `python -m jaxpar launch`, SLURM, Open MPI, Kubernetes and on Cloud TPU.
"""

from .._heartbeat.client import LOST as LOST
from ._initialize import (
    check_joined as check_joined,
    initialize as initialize,
    join as join,
    known_processes as known_processes,
    set_resume_hint as set_resume_hint,
)
