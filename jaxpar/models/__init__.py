"""The networks of the original articles, as `init` and `apply` over a plain dict of arrays."""

from . import lenet as lenet, matrix_factorization as matrix_factorization
