"""The networks of MXNet's articles, each as `init` and `apply` over a plain dict of arrays.

`lenet` has formulas of its own for CPUs, which `_cpu_convolution` fences.
"""

from . import lenet as lenet, matrix_factorization as matrix_factorization
