"""LeNet-5 with average pooling, in plain JAX: `jaxpar.models.lenet`."""

import jax
import jax.numpy as jnp

from jaxpar.models import lenet as model


def lenet():
    params = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((256, 28, 28, 1), jnp.float32)
    return model.apply, (params, images), {"title": "LeNet"}
