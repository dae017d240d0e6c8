"""The matrix factorization of the article on MovieLens 100k: `jaxpar.models.matrix_factorization` and its loss."""

import jax
import jax.numpy as jnp

from jaxpar.models import matrix_factorization as model


def loss(params, user, item, score):
    return ((model.apply(params, user, item) - score) ** 2).mean()


def matrix_factorization():
    params = jax.eval_shape(lambda rng: model.init(rng, 943, 1682, 64), jax.random.key(0))
    ids, scores = jax.ShapeDtypeStruct((256,), jnp.int32), jax.ShapeDtypeStruct((256,), jnp.float32)
    return loss, (params, ids, ids, scores), {"title": "matrix factorization"}
