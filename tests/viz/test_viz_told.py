"""The frames of modules are guessed from Python's stacks. Here the modules tell: both must agree on every layer."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from viz_models import Spec, f32

from jaxpar import viz

eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
pytestmark = pytest.mark.others
BASES = (nnx.Module, eqx.Module)
RNGS, KEY = nnx.Rngs(0), jax.random.key(0)


def children(module):
    """The modules directly inside of a module, with their names: "norm", "blocks.0"."""
    pairs = []
    for name, value in vars(module).items():
        if isinstance(value, (list, tuple, nnx.List)):
            pairs += [(f"{name}.{at}", item) for at, item in enumerate(value)]
        else:
            pairs.append((name, value))
    return [(name, value) for name, value in pairs if isinstance(value, BASES)]


def classes(module):
    """The classes of a module and of those in it, and the classes that they are made of."""
    own = {kind for kind in type(module).__mro__ if issubclass(kind, BASES) and kind not in BASES}
    return own.union(*(classes(child) for _, child in children(module)))


@contextlib.contextmanager
def telling(module):
    """While this lasts, each call of a module inside of this one is in a scope that is named like its attribute."""
    names, alive = {}, []  # of modules by their ids, which another one would get

    def told(call):
        @functools.wraps(call)
        def named(module, *args, **kwargs):
            alive.append(module)
            names.update((id(child), name) for name, child in children(module))
            around = jax.named_scope(names[id(module)]) if id(module) in names else contextlib.nullcontext()
            with around:
                return call(module, *args, **kwargs)

        return named

    before = {kind: kind.__call__ for kind in classes(module) if "__call__" in vars(kind)}
    for kind, call in before.items():
        type.__setattr__(kind, "__call__", told(call))
    try:
        yield
    finally:
        for kind, call in before.items():
            type.__setattr__(kind, "__call__", call)


class MLP(nnx.Module):
    def __init__(self, width):
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=RNGS), nnx.Linear(4 * width, width, rngs=RNGS)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    def __init__(self):
        self.norm, self.mlp = nnx.LayerNorm(16, rngs=RNGS), MLP(16)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=RNGS)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Transformer(nnx.Module):
    def __init__(self):
        self.stem, self.head = nnx.Linear(8, 16, rngs=RNGS), nnx.Linear(16, 4, rngs=RNGS)
        self.blocks = nnx.List([Block() for _ in range(3)])

    def __call__(self, x):
        x = jnp.tanh(self.stem(x)) * 2
        for block in self.blocks:
            x = jnp.sin(block(x))  # outside of the block
        return self.head(nnx.relu(x)).mean(1)


class Again(nnx.Module):
    """Two modules, called in turns."""

    def __init__(self):
        self.a, self.b = MLP(8), MLP(8)

    def __call__(self, x):
        y = self.a(jnp.tanh(self.b(self.a(x))))
        return jnp.exp(self.b(y)) + self.a(x)


class Residual(nnx.Module):
    def __init__(self, shortcut):
        self.conv1, self.conv2 = (nnx.Conv(4, 4, (3, 3), rngs=RNGS) for _ in range(2))
        self.norm1, self.norm2 = (nnx.BatchNorm(4, rngs=RNGS) for _ in range(2))
        self.shortcut = nnx.Conv(4, 4, (1, 1), rngs=RNGS) if shortcut else None

    def __call__(self, x):
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class UNet(nnx.Module):
    def __init__(self):
        self.down = nnx.List([Residual(at % 2) for at in range(3)])
        self.up = nnx.List([Residual(True) for _ in range(3)])
        self.join = nnx.List([nnx.Conv(8, 4, (1, 1), rngs=RNGS) for _ in range(3)])
        self.middle, self.out = Residual(False), nnx.Conv(4, 1, (1, 1), rngs=RNGS)

    def __call__(self, x):
        kept = []
        for block in self.down:
            kept.append(x := block(x))
            x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = self.middle(x)
        for block, join in zip(self.up, self.join, strict=True):
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = block(nnx.relu(join(jnp.concatenate([x, kept.pop()], -1))))
        return nnx.sigmoid(self.out(x))


class Experts(nnx.Module):
    def __init__(self):
        self.gate, self.shared = nnx.Linear(8, 4, rngs=RNGS), MLP(8)
        self.experts = nnx.List([MLP(8) for _ in range(4)])

    def __call__(self, x):
        shares = nnx.softmax(self.gate(x))
        return sum(shares[..., at : at + 1] * each(x) for at, each in enumerate(self.experts)) + self.shared(x)


class Recurrent(nnx.Module):
    def __init__(self):
        self.cell, self.out = nnx.GRUCell(8, 8, rngs=RNGS), nnx.Linear(8, 8, rngs=RNGS)

    def __call__(self, x):
        h = jnp.zeros((x.shape[0], 8))
        for at in range(3):
            h, y = self.cell(h, x[:, at])
            h = h + jnp.tanh(self.out(y))
        return h


class Mixer(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    drop: eqx.nn.Dropout

    def __init__(self):
        self.first, self.second = eqx.nn.Linear(8, 8, key=KEY), eqx.nn.Linear(8, 8, key=KEY)
        self.norm, self.drop = eqx.nn.LayerNorm(8), eqx.nn.Dropout(inference=True)

    def __call__(self, x):
        return x + self.second(self.drop(jax.nn.gelu(self.first(self.norm(x)))))


class Mixers(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mixers: list
    head: eqx.nn.MLP

    def __init__(self):
        self.attention, self.mixers = eqx.nn.MultiheadAttention(2, 8, key=KEY), [Mixer() for _ in range(3)]
        self.head = eqx.nn.MLP(8, 2, 16, 2, key=KEY)

    def __call__(self, x):
        x = self.attention(x, x, x)
        for mixer in self.mixers:
            x = jax.vmap(mixer)(x)
        return self.head(jnp.sin(x).mean(0))


def gradient(model, *inputs):
    grad = nnx.grad if isinstance(model, nnx.Module) else eqx.filter_grad
    return grad(lambda model: (model(*inputs) ** 2).sum())(model)


@pytest.mark.parametrize("fn", [lambda model, *inputs: model(*inputs), gradient], ids=["forward", "gradient"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Transformer, (2, 5, 8)),
        (Again, (2, 8)),
        (UNet, (1, 16, 16, 4)),
        (Experts, (3, 8)),
        (Recurrent, (2, 3, 8)),
        (Mixers, (5, 8)),
    ],
)
def test_the_frames_are_those_that_modules_tell(make, shape, fn):
    def layers():
        jax.clear_caches()  # a layer of before has the scopes of before
        graph = viz.trace(fn, model, Spec(shape, f32), repeats=False, max_nodes=None)
        return [(node.op, node.name, node.scope) for node in graph.layers]

    model = make()
    guessed = layers()
    with telling(model):
        told = layers()
    assert guessed == told
    assert max(len(scope) for _, _, scope in told) > 0
