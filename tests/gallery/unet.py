"""The U-Net of Ho et al.'s diffusion model for CIFAR-10 in Flax Linen, and a sampler that runs it 1,000 times."""

import flax.linen as nn
import jax
import jax.numpy as jnp

CHANNELS, MULTIPLES, BLOCKS, ATTENTION_AT, STEPS = 128, (1, 2, 2, 2), 2, (16,), 1000
IMAGES = jax.ShapeDtypeStruct((16, 32, 32, 3), jnp.float32)


def time_embedding(time, width):
    frequencies = jnp.exp(-jnp.log(10_000.0) * jnp.arange(width // 2) / (width // 2 - 1))
    angles = time[:, None] * frequencies[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ResBlock(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x, time):
        y = nn.Conv(self.channels, (3, 3), name="conv1")(nn.silu(nn.GroupNorm(name="norm1")(x)))
        y = y + nn.Dense(self.channels, name="time")(nn.silu(time))[:, None, None, :]
        y = nn.Conv(self.channels, (3, 3), name="conv2")(nn.silu(nn.GroupNorm(name="norm2")(y)))
        if x.shape[-1] != self.channels:
            x = nn.Conv(self.channels, (1, 1), name="shortcut")(x)
        return x + y


class AttentionBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        batch, height, width, channels = x.shape
        y = nn.GroupNorm(name="norm")(x).reshape(batch, height * width, channels)
        q, k, v = (nn.Dense(channels, name=name)(y) for name in ("q", "k", "v"))
        weights = nn.softmax(jnp.einsum("bqc,bkc->bqk", q, k) / channels**0.5)
        y = nn.Dense(channels, name="out")(jnp.einsum("bqk,bkc->bqc", weights, v))
        return x + y.reshape(x.shape)


class Level(nn.Module):
    """Two or three residual blocks at one resolution, with attention where the image is small."""

    channels: int

    def block(self, x, time, number):
        x = ResBlock(self.channels, name=f"res{number}")(x, time)
        return AttentionBlock(name=f"attention{number}")(x) if x.shape[1] in ATTENTION_AT else x


class Down(Level):
    """Gives all that it computes: the way up reads it again."""

    last: bool

    @nn.compact
    def __call__(self, x, time):
        skips = []
        for number in range(BLOCKS):
            x = self.block(x, time, number)
            skips.append(x)
        if not self.last:
            x = nn.Conv(self.channels, (3, 3), (2, 2), name="downsample")(x)
            skips.append(x)
        return x, skips


class Middle(nn.Module):
    @nn.compact
    def __call__(self, x, time):
        x = ResBlock(x.shape[-1], name="res0")(x, time)
        x = AttentionBlock(name="attention")(x)
        return ResBlock(x.shape[-1], name="res1")(x, time)


class Up(Level):
    last: bool

    @nn.compact
    def __call__(self, x, time, skips):
        for number, skip in enumerate(skips):
            x = self.block(jnp.concatenate([x, skip], axis=-1), time, number)
        if not self.last:
            batch, height, width, channels = x.shape
            x = jax.image.resize(x, (batch, 2 * height, 2 * width, channels), "nearest")
            x = nn.Conv(channels, (3, 3), name="upsample")(x)
        return x


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x, time):
        time = nn.Dense(4 * CHANNELS, name="time1")(time_embedding(time, CHANNELS))
        time = nn.Dense(4 * CHANNELS, name="time2")(nn.silu(time))
        x = nn.Conv(CHANNELS, (3, 3), name="conv_in")(x)
        skips = [x]
        for level, multiple in enumerate(MULTIPLES):
            x, new = Down(multiple * CHANNELS, level + 1 == len(MULTIPLES), name=f"down{level}")(x, time)
            skips += new
        x = Middle(name="middle")(x, time)
        for level, multiple in reversed(list(enumerate(MULTIPLES))):
            own = [skips.pop() for _ in range(BLOCKS + 1)]
            x = Up(multiple * CHANNELS, level == 0, name=f"up{level}")(x, time, own)
        return nn.Conv(3, (3, 3), name="conv_out")(nn.silu(nn.GroupNorm(name="norm_out")(x)))


def unet():
    model, times = UNet(), jax.ShapeDtypeStruct((16,), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), IMAGES, times)
    return model.apply, (variables, IMAGES, times), {"title": "U-Net of a diffusion model"}


def sample(params, rng, steps=STEPS):
    """Images out of noise, by `steps` steps of denoising."""
    betas = jnp.linspace(1e-4, 0.02, STEPS)
    alphas_bar = jnp.cumprod(1 - betas)

    def denoise(carry, step):
        x, rng = carry
        rng, rng_noise = jax.random.split(rng)
        predicted = UNet().apply(params, x, jnp.full(x.shape[0], step))
        beta, alpha_bar = betas[step], alphas_bar[step]
        mean = (x - beta / jnp.sqrt(1 - alpha_bar) * predicted) / jnp.sqrt(1 - beta)
        noise = jax.random.normal(rng_noise, x.shape) * (step > 0)
        return (mean + jnp.sqrt(beta) * noise, rng), None

    rng, rng_start = jax.random.split(rng)
    start = jax.random.normal(rng_start, IMAGES.shape)
    (x, _), _ = jax.lax.scan(denoise, (start, rng), jnp.arange(steps)[::-1])
    return jnp.clip(x, -1, 1)


def diffusion_sampler():
    times = jax.ShapeDtypeStruct((16,), jnp.int32)
    params = jax.eval_shape(UNet().init, jax.random.key(0), IMAGES, times)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    return sample, (params, rng), {"title": "a diffusion sampler"}
