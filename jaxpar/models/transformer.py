"""A GPT-2 decoder that can be larger than one device.

Three choices make this possible:
1. The layers are stacked, and `jax.lax.scan` runs over them. So the weights of only one layer are gathered at a time.
2. The backward pass computes each layer again. So gathered weights are not kept.
3. The activations between layers are constrained to the batch's sharding. So the compiler gathers weights and not
   activations. Without a mesh in the context, the constraints do nothing.

Shapes in names: B batch, T positions, V vocabulary, D width, N heads, H width of a head, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

from .._core import checks
from .._core.transfers import allows_transfers

Params = dict[str, Any]  # dicts of arrays, one inside another
Axes = str | tuple[str, ...]

_DATA = ("data", "fsdp")
_STDDEV = 0.02
_EPSILON = 1e-5

# How the weights are split over a mesh axis for tensor parallelism, for `parallel.sharding_rules`.
TENSOR_PARALLEL = {
    "embedding/tokens": P("model"),
    "layers/attention/qkv/kernel": P(None, None, None, "model"),
    "layers/attention/qkv/bias": P(None, None, "model"),
    "layers/attention/out/kernel": P(None, "model"),
    "layers/mlp/up/kernel": P(None, None, "model"),
    "layers/mlp/up/bias": P(None, "model"),
    "layers/mlp/down/kernel": P(None, "model"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a decoder. The default is GPT-2 small, 124 million parameters.

    Attributes:
        layers: the number of layers.
        width: the width of the activations between layers, a multiple of `heads`.
        heads: the number of attention heads.
        vocabulary: the number of tokens. GPT-2 has 50,257, and 50,304 is the next multiple of 128.
        positions: the largest number of tokens in a text.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    positions: int = 1024

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            checks.whole_number(getattr(self, field.name), "transformer.Config", field.name)


@allows_transfers
def init(rng: jax.Array | int, config: Config = Config()) -> Params:
    """The parameters, float32. Kernels and embeddings are drawn from N(0, 0.02²), biases are 0.

    The last kernel of each residual branch has the standard deviation 0.02 / √(2 layers), as in GPT-2.

    Args:
        rng: a random key, or an int that makes one.
        config: the sizes.

    Returns:
        `{"embedding": {"tokens" (V, D), "positions" (T, D)}, "layers": {"attention", "mlp"}, "norm"}`. The arrays of
        `layers` have a first axis of L.

    Raises:
        ValueError: `heads` does not divide `width`.

    Example:
        >>> shapes = jax.eval_shape(init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
        124475904
    """
    # The layers are the first axis of their arrays, for `scan`. What adds to the residual stream is drawn smaller, so
    # that its variance does not grow with the layers.
    L, D, N = config.layers, config.width, config.heads
    if D % N:
        raise ValueError(f"transformer.init: width {D} cannot be divided by {N} heads; change one of them")
    draw = _normals(checks.random_key(rng, "transformer.init"))
    attention = {
        "norm": _norm_params(L, D),
        "qkv": {"kernel": draw(L, D, 3, N, D // N), "bias": jnp.zeros((L, 3, N, D // N))},
        "out": {"kernel": draw(L, N, D // N, D, scale=(2 * L) ** -0.5), "bias": jnp.zeros((L, D))},
    }
    mlp = {
        "norm": _norm_params(L, D),
        "up": {"kernel": draw(L, D, 4 * D), "bias": jnp.zeros((L, 4 * D))},
        "down": {"kernel": draw(L, 4 * D, D, scale=(2 * L) ** -0.5), "bias": jnp.zeros((L, D))},
    }
    embedding = {"tokens": draw(config.vocabulary, D), "positions": draw(config.positions, D)}
    return {"embedding": embedding, "layers": {"attention": attention, "mlp": mlp}, "norm": _norm_params(D)}


def apply(params: Params, tokens: jax.Array, *, data_axes: Axes = _DATA, model_axis: str = "model") -> jax.Array:
    """The logits of the token after each position.

    Args:
        params: from `init`.
        tokens: (B, T) integers, T at most the number of positions.
        data_axes: the mesh axes that split the batch. Axes that the mesh lacks are ignored.
        model_axis: the mesh axis over which `TENSOR_PARALLEL` splits the weights. The mesh may lack it.

    Returns:
        (B, T, V) logits, in the dtype of the parameters. The logits of a position depend on the tokens up to that
        position.

    Raises:
        ValueError: `tokens` has another number of axes, or more positions than the model.

    Example:
        >>> params = jax.eval_shape(init, jax.random.key(0))
        >>> jax.eval_shape(apply, params, jnp.zeros((2, 10), int))
        ShapeDtypeStruct(shape=(2, 10, 50304), dtype=float32)
    """
    positions = params["embedding"]["positions"]
    if tokens.ndim != 2 or tokens.shape[1] > len(positions):
        wanted = f"the shape (n, t) with t of at most {len(positions)} positions"
        raise ValueError(f"transformer.apply: tokens must have {wanted}, got {checks.describe(tokens)}")
    # Whole on the data axis, once for both uses: to look a token up in a part of the table costs more.
    table_VxD = _copy_for_shard(_constrain(params["embedding"]["tokens"], model_axis, None), model_axis, None)
    positions_TxD = _constrain(positions, None, None)[: tokens.shape[1]]
    x_BxTxD = _constrain(table_VxD[tokens] + positions_TxD[None], data_axes, None, None)

    # One layer's weights are gathered at a time, forwards and backwards: `scan` has one layer in its body, and
    # `checkpoint` computes it again. In a scan nothing could be merged, so CSE needs no guard.
    @partial(jax.checkpoint, prevent_cse=False)
    def layer(x_BxTxD: jax.Array, layer_params: Params) -> tuple[jax.Array, None]:
        x_BxTxD = x_BxTxD + _attention(layer_params["attention"], x_BxTxD)
        x_BxTxD = x_BxTxD + _mlp(layer_params["mlp"], x_BxTxD)
        return _constrain(x_BxTxD, data_axes, None, None), None

    x_BxTxD, _ = jax.lax.scan(layer, x_BxTxD, params["layers"])
    logits_BxTxV = jnp.einsum("btd,vd->btv", _norm(params["norm"], x_BxTxD), table_VxD)
    return _constrain(logits_BxTxV, data_axes, None, model_axis)


def loss(params: Params, tokens: jax.Array, *, data_axes: Axes = _DATA, model_axis: str = "model") -> jax.Array:
    """The mean cross-entropy of each token, given the tokens before it.

    Args:
        params, data_axes, model_axis: as for `apply`.
        tokens: (B, T + 1) integers.

    Returns:
        A scalar, in nats.

    Example:
        >>> params = jax.eval_shape(init, jax.random.key(0))
        >>> jax.eval_shape(loss, params, jnp.zeros((2, 11), int))
        ShapeDtypeStruct(shape=(), dtype=float32)
    """
    logits_BxTxV = apply(params, tokens[:, :-1], data_axes=data_axes, model_axis=model_axis)
    # A comparison and not an index: a vocabulary that is split stays split.
    is_next_BxTxV = tokens[:, 1:, None] == jnp.arange(logits_BxTxV.shape[-1])[None, None]
    next_BxT = jnp.where(is_next_BxTxV, logits_BxTxV, 0).sum(-1)
    return (jax.nn.logsumexp(logits_BxTxV, -1) - next_BxT).mean()


def _attention(params: Params, x_BxTxD: jax.Array) -> jax.Array:
    # One product for queries, keys and values, which come first: (3, B, T, N, H).
    qkv = jnp.einsum("btd,dcnh->cbtnh", _norm(params["norm"], x_BxTxD), params["qkv"]["kernel"])
    q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = qkv + params["qkv"]["bias"][:, None, None]
    heads_BxTxNxH = jax.nn.dot_product_attention(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, is_causal=True)
    return jnp.einsum("btnh,nhd->btd", heads_BxTxNxH, params["out"]["kernel"]) + params["out"]["bias"][None, None]


def _mlp(params: Params, x_BxTxD: jax.Array) -> jax.Array:
    h_BxTxF = _norm(params["norm"], x_BxTxD) @ params["up"]["kernel"] + params["up"]["bias"][None, None]
    return jax.nn.gelu(h_BxTxF) @ params["down"]["kernel"] + params["down"]["bias"][None, None]


def _norm(params: Params, x_BxTxD: jax.Array) -> jax.Array:
    centred = x_BxTxD - x_BxTxD.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + _EPSILON)
    return centred * scale * params["scale"][None, None] + params["bias"][None, None]


def _constrain(x: jax.Array, *axes: Axes | None) -> jax.Array:
    """Split over those axes of the context's mesh that are left to the compiler, whole on the others of them.

    An axis over which `vmap` maps, as the engine `jit` of a training step does, is split by `vmap` itself.
    """
    auto = _auto_axes()
    if not auto:
        return x
    free = [name for name in auto if not _is_mapped(name)]
    names = [(entry,) if isinstance(entry, str) else entry or () for entry in axes]
    return jax.lax.with_sharding_constraint(x, P(*(tuple(n for n in entry if n in free) or None for entry in names)))


def _copy_for_shard(x: jax.Array, *axes: Axes | None) -> jax.Array:
    """A copy for each shard of a batch that `vmap` maps over the mesh.

    A shard adds the gradients of all uses of its copy. Of `x` itself the devices would sum those of each use.
    """
    # Zero times the number of the shard makes it another array in each of them.
    mapped = [name for name in _auto_axes() if _is_mapped(name) and jax.lax.axis_size(name) > 1]
    for name in mapped:
        x = x - (0 * jax.lax.axis_index(name)).astype(x.dtype)
    return _constrain(x, *axes) if mapped else x


def _auto_axes() -> list[str]:
    mesh = jax.sharding.get_abstract_mesh()
    return [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto]


def _is_mapped(name: str) -> bool:
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def _normals(rng: jax.Array) -> Callable[..., jax.Array]:
    """A function that draws arrays, each with a key of its own."""
    count = iter(range(2**31))
    return lambda *shape, scale=1.0: scale * _STDDEV * jax.random.normal(jax.random.fold_in(rng, next(count)), shape)


def _norm_params(*shape: int) -> Params:
    return {"scale": jnp.ones(shape), "bias": jnp.zeros(shape)}


def __dir__() -> list[str]:
    return ["TENSOR_PARALLEL", "Config", "apply", "init", "loss"]
