"""The loop of an LSTM and of a GRU, as primitives that kernels compute on CPUs.

    LSTM: s = x + h w,  c' = sigmoid(s_f) c + sigmoid(s_i) tanh(s_g),  h' = sigmoid(s_o) tanh(c')
    GRU:  q = h w,  r = sigmoid(x_r + q_r),  z = sigmoid(x_z + q_z),
          n = tanh(x_n + r (q_n + bias)),  h' = (1 - z) n + z h

The columns of x and w are blocks of the width: i, f, g, o of an LSTM, and r, z, n of a GRU. A loop takes x, T x batch x
columns, and w. An LSTM takes h and c before the first step too, a GRU its bias and h. The results are the states of all
steps, and the cells of an LSTM. The batch may have any number of axes.

There are three primitives: the loop, its derivative along tangents, and the transpose of this derivative. Each is
defined by `lax.scan`, which computes it where no kernel does, and whose derivatives are those of the kernel's results.
The loop gives also its gates, for the transpose. They depend on the operands only, so no derivative is along them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import kernels
from .primitive import place_of

Arrays = list[Any]
OPERANDS = {"lstm": 4, "gru": 4}
RESULTS = {"lstm": 2, "gru": 1}


def loop(cell: str, *operands: jax.Array) -> Arrays:
    """The states of all steps, and the cells of an LSTM. All arrays are float32.

    Args:
        cell: "lstm" or "gru".
        operands: x, w, h, c of an LSTM, and x, w, bias, h of a GRU.
    """
    return loop_p.bind(*operands, cell=cell, keep=False)[: RESULTS[cell]]


def by_scan(cell: str, *operands: Any) -> Arrays:
    """The results and the gates, by lax."""
    x, w, *_ = operands

    def lstm(
        carry: tuple[jax.Array, jax.Array], x: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        h, c = carry
        i, f, g, o = jnp.split(x + h @ w, 4, axis=-1)
        i, f, g, o = lax.logistic(i), lax.logistic(f), lax.tanh(g), lax.logistic(o)
        c = f * c + i * g
        h = o * lax.tanh(c)
        return (h, c), (h, c, jnp.concatenate((i, f, g, o), -1))

    def gru(h: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (xr, xz, xn), (qr, qz, qn) = jnp.split(x, 3, axis=-1), jnp.split(h @ w, 3, axis=-1)
        r, z, q = lax.logistic(xr + qr), lax.logistic(xz + qz), qn + operands[2]
        n = lax.tanh(xn + r * q)
        h = (1.0 - z) * n + z * h
        return h, (h, jnp.concatenate((r, z, n, q), -1))

    if cell == "lstm":
        return list(lax.scan(lstm, operands[2:], x)[1])
    return list(lax.scan(gru, operands[3], x)[1])


def _loop(*operands: Any, cell: str, keep: bool) -> Arrays:
    *results, gates = by_scan(cell, *operands)
    return [*results, gates] if keep else results


def _tangents(*args: Any, cell: str) -> Arrays:
    """Along the tangents of the operands, which stand last. The results and the gates stand before them."""
    count = OPERANDS[cell]
    return list(jax.jvp(lambda *x: _loop(*x, cell=cell, keep=False), args[:count], args[-count:])[1])


def _transposed(*args: Any, cell: str, has_cotangent: tuple[bool, ...]) -> Arrays:
    """The cotangents of the operands. `has_cotangent` says which results have a cotangent: these stand last."""
    operands = args[: OPERANDS[cell]]
    results, vjp = jax.vjp(lambda *x: _loop(*x, cell=cell, keep=False), *operands)
    last = iter(args[len(args) - sum(has_cotangent) :])
    return list(
        vjp([next(last) if is_there else jnp.zeros_like(x) for x, is_there in zip(results, has_cotangent, strict=True)])
    )


def _loop_kernel(*operands: Any, cell: str, keep: bool) -> Arrays:
    # Kernels know one axis of the batch: (T, batch, columns), and (batch, width) for states. Gates are of 4 blocks,
    # also those of a GRU, as `by_scan` gives q too. Where nothing is differentiated the kernel does not write them:
    # (0,).
    x, w, *states = operands
    steps, batch, width = x.shape[0], x.shape[1:-1], w.shape[0]
    shapes = [(steps, math.prod(batch), width)] * RESULTS[cell]
    shapes += [(steps, math.prod(batch), 4 * width) if keep else (0,)]
    flat = [_flat(x, batch, 1), w, *(_flat(s, batch, 0) for s in states)]
    results = _call("LstmForward" if cell == "lstm" else "GruForward", shapes, *flat)
    return [y.reshape(steps, *batch, -1) for y in (results if keep else results[:-1])]


def _transposed_kernel(*args: Any, cell: str, has_cotangent: tuple[bool, ...]) -> Arrays:
    # `args`: the operands, the results and gates of the loop, and a cotangent of each result that has one.
    x, w, first, second, *residuals = args
    steps, batch, (width, columns) = x.shape[0], x.shape[1:-1], w.shape
    count = math.prod(batch)
    results, gates, last = residuals[: RESULTS[cell]], residuals[RESULTS[cell]], iter(residuals[RESULTS[cell] + 1 :])
    states, cells = _flat(results[0], batch, 1), _flat(results[-1], batch, 1)
    # A result without a cotangent has an empty one, which the kernel takes for zeros (`Given` in recurrent.cc).
    cotangents = [_flat(next(last), batch, 1) if x else jnp.zeros(0, jnp.float32) for x in has_cotangent]
    h = _flat(first if cell == "lstm" else second, batch, 0)
    columns_shape, state_shape = (steps, count, columns), (count, width)
    gates = _flat(gates, batch, 1)
    if cell == "lstm":
        shapes = [columns_shape, state_shape, state_shape]
        # x and h w are added, so that both have one cotangent.
        dx, dh, dc = _call("LstmBackward", shapes, w, _flat(second, batch, 0), cells, gates, *cotangents)
        ds, d_states = dx, (dh, dc)
    else:
        shapes = [columns_shape, columns_shape, state_shape]
        # r multiplies the columns n of h w, not those of x: dx and ds differ there. The bias, with a row for each
        # example, is added to q at each step: its gradient is the sum of these columns over the steps.
        dx, ds, dh = _call("GruBackward", shapes, w, h, states, gates, *cotangents)
        d_states = ds[..., 2 * width :].sum(0), dh
    # w is used at all steps: its gradient is one product over steps and examples, after the loop.
    (dw,) = _call("RecurrentWeight", [w.shape], h, states, ds)
    return [dx.reshape(x.shape), dw, *(y.reshape(first.shape) for y in d_states)]


def _call(name: str, shapes: Sequence[tuple[int, ...]], *operands: Any) -> Arrays:
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return list(jax.ffi.ffi_call(f"jaxpar_cpu.{name}", results)(*operands))


def _flat(x: jax.Array, batch: tuple[int, ...], before: int) -> jax.Array:
    """With the axes of the batch as one. `before` is the number of axes before them."""
    return x.reshape(*x.shape[:before], math.prod(batch), x.shape[-1])


def _primitive(name: str, plain: Callable[..., Arrays], kernel: Callable[..., Arrays] | None) -> Primitive:
    """A primitive that is what `plain` computes. Derivatives and batches are those of `plain`."""
    # A primitive is computed outside of `jit` too. Then it is compiled once for its params, and not at each call.
    new_p = Primitive(name)
    new_p.multiple_results = True

    @partial(jax.jit, static_argnames="params")
    def compiled(args: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> Any:
        return new_p.bind(*args, **dict(params))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        return jax.jvp(partial(plain, **params), primals, tuple(ad.instantiate_zeros(x) for x in tangents))

    def batch(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
        results = jax.vmap(partial(plain, **params), axes)(*args)
        return results, [0] * len(results)

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        use = kernel if kernel and kernels.can_call(place_of(ctx)) else plain
        return mlir.lower_fun(partial(use, **params), multiple_results=True)(ctx, *operands)

    new_p.def_impl(lambda *args, **params: compiled(args, params=tuple(params.items())))
    new_p.def_abstract_eval(lambda *avals, **params: jax.make_jaxpr(partial(plain, **params))(*avals).out_avals)
    ad.primitive_jvps[new_p] = derivative
    batching.primitive_batchers[new_p] = batch
    # Which device it is for is known when it is lowered: so export for several platforms, and a TPU, get `plain`.
    mlir.register_lowering(new_p, mlir.lower_fun(plain, multiple_results=True))
    mlir.register_lowering(new_p, lower, platform="cpu")
    return new_p


loop_p = _primitive("recurrent_loop", _loop, _loop_kernel)
tangents_p = _primitive("recurrent_loop_tangents", _tangents, None)
transposed_p = _primitive("recurrent_loop_transposed", _transposed, _transposed_kernel)


def _loop_derivative(primals: Sequence[Any], tangents: Sequence[Any], *, cell: str, keep: bool) -> Any:
    results = loop_p.bind(*primals, cell=cell, keep=True)
    along = tangents_p.bind(*primals, *results, *(ad.instantiate_zeros(x) for x in tangents), cell=cell)
    return (results, [*along, jnp.zeros_like(results[-1])]) if keep else (results[:-1], along)


def _loop_batch(args: Sequence[Any], axes: Sequence[int | None], *, cell: str, keep: bool) -> Any:
    """The new axis becomes one of the batch. A weight for each example is left to lax."""
    x, w, *states = args
    x_axis, w_axis, *state_axes = axes
    if w_axis is not None:
        results = jax.vmap(partial(_loop, cell=cell, keep=keep), axes)(*args)
        return results, [0] * len(results)
    # Axes of the batch stand behind the steps in x, and first in the states. An operand without the new axis gets
    # copies.
    size = next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)

    def moved(x: jax.Array, axis: int | None, to: int) -> Any:
        if axis is not None:
            return jnp.moveaxis(x, axis, to)
        return jnp.broadcast_to(jnp.expand_dims(x, to), (*x.shape[:to], size, *x.shape[to:]))

    x = moved(x, x_axis, 1)
    states = [moved(s, axis, 0) for s, axis in zip(states, state_axes, strict=True)]
    results = loop_p.bind(x, w, *states, cell=cell, keep=keep)
    return results, [1] * len(results)


def _tangents_transposed(cotangents: Sequence[Any], *args: Any, cell: str) -> Arrays:
    count = OPERANDS[cell]
    fixed, linear = args[:-count], args[-count:]
    has_cotangent = tuple(not isinstance(x, ad.Zero) for x in cotangents)
    last = [x for x in cotangents if not isinstance(x, ad.Zero)]
    transposed = transposed_p.bind(*fixed, *last, cell=cell, has_cotangent=has_cotangent)
    transposed = [y if ad.is_undefined_primal(x) else None for x, y in zip(linear, transposed, strict=True)]
    return [None] * len(fixed) + transposed


ad.primitive_jvps[loop_p] = _loop_derivative
batching.primitive_batchers[loop_p] = _loop_batch
ad.primitive_transposes[tangents_p] = _tangents_transposed
