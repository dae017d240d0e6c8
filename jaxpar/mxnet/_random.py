"""MXNet's random operators. They draw from the model's `rng`, so the numbers are others than MXNet's.

A distribution is a function of a key, a shape and its numbers. There are three operators of each: of numbers that are
attributes, of the shape of an array ("_like"), and of arrays of numbers ("_sample_").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._core import checks
from ._operator import dtype_of, named

Draw = Callable[..., jax.Array]


def _poisson(key: jax.Array, shape: tuple[int, ...], lam: Any) -> jax.Array:
    # jax draws from a Poisson distribution by this generator only.
    key = jax.random.wrap_key_data(jax.random.bits(key, (2,)), impl="threefry2x32")
    return jax.random.poisson(key, lam, shape).astype(jnp.float32)


def _gamma(key: jax.Array, shape: tuple[int, ...], alpha: Any, beta: Any) -> jax.Array:
    return jax.random.gamma(key, jnp.asarray(alpha, jnp.float32), shape) * beta


def _negative_binomial(key: jax.Array, shape: tuple[int, ...], k: Any, p: Any) -> jax.Array:
    first, second = jax.random.split(key)
    return _poisson(second, shape, _gamma(first, shape, k, (1 - p) / p))


def _generalized(key: jax.Array, shape: tuple[int, ...], mu: Any, alpha: Any) -> jax.Array:
    first, second = jax.random.split(key)
    positive = jnp.where(alpha == 0, 1, alpha)
    mean = jnp.where(alpha == 0, mu, _gamma(first, shape, 1 / positive, positive * mu))
    return _poisson(second, shape, mean)


_CALLER = "a random operator"

# name: (how it is drawn, {attribute: default}, names of the arrays of numbers)
_DISTRIBUTIONS: dict[str, tuple[Draw, dict[str, Any], str]] = {
    "uniform": (
        lambda key, shape, low, high: jax.random.uniform(key, shape) * (high - low) + low,
        {"low": 0.0, "high": 1.0},
        "low high",
    ),
    "normal": (
        lambda key, shape, loc, scale: jax.random.normal(key, shape) * scale + loc,
        {"loc": 0.0, "scale": 1.0},
        "mu sigma",
    ),
    "gamma": (_gamma, {"alpha": 1.0, "beta": 1.0}, "alpha beta"),
    "exponential": (lambda key, shape, lam: jax.random.exponential(key, shape) / lam, {"lam": 1.0}, "lam"),
    "poisson": (_poisson, {"lam": 1.0}, "lam"),
    "negative_binomial": (_negative_binomial, {"k": 1, "p": 1.0}, "k p"),
    "generalized_negative_binomial": (_generalized, {"mu": 1.0, "alpha": 1.0}, "mu alpha"),
}


def _operators(name: str) -> dict[str, Callable[..., Any]]:
    draw, defaults, arrays = _DISTRIBUTIONS[name]

    def of_numbers(
        *, shape: tuple[int, ...] = (), dtype: str | None = None, rng: jax.Array | None, **numbers: Any
    ) -> jax.Array:
        values = [numbers.get(key, default) for key, default in defaults.items()]
        return draw(checks.random_key(rng, _CALLER), shape or (1,), *values).astype(dtype_of(dtype))

    def like(data: jax.Array, *, rng: jax.Array | None, **numbers: Any) -> jax.Array:
        values = [numbers.get(key, default) for key, default in defaults.items()]
        return draw(checks.random_key(rng, _CALLER), data.shape, *values).astype(data.dtype)

    def of_arrays(
        *values: jax.Array, shape: tuple[int, ...] = (), dtype: str | None = None, rng: jax.Array | None
    ) -> jax.Array:
        spread = [value.reshape(value.shape + (1,) * len(shape)) for value in values]
        return draw(checks.random_key(rng, _CALLER), values[0].shape + shape, *spread).astype(dtype_of(dtype))

    options: dict[str, Any] = {"shape": (), "dtype": None}
    return {
        f"_random_{name} random_{name}" + " normal" * (name == "normal") + " uniform" * (name == "uniform"): named(
            of_numbers, [], defaults | options, draws=True
        ),
        f"_random_{name}_like": named(like, ["data"], defaults, draws=True),
        f"_sample_{name} sample_{name}": named(of_arrays, arrays.split(), options, draws=True),
    }


def randint(
    *, low: int, high: int, shape: tuple[int, ...] = (), dtype: str | None = None, rng: jax.Array | None
) -> jax.Array:
    drawn = jax.random.randint(checks.random_key(rng, _CALLER), shape or (1,), low, high)
    return drawn.astype(dtype_of(dtype, "int32"))


def shuffle(data: jax.Array, *, rng: jax.Array | None) -> jax.Array:
    return jax.random.permutation(checks.random_key(rng, _CALLER), data)


def multinomial(
    data: jax.Array, *, shape: tuple[int, ...] = (), get_prob: bool = False, dtype: str = "int32", rng: jax.Array | None
) -> Any:
    """Numbers of classes, of the probabilities along the last axis. With `get_prob` the logarithms of theirs too."""
    scores = jnp.log(data)
    count = data.shape[:-1]
    spread = scores.reshape(*count, *(1,) * len(shape), data.shape[-1])
    drawn = jax.random.categorical(checks.random_key(rng, _CALLER), spread, shape=(*count, *shape))
    log_probs = jnp.take_along_axis(jnp.broadcast_to(spread, (*drawn.shape, data.shape[-1])), drawn[..., None], -1)[
        ..., 0
    ]
    drawn = drawn.astype(dtype_of(dtype, "int32"))
    return (drawn, log_probs) if get_prob else drawn


OPERATORS: dict[str, Callable[..., Any]] = {
    **{names: fn for name in _DISTRIBUTIONS for names, fn in _operators(name).items()},
    "_random_randint random_randint": randint,
    "_shuffle shuffle": shuffle,
    "_sample_multinomial sample_multinomial": multinomial,
}


def density(log_pdf: Callable[..., jax.Array], arrays: str) -> Callable[..., jax.Array]:
    """An operator that gives the density of samples, whose first axes are those of the arrays of numbers."""

    def pdf(sample: jax.Array, *values: jax.Array, is_log: bool = False) -> jax.Array:
        wide, *wide_values = _widened(sample, *values)
        out = log_pdf(wide, *(jnp.expand_dims(value, range(value.ndim, sample.ndim)) for value in wide_values))
        return (out if is_log else jnp.exp(out)).astype(sample.dtype)

    return named(pdf, ["sample", *arrays.split()], {"is_log": False})


def _widened(*arrays: jax.Array) -> list[jax.Array]:
    """Arrays of at least 32 bits. Logarithms of the gamma function cancel, and 16 bits would lose what is left."""
    return [array.astype(jnp.promote_types(array.dtype, jnp.float32)) for array in arrays]


def pdf_dirichlet(sample: jax.Array, alpha: jax.Array, *, is_log: bool = False) -> jax.Array:
    """The density of points of a simplex, along the last axis of both. The samples have axes of their own before it."""
    wide, alpha = _widened(sample, jnp.expand_dims(alpha, range(alpha.ndim - 1, sample.ndim - 1)))
    gammaln = jax.scipy.special.gammaln
    out = gammaln(alpha.sum(-1)) - gammaln(alpha).sum(-1) + ((alpha - 1) * jnp.log(wide)).sum(-1)
    return (out if is_log else jnp.exp(out)).astype(sample.dtype)


def log_negative_binomial(sample: jax.Array, k: jax.Array, p: jax.Array) -> jax.Array:
    gammaln = jax.scipy.special.gammaln
    count = gammaln(sample + k) - gammaln(sample + 1) - gammaln(k)
    return count + k * jnp.log(p) + sample * jnp.log(1 - p)


def log_generalized_negative_binomial(sample: jax.Array, mu: jax.Array, alpha: jax.Array) -> jax.Array:
    return log_negative_binomial(sample, 1 / alpha, 1 / (mu * alpha + 1))
