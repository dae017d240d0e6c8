"""MXNet's fused recurrent layers, whose weights are packed into one vector.

First come the weights of all layers and directions, for each those from its input and those from its state. Then come
the biases in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._layers import dropout

_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_MOST_LAYERS = 1000
_Carry = tuple[jax.Array, ...]


def parameter_count(mode: str, inputs: int, hidden: int, layers: int, directions: int) -> int:
    """The length of the vector of packed weights."""
    if mode not in _GATES or hidden < 1 or not 1 <= layers <= _MOST_LAYERS:
        known = f"mode one of {', '.join(_GATES)}, state_size at least 1, num_layers 1 to {_MOST_LAYERS}"
        raise ValueError(f"RNN: expected {known}; got {mode!r}, {hidden} and {layers}")
    rows = _GATES[mode] * hidden * directions
    first = rows * (inputs + hidden + 2)
    return first + (layers - 1) * rows * (hidden * directions + hidden + 2)


def _unpack(packed: jax.Array, gates: int, inputs: int, hidden: int, layers: int, directions: int) -> list[Any]:
    """(weight of the input, of the state, bias of the input, of the state) of each layer and direction."""
    rows, at, weights = gates * hidden, 0, []
    for layer in range(layers):
        for _ in range(directions):
            pair: list[jax.Array] = []
            for width in (hidden * directions if layer else inputs, hidden):
                pair.append(packed[at : at + rows * width].reshape(rows, width))
                at += rows * width
            weights.append(pair)
    biases = packed[at:].reshape(layers * directions, 2, rows)
    return [(*pair, bias[0], bias[1]) for pair, bias in zip(weights, biases, strict=True)]


def _cell(mode: str) -> Callable[[_Carry, jax.Array, jax.Array], _Carry]:
    """A function of the state and of what comes from input and state, to the new state."""

    def lstm(carry: _Carry, x: jax.Array, h: jax.Array) -> _Carry:
        into, forget, new, out = jnp.split(x + h, 4, 1)
        cell = jax.nn.sigmoid(forget) * carry[1] + jax.nn.sigmoid(into) * jnp.tanh(new)
        return jax.nn.sigmoid(out) * jnp.tanh(cell), cell

    def gru(carry: _Carry, x: jax.Array, h: jax.Array) -> _Carry:
        (reset_x, update_x, new_x), (reset_h, update_h, new_h) = jnp.split(x, 3, 1), jnp.split(h, 3, 1)
        update = jax.nn.sigmoid(update_x + update_h)
        new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
        return ((1 - update) * new + update * carry[0],)

    def plain(carry: _Carry, x: jax.Array, h: jax.Array) -> _Carry:
        return (jax.nn.relu(x + h) if mode == "rnn_relu" else jnp.tanh(x + h),)

    return {"lstm": lstm, "gru": gru}.get(mode, plain)


def rnn(
    data: jax.Array,
    parameters: jax.Array,
    state: jax.Array,
    state_cell: jax.Array | None = None,
    *,
    state_size: int,
    num_layers: int,
    mode: str,
    bidirectional: bool = False,
    p: float = 0.0,
    state_outputs: bool = False,
    projection_size: int | None = None,
    use_sequence_length: bool = False,
    lstm_state_clip_min: float | None = None,
    lstm_state_clip_max: float | None = None,
    train: bool,
    rng: jax.Array | None,
) -> Any:
    if projection_size is not None or use_sequence_length or lstm_state_clip_min is not None:
        raise ValueError("RNN: projection_size, use_sequence_length and lstm_state_clip_min are not supported")
    directions = 2 if bidirectional else 1
    _, batch, inputs = data.shape
    expected = parameter_count(mode, inputs, state_size, num_layers, directions)
    if parameters.shape != (expected,):
        raise ValueError(f"RNN: its packed weights must have the shape ({expected},), got {parameters.shape}")
    shape = (num_layers * directions, batch, state_size)
    given = [state] if state_cell is None else [state, state_cell]
    # An exported network has zeros for states, of a batch of 0: as many as the data has.
    states = [jnp.zeros(shape, data.dtype) if 0 in s.shape else s for s in given]
    weights = _unpack(parameters, _GATES[mode], inputs, state_size, num_layers, directions)
    x, last, cell = data, [[] for _ in states], _cell(mode)
    for layer in range(num_layers):
        if layer:
            x = dropout(x, p=p, train=train, rng=None if rng is None else jax.random.fold_in(rng, layer))
        halves: list[jax.Array] = []
        for at in range(layer * directions, (layer + 1) * directions):
            out, end = _run(cell, x, weights[at], tuple(s[at] for s in states), at % directions == 1)
            halves.append(out)
            for kept, value in zip(last, end, strict=True):
                kept.append(value)
        x = jnp.concatenate(halves, 2)
    return (x, *(jnp.stack(s) for s in last)) if state_outputs else x


def _run(
    cell: Callable[[_Carry, jax.Array, jax.Array], _Carry], x: jax.Array, weight: Any, start: _Carry, reverse: bool
) -> tuple[jax.Array, _Carry]:
    """One direction of one layer over all steps."""
    from_input, from_state, input_bias, state_bias = weight
    projected = x @ from_input.T[None] + input_bias[None, None]

    def step(carry: _Carry, now: jax.Array) -> tuple[_Carry, jax.Array]:
        carry = cell(carry, now, carry[0] @ from_state.T + state_bias[None])
        return carry, carry[0]

    end, out = lax.scan(step, start, projected, reverse=reverse)
    return out, end
