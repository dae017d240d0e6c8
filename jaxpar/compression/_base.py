"""What a compressor is: its interface, and the base classes of elementwise and of linear ones.

Read one compressor of `_compressors` beside it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._core.arrays import PyTree
from .._devices import collectives
from ._codes import Shape, pad, words
from ._grid import Grid

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

    def init(self, shape: Shape, dtype: DTypeLike, *, seed: int | jax.Array = 0) -> State:
        """The state before the first push: a float32 `residual` of zeros, and a key for stochastic rounding.

        Args:
            shape, dtype: the shape and dtype of the pushed values. The dtype must be floating.
            seed: an integer, which may be traced. Devices and keys need different seeds for independent random numbers.

        Raises:
            TypeError: the dtype is not floating.
        """
        if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            raise TypeError(
                f"compression {self.name!r} takes floating values, got dtype {jnp.dtype(dtype).name}; push this key "
                "uncompressed"
            )
        return {"residual": jnp.zeros(shape, jnp.float32)}

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        """The payload for `value` plus the residual, and the state for the next push."""
        ...

    def decode(self, payload: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
        """The decoded value. The residual does not include the error of rounding to a narrower `dtype`."""
        ...

    def wire_bytes(self, shape: Shape, dtype: DTypeLike) -> int:
        """The bytes of a payload."""
        ...

    def grid(self, count: int) -> Grid | None:
        """A lossless code for the sum of `count` decoded payloads. None: send float32."""
        return None

    def pays(self, shape: Shape, dtype: DTypeLike) -> bool:
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


class InWords(ElementCompressor, Protocol):
    """Codes that fill uint32 words, in MXNet's order: the first code of a byte is in its top bits."""

    elementwise: ClassVar[bool] = True

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        codes, state = self.quantize(value, state)
        # The codes of a word have no bit in common, so their sum is their union.
        lanes = pad(codes.astype(jnp.uint32), self.per_word).reshape(-1, self.per_word)  # (words, codes of a word)
        return {"codes": (lanes << self._shifts()).sum(-1, dtype=jnp.uint32)}, state

    def decode(self, payload: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
        codes = payload["codes"][:, None] >> self._shifts() & np.uint32(2 ** (32 // self.per_word) - 1)
        return self.dequantize(codes.reshape(-1))[: math.prod(shape)].reshape(shape).astype(dtype)

    def wire_bytes(self, shape: Shape, dtype: DTypeLike) -> int:
        return 4 * words(shape, self.per_word)

    def _shifts(self) -> np.ndarray:
        """By how many bits each code of a word is shifted to the left."""
        bits, place = 32 // self.per_word, np.arange(self.per_word, dtype=np.uint32)[None]
        per_byte = 8 // bits
        return 8 * (place // per_byte) + (8 - bits) - bits * (place % per_byte)


@runtime_checkable
class LinearCompressor(Compressor, Protocol):
    """A compressor whose codes can be summed: `allreduce` replaces encode and decode."""

    linear: ClassVar[bool] = True

    def allreduce(
        self, value: jax.Array, state: State, psum: Callable[[PyTree], PyTree]
    ) -> tuple[jax.Array, State]: ...

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        raise TypeError(f"compression {self.name!r} has no payload of one device; its sum is `allreduce`")

    def decode(self, payload: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
        raise TypeError(f"compression {self.name!r} has no payload of one device; its sum is `allreduce`")


def decode_sum(compressor: Compressor, payloads: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
    """Decode several payloads and sum them, in the order of the devices.

    The sum is a compiled loop, so that program size and compile time do not grow with the number of devices.

    Args:
        compressor: the compressor that encoded the payloads.
        payloads: a payload whose arrays have one row for each device, as an all-gather returns it.
        shape, dtype: the shape and dtype of a value. The sum is taken in float32 and rounded to `dtype` once.

    Example:
        >>> from jaxpar import compression
        >>> two_bit = compression.make({"type": "2bit", "threshold": 0.5})
        >>> payload, _ = two_bit.encode(jnp.ones(3), two_bit.init((3,), "float32"))
        >>> both = jax.tree.map(lambda x: jnp.stack([x, x]), payload)
        >>> decode_sum(two_bit, both, (3,), "float32").tolist()
        [1.0, 1.0, 1.0]
    """

    def decode_one(i: ArrayLike) -> jax.Array:
        return compressor.decode(jax.tree.map(operator.itemgetter(i), payloads), shape, "float32")

    return collectives.sum_by_loop(decode_one, jax.tree.leaves(payloads)[0].shape[0]).astype(dtype)


def with_residual(value: jax.Array, state: State) -> jax.Array:
    """The float32 value to send: the pushed value plus the residual."""
    return state["residual"] + jnp.asarray(value).astype(jnp.float32)
