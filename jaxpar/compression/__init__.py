"""Gradient compression with error feedback: what a push sends between devices, packed for the wire.

| type | sent for each float32 | parameters |
|---|---|---|
| `2bit` | 2 bits: +threshold, -threshold or 0; MXNet's, bit for bit | `threshold` 0.5 |
| `1bit` | 1 bit: +1 or -1; MXNet 2's | `threshold` 0.5 |
| `int8` | 8 bits, and a scale for each 1,024 | `rounding` "nearest" or "stochastic" |
| `bf16` | 16 bits | `rounding` "nearest" or "stochastic" |
| `topk` | 64 bits for each of the largest `ratio` | `ratio` 0.01 |
| `powersgd` | rank × (rows + columns) float32 a matrix | `rank` 2 |

What is not sent stays in a residual and is added to the next push: nothing is lost, it comes later. A
compressor is a frozen dataclass, equal to another of the same parameters, with pure `init`, `encode` and
`decode` (`powersgd`: `init` and `allreduce`).
"""

from ._base import Compressor as Compressor, LinearCompressor as LinearCompressor, decode_sum as decode_sum
from ._low_rank import PowerSGD as PowerSGD, TopK as TopK
from ._make import make as make
from ._quantize import BFloat16 as BFloat16, Int8 as Int8, OneBit as OneBit, TwoBit as TwoBit
