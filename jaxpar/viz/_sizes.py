"""The memory of a network, and which of its parameters are trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the arrays of a function take.

    Attributes:
        params: bytes of the parameters used, each counted once.
        inputs: bytes of the other arguments, without the optimizer state.
        optimizer: bytes of the arguments that only an optimizer reads. 0 where nothing is differentiated.
        forward, backward: bytes of the first output of each layer and of each gradient. A scan counts as often as it
            runs.
        trained: the names of the parameters that are trained. In a function without a gradient those are all. Else
            they are the ones whose result, a gradient or a new value, depends on the backward pass. A gradient that
            is computed and then multiplied by zero is one.
        unused: elements of the arguments with parameters that nothing reads, parameters or optimizer state.
        state: bytes of the arrays that no optimizer trains, as running means.
    """

    params: int = 0
    inputs: int = 0
    optimizer: int = 0
    forward: int = 0
    backward: int = 0
    trained: frozenset[str] = frozenset()
    unused: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.params + self.state + self.inputs + self.optimizer + self.forward + self.backward
