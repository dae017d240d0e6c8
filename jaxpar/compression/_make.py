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

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ._base import Compressor, LinearCompressor
from ._low_rank import PowerSGD, TopK
from ._quantize import BFloat16, Int8, OneBit, TwoBit

_TYPES = {"1bit": OneBit, "2bit": TwoBit, "bf16": BFloat16, "int8": Int8, "powersgd": PowerSGD, "topk": TopK}


def make(spec: Mapping[str, Any]) -> Compressor | LinearCompressor | None:
    """The compressor that a specification names.

    Args:
        spec: `{"type": name, parameter: value, ...}`; see the table of this module for names and parameters.

    Returns:
        A compressor, or None for the type `none`.

    Raises:
        TypeError: `spec` is no mapping.
        ValueError: no or an unknown type, an unknown parameter or a value out of range; the message lists
            what is known.

    Example:
        >>> make({"type": "2bit", "threshold": 0.5})
        TwoBit(threshold=0.5)
    """
    if not isinstance(spec, Mapping):
        raise TypeError(f'compression must be a mapping such as {{"type": "2bit", "threshold": 0.5}}, got {spec!r}')
    parameters = dict(spec)
    name = parameters.pop("type", None)
    known = ["none", *_TYPES]
    if name not in known:
        given = "no type" if "type" not in spec else f"type {name!r}"
        raise ValueError(f"compression: got {given}, known types are {', '.join(known)}")
    names = [] if name == "none" else [field.name for field in dataclasses.fields(_TYPES[name])]
    unknown = [repr(parameter) for parameter in parameters if parameter not in names]
    if unknown:
        takes = ", ".join(names) or "no parameters"
        raise ValueError(f"compression {name!r}: unknown parameter {', '.join(unknown)}; it takes {takes}")
    return None if name == "none" else _TYPES[name](**parameters)
