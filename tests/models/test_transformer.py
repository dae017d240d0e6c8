"""The decoder against one written plainly, and the program that it becomes on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kv_model import placed_collectives_in

from jaxpar import parallel
from jaxpar.models import transformer

CONFIG = transformer.Config(layers=2, width=32, heads=4, vocabulary=48, positions=12)


# Drawn larger than by `init`, and biases too, so that every one of them matters.
RNG = np.random.default_rng(0)
SHAPES = jax.eval_shape(lambda: transformer.init(jax.random.key(0), CONFIG))
PARAMS = jax.tree.map(lambda x: jnp.asarray(0.1 * RNG.standard_normal(x.shape), x.dtype), SHAPES)


def tokens(batch=2, length=10):
    return np.random.default_rng(1).integers(0, CONFIG.vocabulary, (batch, length))


def plain(params, tokens):
    """One text after the other, layer after layer, head after head, in NumPy and float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(p, x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def head(p, x, i, h):
        q, k, v = (x @ p["qkv"]["kernel"][i, :, c, h] + p["qkv"]["bias"][i, c, h] for c in range(3))
        scores = q @ k.T / np.sqrt(q.shape[1])
        weights = np.tril(np.exp(scores))
        return weights / weights.sum(1, keepdims=True) @ v @ p["out"]["kernel"][i, h]

    def gelu(x):
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def text(t):
        x = params["embedding"]["tokens"][t] + params["embedding"]["positions"][: len(t)]
        for i in range(CONFIG.layers):
            p, q = params["layers"]["attention"], params["layers"]["mlp"]
            h = norm({name: value[i] for name, value in p["norm"].items()}, x)
            x = x + sum(head(p, h, i, n) for n in range(CONFIG.heads)) + p["out"]["bias"][i]
            h = norm({name: value[i] for name, value in q["norm"].items()}, x)
            h = gelu(h @ q["up"]["kernel"][i] + q["up"]["bias"][i])
            x = x + h @ q["down"]["kernel"][i] + q["down"]["bias"][i]
        return norm(params["norm"], x) @ params["embedding"]["tokens"].T

    return np.stack([text(t) for t in tokens])


apply = jax.jit(transformer.apply)
loss_and_grads = jax.jit(jax.value_and_grad(transformer.loss))


@pytest.mark.slow
def test_it_is_the_plain_decoder():
    texts = tokens()
    wanted = plain(PARAMS, texts)
    np.testing.assert_allclose(apply(PARAMS, texts), wanted, atol=2e-5 * np.abs(wanted).max())


def test_no_position_looks_ahead():
    texts = tokens()
    texts[1] = texts[0]
    texts[1, 6] = (texts[0, 6] + 1) % CONFIG.vocabulary
    logits = apply(PARAMS, texts)
    changed = (logits[0] != logits[1]).any(axis=-1)
    assert not changed[:6].any()
    assert changed[6:].all()


@pytest.mark.slow
def test_the_loss_and_its_gradients():
    texts = tokens(8, 13)
    loss, grads = loss_and_grads(PARAMS, texts)
    wanted = plain(PARAMS, texts[:, :-1])
    wanted -= np.log(np.exp(wanted).sum(-1, keepdims=True))
    np.testing.assert_allclose(loss, -np.take_along_axis(wanted, texts[:, 1:, None], -1).mean(), rtol=1e-5)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(grad).all(), path
        assert (np.abs(grad).max(axis=-1) > 0).all(), path


@pytest.mark.slow
def test_what_it_begins_with():
    rng = jax.random.key(0, impl="rbg")  # compiles in half the time
    params = jax.jit(transformer.init, static_argnums=1)(rng, CONFIG)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"])}
    kernels = [np.asarray(leaf) for name, leaf in named.items() if "kernel" in name]
    assert len({layer.tobytes() for kernel in kernels for layer in kernel}) == len(kernels) * CONFIG.layers
    assert params["layers"]["mlp"]["up"]["kernel"].std() == pytest.approx(0.02, rel=0.05)
    assert params["layers"]["mlp"]["down"]["kernel"].std() == pytest.approx(0.02 / np.sqrt(4), rel=0.05)
    with pytest.raises(ValueError, match=r"transformer\.init: width 32 cannot be divided by 5 heads"):
        transformer.init(jax.random.key(0), transformer.Config(width=32, heads=5))


@pytest.mark.parametrize("shape", [(1, 13), (3,)])
def test_tokens_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"must have the shape \(n, t\) with t of at most 12 positions, got int"):
        transformer.apply(PARAMS, jnp.zeros(shape, int))


@pytest.mark.slow
def test_on_a_mesh_the_weights_of_one_layer_are_gathered_at_a_time():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    texts = tokens(batch=8, length=13)
    rule = parallel.sharding_rules(transformer.TENSOR_PARALLEL, then=parallel.fsdp(min_size=1, stacked_dims=1))
    shardings = parallel.shardings_of(PARAMS, rule, mesh)

    def gradient(params, texts):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.value_and_grad(transformer.loss)(params, texts)

    split = (jax.device_put(PARAMS, shardings), jax.device_put(texts, NamedSharding(mesh, P("data"))))
    program = jax.jit(gradient, out_shardings=(NamedSharding(mesh, P()), shardings)).lower(*split).compile()
    loss, grads = program(*split)
    wanted_loss, wanted = loss_and_grads(PARAMS, texts)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), grads, wanted)
    found = placed_collectives_in(program.as_text())
    gathered = [shape for inside, op, shapes in found if op == "all-gather" and not inside for _, shape in shapes]
    assert sorted(gathered) == [(12, 32), (24, 32)]  # the two embeddings: 12 positions, 48 / 2 tokens
    within = {shape for inside, op, shapes in found if op == "all-gather" and inside for _, shape in shapes}
    assert {(32, 64), (64, 32)} <= {shape[-2:] for shape in within}  # half of one layer's `up` and `down`
    # Activations (2 texts of a device, 12 tokens, width) are summed over `model` and never sent over `data`.
    assert {op for _, op, shapes in found for _, shape in shapes if shape[:2] == (2, 12)} == {"all-reduce"}
    assert not {op for _, op, _ in found} & {"all-to-all", "collective-permute"}
