"""Whether an optimizer with one state for each key would compute something else than optax for all params together."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType
from optax import contrib

from jaxpar import kv, updaters

CLIP = optax.clip_by_global_norm(1.0)


def of_updates(fn):
    return optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (fn(updates), state))


def by_params(updates, state, params=None):
    return jax.tree.map(lambda u: u / (1 + optax.tree.norm(params)), updates), state


def in_one_vector(updates):
    flat, unravel = ravel_pytree(updates)
    return unravel(0.5 * flat)


def shown(updates):
    jax.debug.print("{}", optax.tree.norm(updates))
    return updates


COUPLED = {
    "clipping": CLIP,
    "injected": optax.inject_hyperparams(optax.clip_by_global_norm)(1.0),
    "a limit that few gradients reach": of_updates(
        lambda us: jax.tree.map(lambda u: u * (optax.tree.norm(us) < 3), us)
    ),
    "in a later step": optax.MultiSteps(optax.chain(CLIP, optax.sgd(0.1)), 3),
    "skipped together": optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite),
    "after a step": optax.conditionally_transform(CLIP, lambda step: step > 1),
    "finite together": optax.apply_if_finite(optax.sgd(0.1), 2),
    "by the state": contrib.dadapt_adamw(),
    "by the params": optax.GradientTransformation(lambda params: (), by_params),
    "sam": contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05))),
}
APART = {
    **{name: getattr(optax, name)(0.1) for name in "sgd adam lamb adafactor novograd rprop sm3".split()},
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "lookahead": optax.lookahead(optax.sgd(0.1), 2, 0.5),
    "labels": optax.multi_transform({"a": optax.adam(0.1)}, lambda params: jax.tree.map(lambda _: "a", params)),
    "muon": contrib.muon(0.1),
    "flatten": optax.flatten(optax.adam(0.1)),
    "in one vector": of_updates(in_one_vector),
    "behind a barrier": of_updates(jax.lax.optimization_barrier),
    "shown": of_updates(shown),
    "it cannot be traced": of_updates(lambda updates: [u for u in updates if float(u.sum()) > 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*COUPLED, *APART])
def test_what_couples_keys(name):
    assert updaters._couples_keys({**COUPLED, **APART}[name]) == (name in COUPLED)


@pytest.mark.parametrize("name", ["clipping", "in one vector"])
def test_under_a_mesh_of_the_user_and_within_jit(name):
    tx = {**COUPLED, **APART}[name]
    tx = optax.chain(tx)  # not the one whose answer is kept
    found = []
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))):
        jax.eval_shape(lambda x: found.append(updaters._couples_keys(tx)), jnp.ones(3))
    assert found == [name in COUPLED]


def test_each_key_by_itself_where_that_is_said():
    store = kv.init(kv.create(), [0, 1], [jnp.zeros(2), jnp.zeros(2)])
    store = kv.push(kv.set_optimizer(store, updaters.from_optax(CLIP)), 0, jnp.array([3.0, 4.0]))
    assert kv.pull(store, [0, 1])[0].tolist() == pytest.approx([0.6, 0.8])
