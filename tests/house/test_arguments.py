"""Wrong arguments, by position and by name: the words are the same, and name the call and the argument."""

import inspect

import jax.numpy as jnp
import pytest

from jaxpar import kv, sparse, train

STORE = kv.init(kv.create(), 3, jnp.zeros(2))
STEP = train.make_train_step(lambda params, batch, rng: (jnp.zeros(()), {}))
CALLS = {
    "push": (kv.push, {"store": None, "key": 3, "value": jnp.ones(2)}, "kv.push: store must be a KVStore, got None"),
    "names": (kv.names, {"store": None}, "kv.names: store must be a KVStore, got None"),
    "step": (STEP, {"state": None, "batch": {}}, "train step: expected a state"),
    "rows": (sparse.coalesce, {"rows": jnp.ones(2)}, "coalesce: rows must be a RowSparse, got float32"),
    "list": (sparse.add, {"rows": [None]}, "add: rows must be a list, each of it a RowSparse"),
    "huge": (kv.push, {"store": STORE, "key": 10**5000, "value": jnp.ones(2)}, "key"),
    "mixed keys": (kv.from_params, {"params": {1: jnp.ones(2), "a": jnp.ones(2)}}, "params must have keys of one type"),
    "shapes": (train.accuracy, {"logits": jnp.ones(()), "labels": jnp.ones(2, int)}, "accuracy"),
}


@pytest.mark.parametrize("what", CALLS)
def test_keywords_and_positions_are_checked_alike(what):
    fn, arguments, words = CALLS[what]
    said = []
    for args, kwargs in (((), arguments), (arguments.values(), {})):
        with pytest.raises((TypeError, ValueError)) as caught:
            fn(*args, **kwargs)
        said.append(str(caught.value))
    assert words in said[0]
    assert said[0] == said[1]


def test_an_array_that_was_deleted_is_named():
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(RuntimeError, match=r"sparse\.value_and_grad|from_dense: array: this float32\[2\] was deleted"):
        sparse.from_dense(gone)


def test_the_words_of_a_function_of_the_user_stay():
    def loss_fn(params, batch, rng):
        raise ValueError("mine")

    step = train.make_train_step(loss_fn)
    state = train.create_state(kv.from_params({"w": jnp.ones(2)}), 0)
    with pytest.raises(ValueError, match=r"^mine\n?"):
        step(state=state, batch={"x": jnp.ones(8)})


def test_signatures_stay_as_they_are_written():
    assert list(inspect.signature(kv.push).parameters) == ["store", "key", "value", "axis_name"]
    assert list(inspect.signature(train.Mean).parameters) == ["total", "weight", "finish", "columns"]
    assert "store: any store" in inspect.getdoc(kv.names)
