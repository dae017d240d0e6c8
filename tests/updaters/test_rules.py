"""What a checkpoint knows an optimizer by: its operations, where names of functions would not do."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import pallas

from jaxpar import updaters

PARAMS = {"b": jax.ShapeDtypeStruct((3,), jnp.float32), "w": jax.ShapeDtypeStruct((4, 3), jnp.float32)}


def rules(tx):
    specs, structure = jax.tree.flatten(PARAMS)
    return updaters._rule_of_each(updaters._TreeOptimizer(tx), structure, (0, 1), tuple(specs))


def by(fn):
    return optax.GradientTransformation(lambda params: (), lambda grads, state, params=None: (fn(grads, params), state))


def first(grads, params):
    return jax.tree.map(lambda g, p: -0.1 * (g + 0.5 * p), grads, params)


def renamed(grads, params):
    """The same in another order."""
    decays = jax.tree.map(lambda p: p * 0.5, params)
    return jax.tree.map(lambda g, d: (d + g) * -0.1, grads, decays)


def in_kernel(grads, params):
    """By Pallas, whose program has references to the results beside its operands."""

    def kernel(g, p, new):
        new[...] = -0.1 * (g[...] + 0.5 * p[...])

    of_one = lambda g, p: pallas.pallas_call(kernel, jax.ShapeDtypeStruct(g.shape, g.dtype), interpret=True)(g, p)  # noqa: E731
    return jax.tree.map(of_one, grads, params)


masks = [lambda params, n=n: jax.tree.map(lambda x: x.ndim == n, params) for n in (1, 2)]


@pytest.mark.parametrize(
    ("one", "other", "differences"),
    [
        (optax.adamw(0.1), optax.nadamw(0.1), {"rule"}),
        (optax.adamw(0.1, mask=masks[0]), optax.adamw(0.1, mask=masks[1]), {"rule"}),
        (optax.adamw(0.1, mask=masks[0]), optax.adamw(0.1), {"", "rule"}),  # of the matrix alone
        (by(first), by(renamed), {""}),
        (by(in_kernel), by(first), {"rule"}),
        (by(in_kernel), by(in_kernel), {""}),
        (optax.adam(0.1), optax.adam(0.1), {""}),
        (optax.adam(0.1), optax.adam(0.2), {"numbers"}),
        (optax.sgd(optax.linear_schedule(0.1, 0.0, 7)), optax.sgd(lambda count: 0.1), {"numbers"}),
    ],
)
def test_what_differs_in_two_optimizers(one, other, differences):
    pairs = zip(rules(one).values(), rules(other).values(), strict=True)
    assert {updaters._difference_of_rules(a, b) for a, b in pairs} == differences


def test_rules_of_other_versions_and_of_older_checkpoints_are_not_compared():
    rule, other = rules(optax.adam(0.1))[0], rules(optax.nadam(0.2))[0]
    assert updaters._difference_of_rules(rule, other) == "rule"
    for unknown in (None, "", other.replace("optax ", "optax 9.")):
        assert updaters._difference_of_rules(rule, unknown) == ""
    assert updaters._difference_of_rules(rule, rules(optax.adam(0.2))[0].partition(";")[0]) == ""  # without numbers
