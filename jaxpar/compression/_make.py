"""Makes a compressor from a specification."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._core.calls import answers
from .._core.checks import choice
from ._base import Compressor, LinearCompressor
from ._int3 import Int3
from ._low_rank import PowerSGD, TopK
from ._quantize import BFloat16, Int8, OneBit, TwoBit

_TYPES = {
    "1bit": OneBit,
    "2bit": TwoBit,
    "bf16": BFloat16,
    "int3": Int3,
    "int8": Int8,
    "powersgd": PowerSGD,
    "topk": TopK,
}
TYPES = ("none", *_TYPES)


@answers("compression.make")
def make(spec: Mapping[str, Any]) -> Compressor | LinearCompressor | None:
    """Make a compressor from a specification.

    Args:
        spec: `{"type": name, parameter: value, ...}`. The table of `jaxpar.compression` lists names and parameters.

    Returns:
        A compressor, or None for the type `none`.

    Raises:
        TypeError: `spec` is not a mapping, or a numeric parameter is not a number.
        ValueError: the type is missing or unknown, a parameter is unknown, or a value is out of range. The message
            lists the known types or parameters.

    Example:
        >>> make({"type": "2bit", "threshold": 0.5})
        TwoBit(threshold=0.5)
    """
    parameters = dict(spec)
    if "type" not in parameters:
        raise ValueError(f"compression: the specification has no 'type'; known are {', '.join(TYPES)}")
    name = choice(parameters.pop("type"), "compression", "type", TYPES)
    if name == "none" and parameters:
        raise ValueError(f"compression 'none' takes no parameters, got {', '.join(map(repr, parameters))}")
    if name == "none":
        return None
    fields = [field.name for field in dataclasses.fields(_TYPES[name])]
    for parameter in parameters:
        choice(parameter, f"compression {name!r}", "parameter", fields)
    return _TYPES[name](**parameters)
