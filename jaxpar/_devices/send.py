"""The state of process 0 in every process of a group, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arrays import Device, without_keys
from .mesh import copies_on, split_over

_WORD = 4  # bytes; the length of what is sent is a multiple


def to_host(tree: Any) -> Any:
    """A pytree whose arrays are copies in host memory. An array over several processes is read from this one's copy."""
    plain, restore = without_keys(tree)
    return restore(jax.tree.map(_copy, plain))


def plan_send(tree: Any, devices: Sequence[Device]) -> Callable[[], Any]:
    """Compile what sends the arrays of process 0. The function that is returned sends them, and takes no time before.

    Every process must call both, with arrays of the same shapes and dtypes. The function returns the arrays that
    process 0 has, as host arrays in every process of the devices. The bytes are summed, to which the others give zeros:
    a sum of the numbers themselves would lose the sign of -0.0.
    """
    plain, restore = without_keys(tree)
    leaves, structure = jax.tree.flatten(plain)
    hosts = [np.asarray(leaf) for leaf in leaves]
    raw = b"".join(host.tobytes() for host in hosts)
    every = _rows(np.frombuffer(raw.ljust(-(-len(raw) // _WORD) * _WORD, b"\0"), np.uint32), devices)
    total = jax.jit(lambda x: x.sum(0, dtype=x.dtype), out_shardings=copies_on(devices)).lower(every).compile()

    def send() -> Any:
        sent = np.asarray(total(every).addressable_data(0)).tobytes()
        found, at = list[Any](), 0
        for host in hosts:
            found.append(np.frombuffer(sent, host.dtype, math.prod(host.shape), at).reshape(host.shape))
            at += host.nbytes
        return restore(structure.unflatten(map(jnp.asarray, found)))

    return send


def _rows(mine: np.ndarray, devices: Sequence[Device]) -> jax.Array:
    """(devices, words): what the first device of process 0 gives, and zeros."""
    giver = next((d for d in devices if d.process_index == 0), devices[0])
    rows = [
        jax.device_put((mine if d == giver else np.zeros_like(mine))[None], d)
        for d in devices
        if d.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays((len(devices), *mine.shape), split_over(devices), rows)


def _copy(leaf: Any) -> Any:
    # A copy, since the step takes the memory of the state, which NumPy shares with a CPU device.
    return np.array(leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf)
