"""Gradient compression with error feedback: what a push sends between devices.

| type | sent for each float32 | parameters |
|---|---|---|
| `2bit` | 2 bits: +threshold, -threshold or 0, as MXNet bit for bit | `threshold` 0.5 |
| `1bit` | 1 bit: +1 or -1, as MXNet 2 | `threshold` 0.5 |
| `int8` | 8 bits, and a scale for each 1,024 elements | `rounding` "nearest" or "stochastic" |
| `bf16` | 16 bits | `rounding` "nearest" or "stochastic" |
| `topk` | 64 bits for each element of the largest `ratio` | `ratio` 0.01 |
| `int3` | 3 bits, and a scale. The sum comes back in 3 bits too | |
| `powersgd` | rank × (rows + columns) float32 for each matrix | `rank` 2 |

The residual keeps what is not sent, and the next push adds it, so nothing is lost. A compressor is a frozen dataclass.
Its `init`, `encode` and `decode` (`powersgd`: `init` and `allreduce`) are pure.

The room:

    _sums         what a push does: it encodes, exchanges, decodes and adds
    _compressors  what a specification such as `{"type": "2bit", "threshold": 0.5}` makes
    _base         the interface of compressors, and the sum of decoded payloads
    _codes        codes of a few bits in words
    _grid         sums of equal steps as codes
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from ._base import Compressor as Compressor, LinearCompressor as LinearCompressor, decode_sum as decode_sum
from ._compressors import (
    TYPES as TYPES,
    BFloat16 as BFloat16,
    Int3 as Int3,
    Int8 as Int8,
    OneBit as OneBit,
    PowerSGD as PowerSGD,
    TopK as TopK,
    TwoBit as TwoBit,
    make as make,
)
from ._sums import allreduce as _allreduce, reduce_scatter as _reduce_scatter, start_owner as _start_owner
