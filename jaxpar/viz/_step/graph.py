"""What a training step does, as plain data, and how its parts and collectives are written.

Users get these: `trace_step` returns a `StepGraph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .._graph import human
from .._program.memory import StepMemory
from .._program.sends import sent_around_ring

Phase = Literal["forward", "backward", "gradients", "parameters", "optimizer", "metrics", "elsewhere"]


@dataclass(frozen=True, slots=True)
class StepPart:
    """The cost of one layer in the forward or the backward pass.

    Attributes:
        flops, bytes: as in a `Node`, for the whole batch, or for one device inside pmap and shard_map.
        peak: live bytes on a device while the part runs, including arguments. None if unknown.
        seconds: the measured time, from a profile, or None.
        again: whether remat computes a part of the forward pass again here.
    """

    flops: int = 0
    bytes: int = 0
    peak: int | None = None
    seconds: float | None = None
    again: bool = False

    @property
    def flops_per_byte(self) -> float:
        """FLOPs per byte that is read or written."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class StepLayer:
    """A layer, or an update of an optimizer.

    Attributes:
        name, op, detail, shape, dtype, scope, source, repeat: as in a `Node`.
        params: elements of its parameters. A shared parameter counts in the first layer.
        weights: the names of the parameters that it uses.
        forward: the cost of the forward pass, or of the update of an optimizer.
        backward: the cost of the gradient, including recomputation, or None.
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
        source, target: the names of the layers, of an argument, or of a metric ("loss").
        phase: "forward", "backward"; "gradients" for edges from a gradient to the optimizer; "optimizer" for edges from
            an update to a condition behind it, as in a step with `local_steps`; "elsewhere" for edges from an update to
            what else reads the new params, such as a running mean; "parameters" for edges from what moves params to the
            layers of a later pass, which read these; "metrics" for edges from a layer to a result that is
            no new state.
        shape, dtype: shape and dtype in the function.
        local_shape: the shape of one device's part in the compiled program. None if unknown.
        spec: the mesh axes that split each dimension, "" for none. None if unknown.
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
        name: the name of the instruction.
        kind: XLA's name: "all-reduce", "all-gather", ...
        bytes: bytes of one device's input, for each run.
        arrays: the number of arrays.
        devices: the number of participating devices.
        axes: the mesh axes. Empty if the devices do not form axes of the mesh.
        times: the number of runs in a step.
        is_exact: whether `times` is exact. A loop of unknown length counts once.
        phase: "forward" or "backward"; "gradients", between the gradients and the optimizer; "parameters", between the
            parameters and the layers; or "elsewhere", if it belongs to no layer.
        layers: the names of the layers whose arrays are sent. Empty for "elsewhere".
        op_name: JAX's name for the operation.
        source: "file.py:12", the line of code. May be empty.
        metrics: the names of the results that are sent along with the gradients, such as the loss.
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
    metrics: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of one device's inputs in a step."""
        return self.bytes * self.times

    @property
    def sent_bytes(self) -> int:
        """Bytes that go out of one device in a step, around a ring of the devices."""
        return sent_around_ring(self.kind, self.bytes, self.devices) * self.times


@dataclass(frozen=True, slots=True)
class StepArgument:
    """An array in the arguments of the step.

    Attributes:
        name: the name in the function: "params['conv1']['bias']".
        shape, dtype: shape and dtype of the whole array.
        local_shape: the shape of one device's part.
        spec: the mesh axes that split each dimension, "" for none. None for one device.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    local_shape: tuple[int, ...]
    spec: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A training step on its devices.

    Attributes:
        layers: the layers from the batch to the loss.
        optimizers: the updates after the gradients.
        edges: the arrays between them.
        collectives: all collectives of the compiled program.
        arguments: the arrays in the arguments of the step.
        mesh: the name and the size of each axis.
        devices: the number of devices.
        total_params: elements of all parameters, each counted once. Of copies for the devices of a `jax.pmap`, those of
            one device.
        memory: the memory of one device. None if the backend does not report it.
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
        """Bytes of one device's inputs to collectives in a step."""
        return sum(collective.total_bytes for collective in self.collectives)

    def __repr__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh)
        return (
            f"StepGraph({len(self.layers)} layers, {len(self.collectives)} collectives of {self.total_bytes:,} bytes, "
            f"{self.devices} devices{f' ({mesh})' if mesh else ''})"
        )


def spec_text(spec: tuple[str, ...] | None) -> str:
    """ "(data, –)" for what is split over "data" along its first dimension. Empty for what is not split.

    >>> spec_text(("data", ""))
    '(data, –)'
    """
    if spec is None or not any(spec):
        return ""
    return f"({', '.join(axes or '–' for axes in spec)})"


def sends_text(collectives: Sequence[Collective], mesh: dict[str, int]) -> list[str]:
    """One line for each kind of collective and its axes: "all-reduce 1.2 MB over data=4"."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for collective in collectives:
        over = ", ".join(f"{name}={mesh[name]}" for name in collective.axes) or f"{collective.devices} devices"
        groups.setdefault((collective.kind, over), []).append(collective)
    lines: list[str] = []
    for (kind, over), group in groups.items():
        runs, size = (
            sum(collective.times for collective in group),
            human(sum(collective.total_bytes for collective in group), "B"),
        )
        least = "" if all(collective.is_exact for collective in group) else "at least "
        lines.append(f"{kind} {least}{size} over {over}" + (f", {runs} times" if runs > 1 else ""))
    return lines
