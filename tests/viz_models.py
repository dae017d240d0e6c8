"""Networks that the tests of jaxpar.viz draw; the ones of Flax and Haiku are imported where they are used."""

import functools
import io
import xml.etree.ElementTree as ET
from functools import partial

import gallery
import jax
import jax.numpy as jnp
import optax
from gallery.factorization import loss as factorization_loss
from jax.sharding import PartitionSpec as P
from kv_model import on_mesh

from jaxpar import viz
from jaxpar.models import lenet, matrix_factorization

f32, i32 = jnp.float32, jnp.int32
Spec = jax.ShapeDtypeStruct

SVG = "{http://www.w3.org/2000/svg}"


def groups(plot, *kinds):
    """The elements of the picture that are nodes, or of these kinds."""
    found = ET.fromstring(plot.pipe("svg")).iter(SVG + "g")
    return [group for group in found if group.get("class") in (kinds or ("node",))]


def words(plot):
    return "".join(ET.fromstring(plot.pipe("svg")).itertext())


def summary(fn, *args, **options):
    out = io.StringIO()
    viz.print_summary(fn, *args, file=out, **options)
    return out.getvalue()


def xla_flops(fn, *args):
    """For a GPU: on a CPU, LeNet has other formulas, and random bits are made in a loop that XLA counts once."""
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).cost_analysis()["flops"]


LENET = jax.eval_shape(lenet.init, jax.random.key(0))
IMAGES, LABELS = Spec((256, 28, 28, 1), f32), Spec((256,), i32)
TOKENS = Spec((2, 32), i32)


def lenet_loss(params, images, labels):
    log_probs = jax.nn.log_softmax(lenet.apply(params, images))
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=1).mean()


def training_step(tx, loss):
    """A step of the params, the optimizer's state and a batch, by `loss(params, batch)`."""

    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def factorization():
    params = jax.eval_shape(lambda rng: matrix_factorization.init(rng, 943, 1682, 64), jax.random.key(0))
    return params, Spec((32,), i32), Spec((32,), i32)


def layer_norm(params, x_BxTxD):
    mean = x_BxTxD.mean(-1, keepdims=True)
    variance = x_BxTxD.var(-1, keepdims=True)
    return (x_BxTxD - mean) / jnp.sqrt(variance + 1e-5) * params["g"][None, None] + params["b"][None, None]


def attention(params, x_BxTxD, heads):
    batch, length, dim = x_BxTxD.shape
    q, k, v = ((x_BxTxD @ params[name]).reshape(batch, length, heads, dim // heads) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(dim // heads)
    weights = jax.nn.softmax(scores, -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, dim) @ params["o"]


def block(params, x_BxTxD, heads=4):
    x_BxTxD = x_BxTxD + attention(params["attn"], layer_norm(params["ln1"], x_BxTxD), heads)
    hidden = jax.nn.gelu(layer_norm(params["ln2"], x_BxTxD) @ params["w1"] + params["b1"][None, None])
    return x_BxTxD + hidden @ params["w2"] + params["b2"][None, None]


def transformer(params, tokens):
    x_BxTxD = params["embed"][tokens]
    for block_params in params["blocks"]:
        x_BxTxD = block(block_params, x_BxTxD)
    return layer_norm(params["ln"], x_BxTxD) @ params["embed"].T


def transformer_scanned(params, tokens):
    x_BxTxD, _ = jax.lax.scan(lambda x, p: (block(p, x), None), params["embed"][tokens], params["blocks"])
    return x_BxTxD @ params["embed"].T


def transformer_loss(params, tokens):
    log_probs = jax.nn.log_softmax(transformer(params, tokens))
    return -jnp.take_along_axis(log_probs, tokens[:, :, None], axis=-1).mean()


def transformer_params(blocks=12, dim=64, vocabulary=1000):
    norm = {"g": Spec((dim,), f32), "b": Spec((dim,), f32)}
    one = {
        "attn": {name: Spec((dim, dim), f32) for name in "qkvo"},
        "ln1": norm, "ln2": norm, "w1": Spec((dim, 4 * dim), f32), "b1": Spec((4 * dim,), f32),
        "w2": Spec((4 * dim, dim), f32), "b2": Spec((dim,), f32),
    }  # fmt: skip
    return {"embed": Spec((vocabulary, dim), f32), "blocks": [one] * blocks, "ln": norm}


def scanned_params(blocks=12):
    params = transformer_params(blocks)
    stacked = jax.tree.map(lambda leaf: Spec((blocks, *leaf.shape), leaf.dtype), params["blocks"][0])
    return {"embed": params["embed"], "blocks": stacked}


def pmap_step():
    @partial(jax.pmap, axis_name="data", in_axes=(None, 0, 0))
    def step(params, images, labels):
        loss, grads = jax.value_and_grad(lenet_loss)(params, images, labels)
        grads = jax.lax.psum(grads, "data")
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), jax.lax.pmean(loss, "data")

    return step, (LENET, Spec((4, 64, 28, 28, 1), f32), Spec((4, 64), i32))


def shard_map_step():
    def local(params, images, labels):
        grads = jax.grad(lenet_loss)(params, images, labels)
        return jax.tree.map(lambda w, g: w - 0.1 * jax.lax.psum(g, "data"), params, grads)

    return on_mesh(local, jax.devices()[:4], (P(), P("data"), P("data"))), (LENET, IMAGES, LABELS)


def flax_transformer(blocks):
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y)
            return x + nn.Dense(16)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(blocks):
                x = Block()(x)
            return nn.Dense(10)(x)

    x = Spec((2, 5, 16), f32)
    return Net().apply, (jax.eval_shape(Net().init, jax.random.key(0), x), x)


def haiku_transformer(blocks):
    import haiku as hk

    def net(x):
        for _ in range(blocks):
            h = hk.LayerNorm(-1, True, True)(x)
            scale = hk.initializers.VarianceScaling()
            x = x + hk.MultiHeadAttention(4, 4, w_init=scale, model_size=16)(h, h, h)
            x = x + hk.nets.MLP([64, 16], activation=jax.nn.gelu)(hk.LayerNorm(-1, True, True)(x))
        return x

    x = Spec((2, 5, 16), f32)
    made = hk.without_apply_rng(hk.transform(net))
    return made.apply, (jax.eval_shape(made.init, jax.random.key(0), x), x)


def chain(equations):
    def chain(x):
        for _ in range(equations // 3 + 1):
            x = jnp.sin(x) * jnp.cos(x)
        return x

    return chain


def tangle(equations):
    """A graph of additions and products without any order to it."""
    import random

    def tangle(x):
        chosen = random.Random(0)
        found = [x]
        for _ in range(equations):
            step = chosen.choice([jnp.add, jnp.multiply, jnp.maximum, jax.lax.sub])
            found.append(step(chosen.choice(found[-30:]), chosen.choice(found[-30:])))
        return found[-1]

    return tangle


NETWORKS = {
    "lenet": lambda: (lenet.apply, (LENET, IMAGES)),
    "factorization": lambda: (factorization_loss, (*factorization(), Spec((32,), f32))),
    "gradient": lambda: (jax.value_and_grad(lenet_loss), (LENET, IMAGES, LABELS)),
    "transformer": lambda: (transformer, (transformer_params(), TOKENS)),
    "transformer gradient": lambda: (jax.grad(transformer_loss), (transformer_params(), TOKENS)),
    "scan": lambda: (transformer_scanned, (scanned_params(), TOKENS)),
    "resnet": lambda: gallery.make("resnet50_nnx")[:2],
    "flax": lambda: flax_transformer(12),
    "haiku": lambda: haiku_transformer(2),
    "pmap": pmap_step,
    "tangle": lambda: (tangle(600), (Spec((4,), f32),)),
}


@functools.cache
def network(name):
    """The function and its arguments."""
    return NETWORKS[name]()


@functools.cache
def traced(name):
    """Its graph."""
    fn, args = network(name)
    return viz.trace(fn, *args)
