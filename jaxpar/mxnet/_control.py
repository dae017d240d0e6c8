"""MXNet's loops and branches: operators that run the graphs inside of their node.

Such a graph is a function of all arrays of the node, and of `train` and `rng`, that gives a tuple of arrays. What MXNet
calls locations are the places of the node's arrays among those that a graph takes. The function has them already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._arrays import check_count
from ._operator import Back, Shape

Subgraph = Callable[..., Sequence[jax.Array]]
# Attributes that the graphs were made of, and that the operators themselves do not need.
LOCATIONS = frozenset("subgraphs num_outputs remain_locs cond_input_locs then_input_locs else_input_locs".split())


def foreach(
    *data: jax.Array,
    subgraphs: tuple[Subgraph, ...] = (),
    in_data_locs: tuple[int, ...],
    in_state_locs: tuple[int, ...],
    num_out_data: int,
    remain_locs: tuple[int, ...] = (),
    num_outputs: int = 0,
    train: bool,
    rng: jax.Array | None,
) -> Any:
    """A loop over the first axis of the first arrays. Behind them are the states, and what each step takes too."""
    (body,) = subgraphs
    ends = len(in_data_locs), len(in_data_locs) + len(in_state_locs)
    sequences, states, others = data[: ends[0]], data[ends[0] : ends[1]], data[ends[1] :]
    if not sequences or len({array.shape[0] for array in sequences}) > 1:
        raise ValueError(f"a loop over arrays of {[array.shape[0] for array in sequences]} steps")

    def step(states: tuple[jax.Array, ...], now: Any) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        number, slices = now
        outputs = tuple(body(*slices, *states, *others, train=train, rng=_key_of_step(rng, number)))
        return outputs[num_out_data:], outputs[:num_out_data]

    # As in MXNet, what is left of a vector is a vector of one number.
    sequences = tuple(array[:, None] if array.ndim == 1 else array for array in sequences)
    last, stacked = lax.scan(step, states, (jnp.arange(sequences[0].shape[0]), sequences))
    return _one_or_several((*stacked, *last))


def while_loop(
    *data: jax.Array,
    subgraphs: tuple[Subgraph, ...] = (),
    func_input_locs: tuple[int, ...],
    func_var_locs: tuple[int, ...],
    max_iterations: int,
    num_out_data: int,
    cond_input_locs: tuple[int, ...] = (),
    num_outputs: int = 0,
    train: bool,
    rng: jax.Array | None,
) -> Any:
    """A loop of at most so many steps, while the first graph gives no 0. What steps give is 0 after the last one."""
    condition, body = subgraphs
    check_count(max_iterations, "a loop of max_iterations")
    places = [func_input_locs[i] for i in func_var_locs]

    def step(carry: Any, number: jax.Array) -> Any:
        variables, goes_on = carry
        arrays = list(data)
        for place, value in zip(places, variables, strict=True):
            arrays[place] = value
        key = _key_of_step(rng, number)
        goes_on &= _is_true(condition(*arrays, train=train, rng=key))
        outputs = lax.cond(goes_on, run, lambda arrays, key: skip(arrays, run, key), arrays, key)
        return (outputs[num_out_data:], goes_on), outputs[:num_out_data]

    def run(arrays: Sequence[jax.Array], key: jax.Array | None) -> tuple[jax.Array, ...]:
        return tuple(body(*arrays, train=train, rng=key))

    def skip(arrays: Sequence[jax.Array], run: Callable[..., Any], key: jax.Array | None) -> tuple[jax.Array, ...]:
        given = jax.eval_shape(run, arrays, key)[:num_out_data]
        return (*(jnp.zeros(each.shape, each.dtype) for each in given), *(arrays[place] for place in places))

    # A loop of a known length has a gradient. The steps after the last one compute nothing.
    start = tuple(data[place] for place in places)
    (last, _), stacked = lax.scan(step, (start, jnp.array(True)), jnp.arange(max_iterations))
    return _one_or_several((*stacked, *last))


def cond(
    *data: jax.Array,
    subgraphs: tuple[Subgraph, ...] = (),
    cond_input_locs: tuple[int, ...] = (),
    then_input_locs: tuple[int, ...] = (),
    else_input_locs: tuple[int, ...] = (),
    num_outputs: int = 0,
    train: bool,
    rng: jax.Array | None,
) -> Any:
    """What the second graph gives where the first one gives no 0, and else the third one."""
    condition, *branches = (
        lambda arrays, graph=graph: tuple(graph(*arrays, train=train, rng=rng)) for graph in subgraphs
    )
    return _one_or_several(lax.cond(_is_true(condition(data)), *branches, data))


def _one_or_several(outputs: tuple[jax.Array, ...]) -> Any:
    """As operators give them: an array, or several as a tuple."""
    return outputs[0] if len(outputs) == 1 else outputs


def _is_true(outputs: Sequence[jax.Array]) -> jax.Array:
    (output,) = outputs
    return output.reshape(()) != 0  # an error for several numbers, as in MXNet


def _key_of_step(rng: jax.Array | None, number: jax.Array) -> jax.Array | None:
    return None if rng is None else jax.random.fold_in(rng, number)


# Of each graph the places of its variables among the arrays of the node


def _graphs_of_foreach(attrs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    # The file has it the other way round: of each array of the node which variable it is.
    locations = (*attrs["in_data_locs"], *attrs["in_state_locs"], *attrs.get("remain_locs", ()))
    places = {location: place for place, location in enumerate(locations)}
    return [tuple(places.get(variable, -1) for variable in range(len(locations)))]


def _graphs_by(*names: str) -> Callable[[Mapping[str, Any]], list[tuple[int, ...]]]:
    return lambda attrs: [attrs.get(name, ()) for name in names]


# What is known of the shapes of the node's arrays, with what its graphs infer


def _back_of_foreach(
    outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
) -> Sequence[Shape | None]:
    count = len(attrs["in_data_locs"])
    of_step = [None if shape is None else shape[1:] or (1,) for shape in arrays[:count]]
    (body,) = attrs["subgraphs"]
    return [*arrays[:count], *body.infer([*of_step, *arrays[count:]])[count:]]


def _back(
    outputs: Sequence[Shape | None], arrays: Sequence[Shape | None], attrs: Mapping[str, Any]
) -> Sequence[Shape | None]:
    for subgraph in attrs["subgraphs"]:
        arrays = subgraph.infer(arrays)
    return arrays


OPERATORS: dict[str, tuple[Callable[..., Any], Back, Callable[[Mapping[str, Any]], list[tuple[int, ...]]]]] = {
    "_foreach": (foreach, _back_of_foreach, _graphs_of_foreach),
    "_while_loop": (while_loop, _back, _graphs_by("cond_input_locs", "func_input_locs")),
    "_cond": (cond, _back, _graphs_by("cond_input_locs", "then_input_locs", "else_input_locs")),
}
