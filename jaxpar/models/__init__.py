"""Networks as pure functions `init` and `apply` over dicts of arrays.

`lenet` and `matrix_factorization` follow MXNet's tutorials. `transformer` shows a model that is larger than one device.
`strided` trains fast on CPUs.

`conv_general_dilated`, `max_pool`, `avg_pool` and `fast_on_cpus` make any model faster on CPUs. They are in `_cpu`.
"""

from .._cpu import (
    avg_pool as avg_pool,
    conv_general_dilated as conv_general_dilated,
    fast_on_cpus as fast_on_cpus,
    max_pool as max_pool,
)
from . import (
    lenet as lenet,
    matrix_factorization as matrix_factorization,
    strided as strided,
    transformer as transformer,
)
