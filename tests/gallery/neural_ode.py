"""A neural ODE of Chen et al. for MNIST: 20 steps of the Runge-Kutta method between convolutions and a layer."""

import jax
import jax.numpy as jnp

CHANNELS, STEPS = 64, 20


def init():
    def conv(inputs, outputs):
        return {"w": jnp.zeros((3, 3, inputs, outputs)), "b": jnp.zeros(outputs)}

    return {
        "stem": conv(1, CHANNELS),
        "downsample": conv(CHANNELS, CHANNELS),
        "dynamics": {"conv1": conv(CHANNELS + 1, CHANNELS), "conv2": conv(CHANNELS + 1, CHANNELS)},
        "out": {"w": jnp.zeros((CHANNELS, 10)), "b": jnp.zeros(10)},
    }


def conv2d(params, x, stride=1):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return (
        jax.lax.conv_general_dilated(x, params["w"], (stride, stride), "SAME", dimension_numbers=dimensions)
        + params["b"]
    )


def dynamics(params, y, t):
    """dy/dt: two convolutions that see the time as one more channel."""
    time = jnp.full((*y.shape[:-1], 1), t)
    y = jnp.tanh(conv2d(params["conv1"], jnp.concatenate([y, time], axis=-1)))
    return jnp.tanh(conv2d(params["conv2"], jnp.concatenate([y, time], axis=-1)))


def rk4_step(f, y, t, dt):
    k1 = f(y, t)
    k2 = f(y + dt / 2 * k1, t + dt / 2)
    k3 = f(y + dt / 2 * k2, t + dt / 2)
    k4 = f(y + dt * k3, t + dt)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def odeint(f, y, t0, t1, steps):
    dt = (t1 - t0) / steps
    return jax.lax.fori_loop(0, steps, lambda i, y: rk4_step(f, y, t0 + i * dt, dt), y)


def apply(params, images):
    y = jax.nn.relu(conv2d(params["stem"], images, 2))
    y = jax.nn.relu(conv2d(params["downsample"], y, 2))
    y = odeint(lambda y, t: dynamics(params["dynamics"], y, t), y, 0.0, 1.0, STEPS)
    return y.mean((1, 2)) @ params["out"]["w"] + params["out"]["b"]


def neural_ode():
    images = jax.ShapeDtypeStruct((128, 28, 28, 1), jnp.float32)
    return apply, (jax.eval_shape(init), images), {"title": "a neural ODE"}
