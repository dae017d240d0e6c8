"""A function with the primitives of this room in place of lax's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from ..._core.calls import answers
from .convolution import conv_in_loop_p, conv_p
from .pooling import max_p, scatter_p, sum_p
from .product import product_p

_INSTEAD = {
    lax.conv_general_dilated_p: conv_p,
    lax.dot_general_p: product_p,
    lax.reduce_window_max_p: max_p,
    lax.reduce_window_sum_p: sum_p,
    lax.select_and_scatter_add_p: scatter_p,
}

_INSTEAD_IN_LOOPS = _INSTEAD | {lax.conv_general_dilated_p: conv_in_loop_p, conv_p: conv_in_loop_p}
_LOOPS = frozenset(("scan", "while"))

# Primitives whose parameters have a program that XLA compiles as it does the one around it. A Pallas kernel is none.
_WITH_PROGRAMS = frozenset(
    "jit pjit scan while cond checkpoint remat remat2 shard_map "
    "closed_call core_call custom_jvp_call custom_vjp_call".split()
)


@answers("models.fast_on_cpus")
def fast_on_cpus(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with formulas that are faster on CPUs.

    `function` is traced. Its convolutions, its products over several axes and its pooling are then computed as
    `conv_general_dilated`, a product of two matrices and slices, also inside of loops, branches, `jit` and
    `checkpoint`. Other platforms compute what they did. `train.make_train_step` does this by itself. It is for loops of
    one's own.

    Give the function that computes the gradient and not the loss: XLA loses most by the products and windows that only
    derivatives have. The function may be called inside `jit`, `vmap`, `pmap`, `shard_map` and derivatives.

    Args:
        function: of pytrees of arrays. It gives such a pytree.

    Returns:
        A function of the same arguments, by position, and the same results to rounding.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(weight, texts):  # 8 texts of 16 tokens
        ...     return jnp.tanh(texts @ weight).sum()
        >>> gradient = fast_on_cpus(jax.value_and_grad(loss))
        >>> value, grads = jax.jit(gradient)(jnp.ones((4, 3)), jnp.ones((8, 16, 4)))
        >>> grads.shape
        (4, 3)
    """

    def replaced(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = jaxpr_as_fun(_replace(closed, _INSTEAD, {}))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return replaced


def _replace(program: Any, instead: Mapping[Any, Any], done: dict[tuple[int, int], Any]) -> Any:
    """A program with other primitives. Those that `done` has by their identity stay one object in all their places."""
    key = id(program), id(instead)
    if key not in done:
        if hasattr(program, "jaxpr") and program.jaxpr is not program:
            new = program.replace(jaxpr=_replace(program.jaxpr, instead, done))
        else:
            new = program.replace(eqns=[_replace_equation(eqn, instead, done) for eqn in program.eqns])
        done[key] = (new, program)  # which keeps the identity its own
    return done[key][0]


def _replace_equation(eqn: Any, instead: Mapping[Any, Any], done: dict[tuple[int, int], Any]) -> Any:
    if eqn.primitive in instead:
        return eqn.replace(primitive=instead[eqn.primitive])
    if eqn.primitive.name not in _WITH_PROGRAMS:
        return eqn
    inside = _INSTEAD_IN_LOOPS if eqn.primitive.name in _LOOPS else instead
    return eqn.replace(params={name: _replace_parameter(value, inside, done) for name, value in eqn.params.items()})


def _replace_parameter(value: Any, instead: Mapping[Any, Any], done: dict[tuple[int, int], Any]) -> Any:
    if _is_program(value):
        return _replace(value, instead, done)
    if isinstance(value, tuple) and value and all(map(_is_program, value)):  # branches
        return tuple(_replace(x, instead, done) for x in value)
    return value


def _is_program(value: Any) -> bool:
    """Whether it is a jaxpr, open or closed: these are two classes in older versions of jax."""
    return hasattr(value, "eqns")
