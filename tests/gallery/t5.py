"""T5-small of Raffel et al. in Flax Linen: encoder, decoder, relative position bias, and the loss of its training."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

VOCABULARY, WIDTH, HIDDEN, HEADS, HEAD, LAYERS = 32_128, 512, 2048, 8, 64, 6
BUCKETS, MAX_DISTANCE = 32, 128


def relative_position_bucket(relative_position, bidirectional):
    buckets, result = BUCKETS, 0
    if bidirectional:
        buckets //= 2
        result += (relative_position > 0).astype(jnp.int32) * buckets
        relative_position = jnp.abs(relative_position)
    else:
        relative_position = -jnp.minimum(relative_position, 0)
    exact = buckets // 2
    scaled = jnp.log(jnp.maximum(relative_position, 1) / exact) / jnp.log(MAX_DISTANCE / exact)
    far = jnp.minimum(exact + (scaled * (buckets - exact)).astype(jnp.int32), buckets - 1)
    return result + jnp.where(relative_position < exact, relative_position, far)


class RelativePositionBias(nn.Module):
    bidirectional: bool

    @nn.compact
    def __call__(self, queries, keys):
        position = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
        bucket = relative_position_bucket(position, self.bidirectional)
        return nn.Embed(BUCKETS, HEADS, name="embedding")(bucket).transpose(2, 0, 1)[None]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, memory, bias=None):
        def heads(name, y):
            y = nn.Dense(HEADS * HEAD, use_bias=False, name=name)(y)
            return y.reshape(*y.shape[:2], HEADS, HEAD)

        query, key, value = heads("q", x), heads("k", memory), heads("v", memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        if bias is not None:
            scores = scores + bias
        out = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
        return nn.Dense(WIDTH, use_bias=False, name="o")(out.reshape(*x.shape[:2], -1))


class FeedForward(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(HIDDEN, use_bias=False, name="wi")(x))
        return nn.Dense(WIDTH, use_bias=False, name="wo")(x)


class EncoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x, bias):
        y = nn.RMSNorm(name="attention_norm")(x)
        x = x + Attention(name="self_attention")(y, y, bias)
        return x + FeedForward(name="mlp")(nn.RMSNorm(name="mlp_norm")(x))


class DecoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x, memory, bias):
        y = nn.RMSNorm(name="self_attention_norm")(x)
        x = x + Attention(name="self_attention")(y, y, bias)
        y = nn.RMSNorm(name="cross_attention_norm")(x)
        x = x + Attention(name="cross_attention")(y, memory)
        return x + FeedForward(name="mlp")(nn.RMSNorm(name="mlp_norm")(x))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        bias = RelativePositionBias(bidirectional=True, name="relative_position")(x.shape[1], x.shape[1])
        for number in range(LAYERS):
            x = EncoderLayer(name=f"layer_{number}")(x, bias)
        return nn.RMSNorm(name="norm")(x)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x, memory):
        bias = RelativePositionBias(bidirectional=False, name="relative_position")(x.shape[1], x.shape[1])
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        bias = jnp.where(causal, bias, -1e9)
        for number in range(LAYERS):
            x = DecoderLayer(name=f"layer_{number}")(x, memory, bias)
        return nn.RMSNorm(name="norm")(x)


class T5(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        shared = nn.Embed(VOCABULARY, WIDTH, name="shared")
        memory = Encoder(name="encoder")(shared(source))
        x = Decoder(name="decoder")(shared(target), memory)
        return shared.attend(x / WIDTH**0.5)


def t5():
    model = T5()

    def loss(params, source, target):
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
        logits = model.apply({"params": params}, source, shifted)
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

    source, target = jax.ShapeDtypeStruct((8, 512), jnp.int32), jax.ShapeDtypeStruct((8, 128), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), source, target)["params"]
    return loss, (params, source, target), {"title": "T5-small, its training loss"}
