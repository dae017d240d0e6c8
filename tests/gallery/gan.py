"""The two steps of Radford et al.'s DCGAN in Flax Linen: one of the generator, one of the discriminator, with Adam."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

BATCH, LATENT, CHANNELS = 128, 100, 64
TX = optax.adam(2e-4, b1=0.5)
norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9)


class Generator(nn.Module):
    @nn.compact
    def __call__(self, latent):
        conv = partial(nn.ConvTranspose, kernel_size=(4, 4), strides=(2, 2), use_bias=False)
        x = latent[:, None, None, :]
        x = conv(8 * CHANNELS, strides=(1, 1), padding="VALID", name="conv0")(x)
        x = nn.relu(norm(name="norm0")(x))
        for number, multiple in enumerate((4, 2, 1), 1):
            x = conv(multiple * CHANNELS, name=f"conv{number}")(x)
            x = nn.relu(norm(name=f"norm{number}")(x))
        return jnp.tanh(conv(3, name="conv4")(x))


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, images):
        conv = partial(nn.Conv, kernel_size=(4, 4), strides=(2, 2), use_bias=False)
        x = nn.leaky_relu(conv(CHANNELS, name="conv0")(images), 0.2)
        for number, multiple in enumerate((2, 4, 8), 1):
            x = conv(multiple * CHANNELS, name=f"conv{number}")(x)
            x = nn.leaky_relu(norm(name=f"norm{number}")(x), 0.2)
        return conv(1, strides=(1, 1), padding="VALID", name="conv4")(x)[:, 0, 0, 0]


def run(model, params, stats, x):
    """The output of a model in train mode, and its new batch statistics."""
    out, updates = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
    return out, updates["batch_stats"]


def bce(logits, label):
    return optax.sigmoid_binary_cross_entropy(logits, jnp.full_like(logits, label)).mean()


def update(state, grads, stats):
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "batch_stats": stats, "opt_state": opt_state}


def generator_step(generator, discriminator, latent):
    """The generator learns to be taken for real."""

    def loss_fn(params):
        fake, stats = run(Generator(), params, generator["batch_stats"], latent)
        logits, _ = run(Discriminator(), discriminator["params"], discriminator["batch_stats"], fake)
        return bce(logits, 1.0), stats

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(generator["params"])
    return update(generator, grads, stats), loss


def discriminator_step(discriminator, generator, images, latent):
    """The discriminator learns to tell real images from generated ones."""
    fake, _ = run(Generator(), generator["params"], generator["batch_stats"], latent)
    fake = jax.lax.stop_gradient(fake)

    def loss_fn(params):
        real_logits, stats = run(Discriminator(), params, discriminator["batch_stats"], images)
        fake_logits, stats = run(Discriminator(), params, stats, fake)
        return bce(real_logits, 1.0) + bce(fake_logits, 0.0), stats

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(discriminator["params"])
    return update(discriminator, grads, stats), loss


def init_state(model, rng, x):
    variables = model.init(rng, x)
    return {**variables, "opt_state": TX.init(variables["params"])}


def specs():
    latent = jax.ShapeDtypeStruct((BATCH, LATENT), jnp.float32)
    images = jax.ShapeDtypeStruct((BATCH, 64, 64, 3), jnp.float32)
    rng = jax.random.key(0)
    generator = jax.eval_shape(partial(init_state, Generator()), rng, latent)
    return generator, jax.eval_shape(partial(init_state, Discriminator()), rng, images), latent, images


def gan_generator():
    generator, discriminator, latent, _ = specs()
    options = {"params_argnums": (0, 1), "title": "DCGAN, the generator's step"}
    return generator_step, (generator, discriminator, latent), options


def gan_discriminator():
    generator, discriminator, latent, images = specs()
    options = {"params_argnums": (0, 1), "title": "DCGAN, the discriminator's step"}
    return discriminator_step, (discriminator, generator, images, latent), options
