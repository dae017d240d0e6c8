"""Networks, each as `init` and `apply` over a plain dict of arrays.

`lenet` and `matrix_factorization` are those of MXNet's articles. `transformer` shows how to write a model that does not
fit one device. `strided` learns fast on CPUs.

`lenet` has formulas of its own for CPUs, which `_cpu_convolution` fences. `conv_general_dilated`,
`max_pool`, `avg_pool` and `fast_on_cpus` are for every model.
"""

from .._devices.formulas import fast_on_cpus as fast_on_cpus
from . import (
    lenet as lenet,
    matrix_factorization as matrix_factorization,
    strided as strided,
    transformer as transformer,
)
from ._convolution import conv_general_dilated as conv_general_dilated
from ._pooling import avg_pool as avg_pool, max_pool as max_pool
