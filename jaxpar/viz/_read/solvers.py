"""FLOPs of what LAPACK or an FFT library computes: the leading terms of published counts.

XLA does not count these, since they are calls of a library, or counts something else: 8 operations for each element
and each product of the logarithms of an FFT's lengths, and the full square of a triangular matrix.

Sources: Golub and Van Loan, Matrix Computations, 4th edition, sections 3.2, 4.2, 5.2, 7.4, 7.5, 8.3 and 8.6 with
figure 8.6.1; Anderson and others, LAPACK Working Note 41, appendix C; Frigo and Johnson, The Design and Implementation
of FFTW3, 2005, for the 5 n log2 n of an FFT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

_Params = dict[str, Any]
_Avals = Sequence[Any]


def _matrices(aval: Any) -> tuple[int, int, int]:
    """How many matrices, and their longer and shorter side. A complex operation is four."""
    *batch, rows, columns = aval.shape
    times = 4 if "complex" in str(aval.dtype) else 1
    return times * math.prod(batch), max(rows, columns), min(rows, columns)


def _cubic(factor: float) -> Callable[[_Params, _Avals, _Avals], int]:
    """The formula of a method that takes `factor` n³ operations for a square matrix."""

    def formula(params: _Params, ins: _Avals, outs: _Avals) -> int:
        count, n, _ = _matrices(ins[0])
        return round(count * factor * n**3)

    return formula


def _lu(params: _Params, ins: _Avals, outs: _Avals) -> int:
    count, m, n = _matrices(ins[0])
    return round(count * (m * n**2 - n**3 / 3))


def _geqrf(params: _Params, ins: _Avals, outs: _Avals) -> int:
    count, m, n = _matrices(ins[0])
    return round(count * (2 * m * n**2 - 2 * n**3 / 3))


def _householder_product(params: _Params, ins: _Avals, outs: _Avals) -> int:
    return _orthogonal(ins[0], ins[1].shape[-1])


def _orthogonal(q: Any, reflectors: int) -> int:
    """To multiply out this many Householder reflections, for m rows and n columns."""
    count, m, n = _matrices(q)
    k = reflectors
    return round(count * (4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 / 3))


def _qr(params: _Params, ins: _Avals, outs: _Avals) -> int:
    return _geqrf(params, ins, outs) + _orthogonal(outs[0], min(ins[0].shape[-2:]))


def _triangular_solve(params: _Params, ins: _Avals, outs: _Avals) -> int:
    return math.prod(ins[1].shape) * _matrices(ins[0])[1] * (4 if "complex" in str(ins[0].dtype) else 1)


def _svd(params: _Params, ins: _Avals, outs: _Avals) -> int:
    count, m, n = _matrices(ins[0])
    if not params.get("compute_uv", True):
        return round(count * (4 * m * n**2 - 4 * n**3 / 3))
    if params.get("full_matrices", False):
        return count * (4 * m**2 * n + 8 * m * n**2 + 9 * n**3)
    return count * (14 * m * n**2 + 8 * n**3)


def _eig(params: _Params, ins: _Avals, outs: _Avals) -> int:
    vectors = params.get("compute_left_eigenvectors", True) or params.get("compute_right_eigenvectors", True)
    return _cubic(25 if vectors else 10)(params, ins, outs)


def _schur(params: _Params, ins: _Avals, outs: _Avals) -> int:
    return _cubic(25 if params.get("compute_schur_vectors", True) else 10)(params, ins, outs)


def _fft(params: _Params, ins: _Avals, outs: _Avals) -> int:
    """5 n log2 n, half of that for real numbers. Several axes are one transform of their product."""
    real = [aval for aval in (ins[0], outs[0]) if "complex" not in str(aval.dtype)]
    elements = math.prod((real or outs)[0].shape)
    return round((2.5 if real else 5) * elements * math.log2(max(1, math.prod(params["fft_lengths"]))))


FORMULAS: dict[str, Callable[[_Params, _Avals, _Avals], int]] = {
    "fft": _fft,
    "cholesky": _cubic(1 / 3),
    "lu": _lu,
    "geqrf": _geqrf,
    "householder_product": _householder_product,
    "qr": _qr,
    "triangular_solve": _triangular_solve,
    "tridiagonal_solve": lambda params, ins, outs: 8 * math.prod(ins[3].shape),
    "svd": _svd,
    "eigh": _cubic(9),
    "eig": _eig,
    "schur": _schur,
    "hessenberg": _cubic(10 / 3),
    "tridiagonal": _cubic(4 / 3),
}
