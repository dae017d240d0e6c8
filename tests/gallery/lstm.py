"""The language model of Zaremba et al. (medium): two LSTMs over 35 words, written by hand, with Haiku and with Flax."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp

VOCABULARY, WIDTH, LAYERS = 10_000, 650, 2
TOKENS = jax.ShapeDtypeStruct((20, 35), jnp.int32)


def init():
    cell = {"w": jnp.zeros((2 * WIDTH, 4 * WIDTH)), "b": jnp.zeros(4 * WIDTH)}
    return {
        "embedding": jnp.zeros((VOCABULARY, WIDTH)),
        "lstm": [cell] * LAYERS,
        "out": {"w": jnp.zeros((WIDTH, VOCABULARY)), "b": jnp.zeros(VOCABULARY)},
    }


def lstm_cell(params, state, x):
    hidden, cell = state
    gates = jnp.concatenate([x, hidden], axis=-1) @ params["w"] + params["b"]
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (hidden, cell), hidden


def apply(params, tokens_BxT):
    x_TxBxD = params["embedding"][tokens_BxT.T]
    zeros = jnp.zeros((tokens_BxT.shape[0], WIDTH))
    for cell_params in params["lstm"]:
        _, x_TxBxD = jax.lax.scan(lambda state, x, p=cell_params: lstm_cell(p, state, x), (zeros, zeros), x_TxBxD)
    return x_TxBxD @ params["out"]["w"] + params["out"]["b"]


def lstm():
    return apply, (jax.eval_shape(init), TOKENS), {"title": "LSTM"}


def haiku_net(tokens):
    x = hk.Embed(VOCABULARY, WIDTH)(tokens)
    core = hk.DeepRNN([hk.LSTM(WIDTH), hk.LSTM(WIDTH)])
    x, _ = hk.dynamic_unroll(core, x, core.initial_state(tokens.shape[0]), time_major=False)
    return hk.Linear(VOCABULARY)(x)


def lstm_haiku():
    model = hk.without_apply_rng(hk.transform(haiku_net))
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    return model.apply, (params, TOKENS), {"title": "LSTM (Haiku)"}


class FlaxNet(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        for number in range(LAYERS):
            x = nn.RNN(nn.OptimizedLSTMCell(WIDTH), name=f"lstm{number}")(x)
        return nn.Dense(VOCABULARY)(x)


def lstm_flax():
    model = FlaxNet()
    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    return model.apply, (variables, TOKENS), {"title": "LSTM (Flax)"}
