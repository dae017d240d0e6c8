"""What a compressor is, what all compressors share, and the sum of what they send."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from .._core.calls import answers
from .._devices import collectives
from ._grid import Grid

Shape = tuple[int, ...]
State = dict[str, jax.Array]
Payload = dict[str, jax.Array]


class Compressor(Protocol):
    """A frozen, hashable description of a compression. What it keeps between pushes is a `State`.

    Attributes:
        elementwise: whether the encoding of a concatenation is the concatenated encodings, up to padding. Then a
            store may compress whole flat buckets.
        linear: whether sums are taken in the middle of the compression, as `LinearCompressor.allreduce` does.
        two_way: whether the sum is coded again, with a residual on the device that made it. See `Int3`.
        per_word: of an elementwise compressor, how many elements a word of the payload has.
    """

    elementwise: ClassVar[bool]
    linear: ClassVar[bool]
    two_way: ClassVar[bool] = False
    per_word: ClassVar[int] = 1

    def init(self, shape: Shape, dtype: Any, *, seed: Any = 0) -> State:
        """The state before the first push: a float32 `residual` of zeros, and what the rounding needs.

        Args:
            shape, dtype: of the values to be pushed. The dtype must be floating.
            seed: an integer, which may be traced. It separates the random streams of devices and keys.

        Raises:
            TypeError: the dtype is not floating.
        """
        ...

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        """The payload for `value` plus the residual, and the state for the next push."""
        ...

    def decode(self, payload: Payload, shape: Shape, dtype: Any) -> jax.Array:
        """The value of a payload. The residual does not have what the rounding to a narrower `dtype` loses."""
        ...

    def wire_bytes(self, shape: Shape, dtype: Any) -> int:
        """Bytes of the payload of a value."""
        ...

    def grid(self, count: int) -> Grid | None:
        """How the sum of `count` decoded payloads is coded without loss. None: it is sent as float32."""
        return None

    def pays(self, shape: Shape, dtype: Any) -> bool:
        """Whether the payload is smaller than the value. False for a dtype that is not floating."""
        return is_floating(dtype) and self.wire_bytes(shape, dtype) < plain_bytes(shape, dtype)


@runtime_checkable
class RowCompressor(Compressor, Protocol):
    """A compressor of whole values whose payload can be cut in parts of the value."""

    def cut(self, payload: Payload, shape: Shape, count: int) -> Payload:
        """The payload of a value in `count` rows, each for as many elements, the value padded at its end."""
        ...

    def decode_row(self, row: Payload, index: Any) -> jax.Array:
        """The elements of row `index` of a payload, in float32."""
        ...


@runtime_checkable
class LinearCompressor(Protocol):
    """A compression whose codes can be summed: `allreduce` takes the place of encode and decode."""

    elementwise: ClassVar[bool]
    linear: ClassVar[bool]

    def init(self, shape: Shape, dtype: Any, *, seed: Any = 0) -> State: ...

    def allreduce(self, value: jax.Array, state: State, psum: Callable[[Any], Any]) -> tuple[jax.Array, State]: ...

    def wire_bytes(self, shape: Shape, dtype: Any) -> int: ...

    def pays(self, shape: Shape, dtype: Any) -> bool: ...


@answers("compression.decode_sum")
def decode_sum(compressor: Compressor, payloads: Payload, shape: Shape, dtype: Any) -> jax.Array:
    """The sum of several decoded payloads, in the order of the devices.

    It is a loop, so that the program, and the time to compile it, do not grow with the devices.

    Args:
        compressor: what encoded them.
        payloads: a payload whose arrays have the devices as a first axis, as a gather over devices gives it.
        shape, dtype: of the value. The sum is taken in float32, and rounded to `dtype` once.

    Returns:
        The sum, an array of `shape` and `dtype`.

    Example:
        >>> from jaxpar import compression
        >>> two_bit = compression.make({"type": "2bit", "threshold": 0.5})
        >>> payload, _ = two_bit.encode(jnp.ones(3), two_bit.init((3,), "float32"))
        >>> both = jax.tree.map(lambda x: jnp.stack([x, x]), payload)
        >>> decode_sum(two_bit, both, (3,), "float32").tolist()
        [1.0, 1.0, 1.0]
    """

    def decode_one(i: Any) -> jax.Array:
        return compressor.decode(jax.tree.map(operator.itemgetter(i), payloads), shape, "float32")

    return collectives.sum_by_loop(decode_one, jax.tree.leaves(payloads)[0].shape[0]).astype(dtype)


def is_two_way(compressor: Compressor | LinearCompressor) -> bool:
    """Whether the sum is coded again, with a residual on the device that made it."""
    return not isinstance(compressor, LinearCompressor) and compressor.two_way


def start_residual(name: str, shape: Shape, dtype: Any) -> State:
    """The residual before the first push: float32 zeros.

    Raises:
        TypeError: values of this dtype cannot be compressed.
    """
    if not is_floating(dtype):
        raise TypeError(
            f"compression {name!r} takes floating values, got dtype {jnp.dtype(dtype).name}; push this key uncompressed"
        )
    return {"residual": jnp.zeros(shape, jnp.float32)}


def with_residual(value: jax.Array, state: State) -> jax.Array:
    """The float32 value that is to be sent: with what earlier pushes did not send."""
    return state["residual"] + jnp.asarray(value).astype(jnp.float32)


def plain_bytes(shape: Shape, dtype: Any) -> int:
    """Bytes of a value without compression."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def is_floating(dtype: Any) -> bool:
    """Whether values of this dtype can be compressed."""
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def as_float32(value: float) -> float:
    """A parameter as the arithmetic sees it: rounded to float32, perhaps to 0 or infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))
