"""ResNet-50 with batch norm in train mode: Haiku's own."""

import haiku as hk
import jax
import jax.numpy as jnp


def net(images):
    return hk.nets.ResNet50(1000)(images, is_training=True)


def resnet50_haiku():
    model = hk.without_apply_rng(hk.transform_with_state(net))
    images = jax.ShapeDtypeStruct((32, 224, 224, 3), jnp.float32)
    params, state = jax.eval_shape(model.init, jax.random.key(0), images)
    return model.apply, (params, state, images), {"title": "ResNet-50 (Haiku)"}
