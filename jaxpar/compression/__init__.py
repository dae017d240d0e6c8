"""Gradient compression with error feedback: what a push sends between devices.

| type | sent for each float32 | parameters |
|---|---|---|
| `2bit` | 2 bits: +threshold, -threshold or 0, as MXNet bit for bit | `threshold` 0.5 |
| `1bit` | 1 bit: +1 or -1, as MXNet 2 | `threshold` 0.5 |
| `int8` | 8 bits, and a scale for each 1,024 elements | `rounding` "nearest" or "stochastic" |
| `bf16` | 16 bits | `rounding` "nearest" or "stochastic" |
| `topk` | 64 bits for each element of the largest `ratio` | `ratio` 0.01 |
| `powersgd` | rank × (rows + columns) float32 for each matrix | `rank` 2 |

What is not sent stays in a residual and is added to the next push, so nothing is lost. A compressor is a frozen
dataclass, equal to another of the same parameters. Its `init`, `encode` and `decode` (`powersgd`: `init` and
`allreduce`) are pure.

The room:

    _make       a compressor out of a specification, such as `{"type": "2bit", "threshold": 0.5}`
    _base       what a compressor is, and the sum of the decoded payloads of all devices
    _quantize   few bits for each element
    _low_rank   few elements, or few singular directions

How a store exchanges payloads over devices is in `kv`.
"""

from ._base import Compressor as Compressor, LinearCompressor as LinearCompressor, decode_sum as decode_sum
from ._low_rank import PowerSGD as PowerSGD, TopK as TopK
from ._make import TYPES as TYPES, make as make
from ._quantize import BFloat16 as BFloat16, Int8 as Int8, OneBit as OneBit, TwoBit as TwoBit
