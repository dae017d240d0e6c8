"""What `updaters` refuses: the error, the call, and the names and values that its message must have, in this order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import kv, sparse, updaters

PARAMS = {"b": jnp.ones(2), "w": jnp.ones((2, 2))}
SCHEDULED = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(1.0, 0.0, 10))


def with_rate(rate):
    """A store whose optimizer has its rate in its state gets this one."""
    store = kv.from_params(PARAMS, optimizer=optax.inject_hyperparams(optax.sgd)(0.1))
    return lambda: updaters.set_learning_rate(store, rate)


def store(optimizer=None, value=None, **options):
    made = kv.init(kv.create(**options), 3, jnp.ones(2) if value is None else value)
    return made if optimizer is None else kv.set_optimizer(made, optimizer)


def by_python(count):
    return 0.1 if count < 100 else 0.01


def push_rows():
    held = store(updaters.mxnet_adagrad(0.1, wd=0.1), jnp.ones((4, 2)))
    kv.push(held, 3, sparse.RowSparse(np.array([1]), np.ones((1, 2), np.float32), (4, 2)))


T, V = TypeError, ValueError
REFUSED = {
    # Rates that are set.
    "a rate that is no number": (V, with_rate(float("nan")), ["learning_rate", "finite", "nan"]),
    "a rate without end": (V, with_rate(np.float32("inf")), ["learning_rate", "finite", "inf"]),
    "two rates": (V, with_rate(np.array([0.1, 0.2])), ["learning_rate", "one number", "(2,)"]),
    "a rate with an axis": (V, with_rate(jnp.ones(1)), ["learning_rate", "one number", "(1,)"]),
    "a state of optax without a rate": (
        V,
        lambda: updaters.set_learning_rate(optax.adam(0.1).init(PARAMS), 0.25),
        ["no learning rate", "rate_in_state=True", "inject_hyperparams"],
    ),
    "a tree without a rate": (
        V,
        lambda: updaters.set_learning_rate({"params": {"learning_rate": jnp.ones(2)}}, 0.25),
        ["no learning rate", "rate_in_state=True", "inject_hyperparams"],
    ),
    "a rate of a schedule": (
        V,
        lambda: updaters.set_learning_rate(kv.from_params(PARAMS, optimizer=SCHEDULED), 0.25),
        ["schedule", "inject_hyperparams"],
    ),
    # Optimizers and updaters of a store.
    "an optimizer that couples keys": (
        V,
        lambda: store(optax.clip_by_global_norm(1.0)),
        ["kv.set_optimizer", "updaters.from_optax(tx)"],
    ),
    "integers": (T, lambda: store(updaters.mxnet_sgd(0.1), jnp.ones(2, jnp.int32)), ["key 3", "int32"]),
    "labels of other params": (
        V,
        lambda: kv.from_params(PARAMS, optimizer=optax.multi_transform({"a": optax.sgd(0.1)}, {"b": "a", "v": "a"})),
        ["optimizer", "labels", "frozen="],
    ),
    "an updater in a chain": (
        T,
        lambda: kv.from_params(PARAMS, optimizer=optax.chain(updaters.mxnet_sgd(0.1), optax.sgd(0.1))),
        ["mxnet_sgd", "optimizer="],
    ),
    "a decay of 1": (V, lambda: updaters.average_params(1.0), ["average_params", "decay", "1.0"]),
    # Those of MXNet.
    "a schedule that tests its count": (
        T,
        lambda: jax.jit(lambda s: kv.push(s, 3, jnp.ones(2)))(store(updaters.mxnet_sgd(by_python))),
        ["mxnet_sgd", "by_python", "jnp.where"],
    ),
    "no clipping in MXNet's words": (
        V,
        lambda: updaters.mxnet_adagrad(0.1, clip_gradient=0),
        ["mxnet_adagrad", "clip_gradient", "None", "got 0"],
    ),
    "two names of one argument": (T, lambda: updaters.mxnet_adam(0.1, eps=1e-3, epsilon=1e-3), ["mxnet_adam"]),
    "an unknown argument": (T, lambda: updaters.mxnet_sgd(0.1, momentun=0.9), ["mxnet_sgd", "'momentun'", "momentum"]),
    "rows for an optimizer of whole values": (V, push_rows, ["key 3", "RowSparse", "wd_mult={3: 0}"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    error, call, content = REFUSED[case]
    with pytest.raises(error, match=".*".join(map(re.escape, content))):
        call()
