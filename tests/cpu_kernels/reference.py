"""Convolutions of any kind and both gradients in float64, place by place of the window. And random ones."""

import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from cpu_model import same
from jax import lax
from launched import python

from jaxpar import models


def missing():
    """Why the kernels cannot be tested here, or None."""
    if importlib.util.find_spec("jaxpar_cpu") is None:
        return "jaxpar-cpu is not installed: pip install ./cpu"
    import jaxpar_cpu

    return jaxpar_cpu.why_not()


def reference(x, w, dy, strides, padding, between, dilation, groups):
    """y, dx and dw, of N x spatial x C and window x C/groups x O, and of the cotangent of y. Without it, y alone."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    axes = range(1, x.ndim - 1)
    spread = np.zeros((len(x), *((n - 1) * b + 1 for n, b in zip(x.shape[1:-1], between, strict=True)), x.shape[-1]))
    gaps = (slice(None), *(slice(None, None, b) for b in between))
    spread[gaps] = x
    around = [(0, 0), *((max(low, 0), max(high, 0)) for low, high in padding), (0, 0)]
    wide = np.pad(spread, around)
    first = [max(-low, 0) for low, _ in padding]
    last = [wide.shape[axis] - max(-high, 0) for axis, (_, high) in zip(axes, padding, strict=True)]
    results = [
        (end - start - (n - 1) * d - 1) // s + 1
        for start, end, n, d, s in zip(first, last, w.shape[:-2], dilation, strides, strict=True)
    ]
    grouped = w.reshape(*w.shape[:-1], groups, -1)  # window, c, g, o
    y = np.zeros((len(x), *results, groups, grouped.shape[-1]))
    dwide, dw = np.zeros(wide.shape), np.zeros(grouped.shape)
    for place in np.ndindex(*w.shape[:-2]):
        at = (slice(None), *(
            slice(start + k * d, start + k * d + (n - 1) * s + 1, s)
            for start, k, d, n, s in zip(first, place, dilation, results, strides, strict=True)
        ))  # fmt: skip
        view = wide[at].reshape(*y.shape[:-1], -1)
        y += np.einsum("...gc,cgo->...go", view, grouped[place])
        if dy is not None:
            of_groups = np.asarray(dy, np.float64).reshape(y.shape)
            dwide[at] += np.einsum("...go,cgo->...gc", of_groups, grouped[place]).reshape(*y.shape[:-2], -1)
            a, b = view.reshape(-1, *view.shape[-2:]), of_groups.reshape(-1, *y.shape[-2:])
            dw[place] = np.einsum("ngc,ngo->cgo", a, b)
    y = y.reshape(*y.shape[:-2], -1)
    if dy is None:
        return y
    inner = tuple(slice(low, low + n) for (low, _), n in zip(around, spread.shape, strict=True))
    return y, dwide[inner][gaps], dw.reshape(w.shape)


class Case:
    """A convolution of random sizes.

    Attributes:
        x, w, dy: N x spatial x C, window x C/groups x O and the cotangent, float32.
        geometry: strides, padding, between, dilation, groups.
    """

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        axes = int(rng.choice([1, 2, 2, 2, 3]))
        groups = int(rng.choice([1, 1, 1, 2, 3, 8, 20]))
        depthwise = groups > 1 and rng.random() < 0.5
        inner, outer = (1, 1) if depthwise else rng.choice([1, 2, 3, 5, 16, 33, 40, 70, 300 // groups], 2, p=_OFTEN)
        while True:
            window = rng.integers(1, 6, axes)
            images = rng.integers(1, 40 if axes == 1 else 14 if axes == 2 else 8, axes)
            strides, dilation, between = (rng.choice([1, 1, 1, 2, 3], axes).tolist() for _ in range(3))
            padding = [tuple(pair) for pair in rng.integers(-1, 4, (axes, 2)).tolist()]
            if rng.random() < 0.5:
                strides, dilation, between = [1] * axes, [1] * axes, [1] * axes
            wide = [(n - 1) * b + 1 + sum(pad) for n, b, pad in zip(images, between, padding, strict=True)]
            covered = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
            if all(a >= b for a, b in zip(wide, covered, strict=True)):
                break
        self.geometry = (strides, padding, between, dilation, groups)
        examples = int(rng.choice([1, 2, 5, 17]))
        self.x = rng.standard_normal((examples, *images, groups * inner), np.float32)
        self.w = rng.standard_normal((*window, inner, groups * outer), np.float32)
        self.w /= np.float32(math.sqrt(math.prod(window) * inner))
        self.dy = rng.standard_normal(reference(self.x, self.w, None, *self.geometry).shape, np.float32)
        names = "DHW"[:axes]
        self.layouts = [f"N{names}C", f"{names}IO", f"N{names}C"]
        self.moved = [
            "".join(rng.permutation(list(layout))) if rng.random() < 0.3 else layout for layout in self.layouts
        ]
        spatial = iter(names)  # lax counts spatial axes as the filter has them
        self.moved[1] = re.sub(f"[{names}]", lambda _: next(spatial), self.moved[1])

    def results(self, convolution):
        """y, dx and dw as a function of x, w and dy, in the case's layouts."""
        strides, padding, between, dilation, groups = self.geometry

        def conv(x, w):
            x, w = (
                _moved(a, *names) for a, names in zip((x, w), zip(self.layouts, self.moved, strict=True), strict=False)
            )
            y = convolution(
                x, w, strides, padding, between, dilation, dimension_numbers=tuple(self.moved),
                feature_group_count=groups,
            )  # fmt: skip
            return _moved(y, self.moved[2], self.layouts[2])

        def all_three(x, w, dy):
            y, back = jax.vjp(conv, x, w)
            return y, *back(dy)

        return all_three

    def __repr__(self):
        return f"{self.x.shape} {self.w.shape} {self.geometry} {self.moved}"


_OFTEN = [0.1, 0.1, 0.15, 0.1, 0.2, 0.1, 0.1, 0.1, 0.05]


def _moved(x, before, after):
    return jnp.transpose(x, [before.index(axis) for axis in after])


def of_lax(case):
    return jax.jit(case.results(lax.conv_general_dilated))(case.x, case.w, case.dy)


def ours(case):
    # Of what is left to XLA one case takes minutes without optimization, which tests/conftest.py turns off.
    run = jax.jit(case.results(models.conv_general_dilated), compiler_options={"xla_backend_optimization_level": 1})
    return run(case.x, case.w, case.dy)


def same_where_not_finite(found, true):
    """NaN and infinities are in the same places."""
    same(np.isnan(found), np.isnan(true))
    same(np.where(np.isinf(found), found, 0), np.where(np.isinf(true), true, 0))


def check_it_does_not_hang(run, *args):
    first = jax.block_until_ready(run(*args))
    for _ in range(1000):
        same(jax.block_until_ready(run(*args)), first)


def _scanned(f):
    return lambda w, x: lax.scan(lambda total, part: (total + f(w, part), None), 0.0, jnp.stack([x, 2 * x]))[0]


def _ones(*trees):
    return jax.tree.map(jnp.ones_like, trees)


def _squares(f):
    return lambda w, x: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(f, (0, 1))(w, x)))


# What a function of (params, x) with a scalar result may be in.
TRANSFORMS = {
    "jit": lambda f: f,
    "gradient": lambda f: jax.value_and_grad(f, (0, 1)),
    "remat": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "scan": lambda f: jax.grad(_scanned(f), (0, 1)),
    "branches": lambda f: jax.grad(lambda w, x: lax.cond(x.sum() > 1e9, lambda: 0.0, lambda: f(w, x))),
    "forward mode": lambda f: lambda w, x: jax.jvp(f, (w, x), _ones(w, x)),
    "hessian times vector": lambda f: lambda w, x: jax.jvp(jax.grad(f), (w, x), _ones(w, x)),
    "gradient of gradient": lambda f: jax.grad(_squares(f), (0, 1)),
}


def error(found, true):
    """Root mean square, relative."""
    return float(np.sqrt(np.mean((np.asarray(found, np.float64) - true) ** 2) / max(np.mean(true**2), 1e-30)))


def digests(program, devices):
    """What a program prints, each line once. It runs in a process of its own."""
    return {*python("-c", program, timeout=300, JAX_NUM_CPU_DEVICES=devices).stdout.splitlines()}


# What a program begins with, and its devices.
ELSEWHERE = [("", "4"), ("import os; os.sched_setaffinity(0, [0])", "1")]
