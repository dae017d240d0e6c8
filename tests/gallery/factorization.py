"""The matrix factorization of MXNet's article on MovieLens 100k, with its loss."""

import jax
import jax.numpy as jnp

USERS, ITEMS, FACTORS = 943, 1682, 64


def init(rng):
    rng_user, rng_item = jax.random.split(rng)
    return {
        "user": 0.1 * jax.random.normal(rng_user, (USERS, FACTORS)),
        "item": 0.1 * jax.random.normal(rng_item, (ITEMS, FACTORS)),
    }


def predict(params, user_B, item_B):
    user_BxK = params["user"][user_B]
    item_BxK = params["item"][item_B]
    return (user_BxK * item_BxK).sum(-1)


def loss(params, user, item, score):
    return ((predict(params, user, item) - score) ** 2).mean()


def matrix_factorization():
    params = jax.eval_shape(init, jax.random.key(0))
    ids, scores = jax.ShapeDtypeStruct((256,), jnp.int32), jax.ShapeDtypeStruct((256,), jnp.float32)
    return loss, (params, ids, ids, scores), {"title": "matrix factorization"}
