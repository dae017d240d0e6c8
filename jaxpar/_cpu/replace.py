"""The hook: a function with the primitives of this room in the place of lax's, and the memory of its program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from . import cells, kernels, recurrent, shares
from .convolution import CONVOLUTION_IN_LOOP, conv_in_loop_p, conv_p
from .pooling import max_p, scatter_p, sum_p
from .primitive import Program, Replacements, replace_primitives
from .products import half_sum, product_p
from .sums import sums_once

_INSTEAD = {
    lax.conv_general_dilated_p: conv_p,
    lax.dot_general_p: product_p,
    lax.reduce_window_max_p: max_p,
    lax.reduce_window_sum_p: sum_p,
    lax.select_and_scatter_add_p: scatter_p,
    lax.scan_p: cells.fused,
    lax.reduce_sum_p: half_sum,
}

_INSTEAD_IN_LOOPS = _INSTEAD | {lax.conv_general_dilated_p: conv_in_loop_p, conv_p: conv_in_loop_p}


def for_platform(
    function: Callable[..., Any], platform: str, mesh: Mesh | AbstractMesh | None = None, axes: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """`fast_on_cpus` of a function that a program for CPUs computes. For another platform it is the function itself.

    `axes`: those of the mesh over which XLA splits the examples of the program. Without them it does not split it.

    Example:
        >>> for_platform(max, "gpu") is max
        True
    """
    if platform != "cpu":
        return function
    if mesh is None or not axes:
        return fast_on_cpus(function)
    loops = dict.fromkeys((recurrent.loop_p, recurrent.transposed_p), functools.partial(shares.loop, mesh, axes))

    def split(own_p: Primitive) -> dict[Any, Callable[[Any], Any]]:
        convolution = functools.partial(shares.convolution, mesh, axes, own_p)
        return {lax.conv_general_dilated_p: convolution, conv_p: convolution, **loops}

    return _with(function, _fast(_INSTEAD | split(conv_p), _INSTEAD_IN_LOOPS | split(conv_in_loop_p)))


def is_slow_in_a_loop(text: str) -> bool:
    """Whether a program with a loop is slow on CPUs: where its text has a convolution, of XLA's or as products."""
    return "stablehlo.convolution" in text or CONVOLUTION_IN_LOOP in text


def fast_on_cpus(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with faster formulas for CPUs.

    `function` is traced. Its convolutions are replaced by `conv_general_dilated`, its products over several axes by
    products of two matrices, and its pooling by slices, also inside loops, branches, `jit` and `checkpoint`. A sum that
    several layers read, as in residual connections, is computed once. On other platforms nothing changes.
    `train.make_train_step` does this by itself, so use `fast_on_cpus` in your own loops.

    Pass the function that computes the gradient, not the loss: the operations that are slowest in XLA appear only in
    derivatives. Recurrent layers need both, `fast_on_cpus(jax.grad(fast_on_cpus(loss)))`: where jaxpar-cpu is
    installed, a scan of an LSTM or of a GRU becomes a kernel as long as it is not differentiated. The function may be
    called inside `jit`, `vmap`, `pmap`, `shard_map` and derivatives.

    Args:
        function: takes pytrees of arrays and returns a pytree of arrays.

    Returns:
        A function with the same positional arguments, and the same results up to rounding.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(weight, texts):  # 8 texts of 16 tokens
        ...     return jnp.tanh(texts @ weight).sum()
        >>> gradient = fast_on_cpus(jax.value_and_grad(loss))
        >>> value, grads = jax.jit(gradient)(jnp.ones((4, 3)), jnp.ones((8, 16, 4)))
        >>> grads.shape
        (4, 3)
    """
    return _with(function, _fast(_INSTEAD, _INSTEAD_IN_LOOPS))


def fast_loops(function: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """A loss with kernels for the loops of recurrent cells, before it is differentiated.

    The gradient of a scan is two other scans, and neither is the loop of a cell. Without the kernels, or for another
    platform, it is the function itself.
    """
    if platform != "cpu" or not kernels.are_loaded():
        return function
    return _with(function, lambda program: replace_primitives(program, {lax.scan_p: cells.fused}))


def _fast(instead: Replacements, in_loops: Replacements) -> Callable[[Program], Program]:
    """What makes a program fast, with its derivatives in it."""
    return lambda program: sums_once(replace_primitives(program, instead, in_loops))


def _with(function: Callable[..., Any], rewrite: Callable[[Program], Program]) -> Callable[..., Any]:
    """A function whose program is rewritten."""

    @functools.wraps(function)  # a compiled program has its name, and the names of its arguments
    def replaced(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        program = rewrite(closed)
        results = jaxpr_as_fun(program)(*jax.tree.leaves(args))
        # A result that is a constant comes as a number of Python or NumPy, which has no dtype of its own.
        leaves, structure = jax.tree.flatten(shapes)
        return structure.unflatten([jnp.asarray(x, struct.dtype) for x, struct in zip(results, leaves, strict=True)])

    return replaced


# The memory of a program. XLA takes that of all intermediate values at once. A block of 32 MB or more the GNU C library
# gives back to Linux, which fills each page of the next one with zeros: up to a quarter of the time of a step. So XLA
# is asked for blocks that the library keeps.

# Bytes of a block, and of the largest one that the library keeps. Of 4 to 30 MB, 12 touched the fewest new pages
# (benchmarks/NOTES.md).
_USUAL, _MOST = 12_000_000, 30_000_000
# Bytes of all values of a program above which one device takes one block, which goes and comes back. XLA's threads take
# turns at its steps, and each keeps blocks: up to 1 GB for this many. Several devices have a thread each.
_MOST_ALONE = 4_000_000_000


def in_blocks(jaxpr: Program, is_alone: bool = False) -> dict[str, int] | None:
    """Options of the compiler for a program, by which each value has room in a block.

    None where one block for all values is kept, or none for the largest, or where one device would keep too many.
    """
    # XLA warns of a value that is larger than a block.
    block, total, work = _USUAL, 0, [jaxpr]
    while work:
        for eqn in work.pop().eqns:
            for value in eqn.params.values():
                programs = value if isinstance(value, tuple) else (value,)
                work += [getattr(inner, "jaxpr", inner) for inner in programs if hasattr(inner, "eqns")]
            if eqn.primitive.name == "shard_map":  # whose results are the values of all devices
                continue
            for aval in [v.aval for v in eqn.outvars if hasattr(v.aval, "shape")]:
                size = math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)
                block, total = max(block, size), total + size
    is_kept = block <= _MOST < total and not (is_alone and total > _MOST_ALONE)
    return {"xla_multiheap_size_constraint_per_heap": block} if is_kept else None
