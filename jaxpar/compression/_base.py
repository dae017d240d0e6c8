"""The base classes of compressors, and the sum of decoded payloads."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from .._core.calls import answers
from .._devices import collectives
from ._bits import Grid

Shape = tuple[int, ...]
State = dict[str, jax.Array]
Payload = dict[str, jax.Array]


class Compressor(Protocol):
    """A frozen, hashable compressor. Its residual between pushes is a separate `State`.

    Attributes:
        name: the type in a specification, see `make`.
        elementwise: whether encoding a concatenation gives the concatenated encodings, up to padding. If so, a store
            may compress whole flat buckets.
        linear: whether the codes themselves are summed, as in `LinearCompressor.allreduce`.
        two_way: whether the sum is compressed too, with a residual on the summing device. See `Int3`.
        per_word: how many elements one word of the payload has, for an elementwise compressor.
    """

    name: ClassVar[str] = ""
    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    two_way: ClassVar[bool] = False
    per_word: ClassVar[int] = 1

    def init(self, shape: Shape, dtype: Any, *, seed: Any = 0) -> State:
        """The state before the first push: a float32 `residual` of zeros, and a key for stochastic rounding.

        Args:
            shape, dtype: the shape and dtype of the pushed values. The dtype must be floating.
            seed: an integer, which may be traced. Devices and keys need different seeds for independent random numbers.

        Raises:
            TypeError: the dtype is not floating.
        """
        if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            got = f"got dtype {jnp.dtype(dtype).name}; push this key uncompressed"
            raise TypeError(f"compression {self.name!r} takes floating values, {got}")
        return {"residual": jnp.zeros(shape, jnp.float32)}

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        """The payload for `value` plus the residual, and the state for the next push."""
        ...

    def decode(self, payload: Payload, shape: Shape, dtype: Any) -> jax.Array:
        """The decoded value. The residual does not include the error of rounding to a narrower `dtype`."""
        ...

    def wire_bytes(self, shape: Shape, dtype: Any) -> int:
        """The bytes of a payload."""
        ...

    def grid(self, count: int) -> Grid | None:
        """A lossless code for the sum of `count` decoded payloads. None: send float32."""
        return None

    def pays(self, shape: Shape, dtype: Any) -> bool:
        """Whether the payload is smaller than the value. False for a dtype that is not floating."""
        dtype = jnp.dtype(dtype)
        is_floating = jnp.issubdtype(dtype, jnp.floating)
        return is_floating and self.wire_bytes(shape, dtype) < math.prod(shape) * dtype.itemsize


@runtime_checkable
class ElementCompressor(Compressor, Protocol):
    """An elementwise compressor whose codes a store packs by itself, in an order that suits the devices."""

    def quantize(self, value: jax.Array, state: State) -> tuple[jax.Array, State]:
        """The code of each element, an unsigned integer of which `per_word` fill a word, and the state."""
        ...

    def dequantize(self, codes: jax.Array) -> jax.Array:
        """The float32 element of each code."""
        ...


@runtime_checkable
class RowCompressor(Compressor, Protocol):
    """A compressor whose payload can be cut into rows of the value."""

    def cut(self, payload: Payload, shape: Shape, count: int) -> Payload:
        """The payload, padded and cut into `count` rows of equal length."""
        ...

    def decode_row(self, row: Payload, index: Any) -> jax.Array:
        """The elements of row `index` of a payload, in float32."""
        ...


@runtime_checkable
class LinearCompressor(Compressor, Protocol):
    """A compressor whose codes can be summed: `allreduce` replaces encode and decode."""

    linear: ClassVar[bool] = True

    def allreduce(self, value: jax.Array, state: State, psum: Callable[[Any], Any]) -> tuple[jax.Array, State]: ...

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        raise TypeError(f"compression {self.name!r} has no payload of one device; its sum is `allreduce`")

    def decode(self, payload: Payload, shape: Shape, dtype: Any) -> jax.Array:
        raise TypeError(f"compression {self.name!r} has no payload of one device; its sum is `allreduce`")


@answers("compression.decode_sum")
def decode_sum(compressor: Compressor, payloads: Payload, shape: Shape, dtype: Any) -> jax.Array:
    """Decode several payloads and sum them, in the order of the devices.

    The sum is a compiled loop, so that program size and compile time do not grow with the number of devices.

    Args:
        compressor: the compressor that encoded the payloads.
        payloads: a payload whose arrays have one row for each device, as an all-gather returns it.
        shape, dtype: the shape and dtype of a value. The sum is taken in float32 and rounded to `dtype` once.

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


def with_residual(value: jax.Array, state: State) -> jax.Array:
    """The float32 value to send: the pushed value plus the residual."""
    return state["residual"] + jnp.asarray(value).astype(jnp.float32)
