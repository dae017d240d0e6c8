"""Networks, each as `init` and `apply` over a plain dict of arrays.

`lenet` and `matrix_factorization` are those of MXNet's articles. `transformer` shows how to write a model that does not
fit one device. `strided` learns fast on CPUs.

`conv_general_dilated`, `max_pool`, `avg_pool` and `fast_on_cpus` are for every model. They are of the room `_cpu`.
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
