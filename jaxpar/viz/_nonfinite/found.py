"""`Nonfinite`: what is said of the first NaN or infinity of a run. Users get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """The first NaN or infinity of a run.

    Attributes:
        layer: the name of the node that computed it, or of the argument that has it. Empty if the picture leaves the
            equation out.
        kind: "nan" or "inf".
        primitive: the operation of JAX: "log". "argument" if an argument has a NaN.
        source: "file.py:12 in function", the line of the user's code. May be empty.
        low, high: the least and the greatest number that the operation read, without NaNs; of complex numbers their
            absolute values.
        in_result: whether a result of the function has a NaN or an infinity.
    """

    layer: str
    kind: Literal["nan", "inf"]
    primitive: str
    source: str
    low: float
    high: float
    in_result: bool

    def __str__(self) -> str:
        what = "a NaN" if self.kind == "nan" else "an infinity"
        if self.primitive == "argument":
            return f"{self.layer} has a NaN"
        at = f" at {self.source}" if self.source else ""
        end = "" if self.in_result else "; no result has one"
        where = f"{self.layer}: {self.primitive}" if self.layer else self.primitive
        return f"{where} makes {what} of numbers from {self.low:.4g} to {self.high:.4g}{at}{end}"
