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

What is not sent stays in a residual and is added to the next push, so nothing is lost. A compressor is a frozen
dataclass, equal to another of the same parameters. Its `init`, `encode` and `decode` (`powersgd`: `init` and
`allreduce`) are pure.

The room:

    _make       a compressor out of a specification, such as `{"type": "2bit", "threshold": 0.5}`
    _base       what a compressor is, and the sum of the decoded payloads of all devices
    _quantize   few bits for each element
    _bits       codes in words
    _grid       sums of codes as integers
    _int3       integers of 3 bits and a scale
    _two_way    their sums, coded again
    _low_rank   few elements, or few singular directions

How a store exchanges payloads over devices is in `kv`.
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from ._base import (
    Compressor as Compressor,
    LinearCompressor as LinearCompressor,
    RowCompressor as _RowCompressor,
    decode_sum as decode_sum,
    is_two_way as _is_two_way,
)
from ._bits import (
    pack_lanes as _pack_lanes,
    pack_planes as _pack_planes,
    unpack_lanes as _unpack_lanes,
    unpack_planes as _unpack_planes,
)
from ._grid import Grid as _Grid
from ._int3 import Int3 as Int3
from ._low_rank import PowerSGD as PowerSGD, TopK as TopK
from ._make import TYPES as TYPES, make as make
from ._quantize import BFloat16 as BFloat16, Int8 as Int8, OneBit as OneBit, TwoBit as TwoBit
from ._two_way import (
    allreduce as _allreduce_two_way,
    reduce_scatter as _reduce_scatter_two_way,
    start_owner as _start_owner,
)
