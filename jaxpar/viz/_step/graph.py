"""What a training step does, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "gradients", "parameters", "optimizer", "elsewhere"]


@dataclass(frozen=True, slots=True)
class StepPart:
    """What one layer does in one pass.

    Attributes:
        flops, bytes: as of a `Node`, of the whole batch, or of one device inside of pmap and shard_map.
        peak: bytes live on a device while it runs, arguments included. None where the program does not say.
        seconds: that it took, from a profile. None without one.
    """

    flops: int = 0
    bytes: int = 0
    peak: int | None = None
    seconds: float | None = None

    @property
    def flops_per_byte(self) -> float:
        """FLOPs for each byte that is read or written."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class StepLayer:
    """A layer, or an update of an optimizer.

    Attributes:
        name, op, detail, shape, dtype, scope, source, repeat: as of a `Node`.
        params: elements of the parameters that it is the first to use.
        weights: the names of the parameters that it uses.
        forward: what it does on the way to the loss. That of an optimizer is its update.
        backward: its gradient, with what is computed again for it. None where there is none.
    """

    name: str
    op: str
    detail: str
    shape: tuple[int, ...]
    dtype: str
    scope: tuple[str, ...]
    source: str
    repeat: int
    params: int
    weights: tuple[str, ...]
    forward: StepPart
    backward: StepPart | None = None


@dataclass(frozen=True, slots=True)
class StepEdge:
    """An array that flows between two layers.

    Attributes:
        source, target: the names of the layers, or of the argument that it comes from.
        phase: "forward", "backward", or "gradients" from a gradient to the optimizer.
        shape, dtype: as the function sees it.
        local_shape: of one device's part in the compiled program. None where no instruction shows it.
        spec: the axes of the mesh that each dimension is split over, "" for none. None where it is not known.
    """

    source: str
    target: str
    phase: Phase
    shape: tuple[int, ...]
    dtype: str
    local_shape: tuple[int, ...] | None = None
    spec: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of the compiled program.

    Attributes:
        name: of its instruction.
        kind: as XLA names it: "all-reduce", "all-gather", ...
        bytes: that one device hands in, each time.
        arrays: how many arrays travel in it.
        devices: how many devices exchange it.
        axes: of the mesh. Empty where the devices are no set of its axes.
        times: how often it runs in a step.
        is_exact: whether `times` is known. A loop of unknown length counts once.
        phase: where it happens. "gradients" is between the gradients and the optimizer, "parameters" between the
            parameters and the layers. "elsewhere" is what belongs to no layer.
        layers: the names of the layers whose arrays travel. Empty for "elsewhere".
        op_name: where JAX made it.
        source: "file.py:12" of the code that it comes from. May be empty.
    """

    name: str
    kind: str
    bytes: int
    arrays: int
    devices: int
    axes: tuple[str, ...]
    times: int
    is_exact: bool
    phase: Phase
    layers: tuple[str, ...] = ()
    op_name: str = ""
    source: str = ""

    @property
    def total_bytes(self) -> int:
        """That one device hands in during a step."""
        return self.bytes * self.times


@dataclass(frozen=True, slots=True)
class StepArgument:
    """An array that the step is called with.

    Attributes:
        name: as in the function: "params['conv1']['bias']".
        shape, dtype: of the whole array.
        local_shape: of one device's part.
        spec: the axes of the mesh that each dimension is split over, "" for none. None for one device.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    local_shape: tuple[int, ...]
    spec: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of one device during a step.

    Attributes:
        total: bytes that the compiler sets aside: arguments, results that reuse none of them, temporaries.
        peak: bytes of arguments, results and live temporaries where they are most. A temporary is live from the
            instruction that fills it to the last one that reads it.
        gaps: the rest of the total. They hold nothing that is live at that moment: the compiler gave them to values of
            other moments, or no value fits.
        is_exact: whether the places of all temporaries are known and make up the total within 2 %, and no two values
            that are live at once share a byte. False where the backend does not tell the places. The peak is the total
            then.
    """

    total: int
    peak: int
    gaps: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A training step on its devices.

    Attributes:
        layers: from the batch to the loss.
        optimizers: what follows the gradients.
        edges: the arrays between them.
        collectives: every one of the compiled program.
        arguments: of the step.
        mesh: the name and the size of each axis.
        devices: how many there are.
        total_params: elements of the parameters, each counted once.
        memory: of one device. None where the backend does not say.
    """

    layers: tuple[StepLayer, ...]
    optimizers: tuple[StepLayer, ...]
    edges: tuple[StepEdge, ...]
    collectives: tuple[Collective, ...]
    arguments: tuple[StepArgument, ...]
    mesh: tuple[tuple[str, int], ...]
    devices: int
    total_params: int
    memory: StepMemory | None

    def __getitem__(self, name: str) -> StepLayer:
        """The layer or optimizer of this name.

        Raises:
            KeyError: there is none. The message lists the names.
        """
        for layer in (*self.layers, *self.optimizers):
            if layer.name == name:
                return layer
        names = [layer.name for layer in (*self.layers, *self.optimizers)]
        raise KeyError(f"no layer named {name!r}; the layers are {names}")

    @property
    def total_bytes(self) -> int:
        """That one device hands in to collectives during a step."""
        return sum(one.total_bytes for one in self.collectives)

    def __repr__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh)
        return (
            f"StepGraph({len(self.layers)} layers, {len(self.collectives)} collectives of {self.total_bytes:,} bytes, "
            f"{self.devices} devices{f' ({mesh})' if mesh else ''})"
        )
