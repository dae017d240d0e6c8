"""Arrays that say more than their numbers, as those of NumPy with a mask, are refused where values come in."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_model import squares

from jaxpar import checkpoint, data, kv, parallel, sparse, train

STORE = kv.init(kv.create(), 3, jnp.zeros(3))
STEP = train.make_train_step(squares)


def stepped(x):
    store = kv.from_params({"w": jnp.ones(3), "b": jnp.zeros(())}, optimizer=optax.sgd(0.1))
    return STEP(train.create_state(store, 0), {"x": np.ones((8, 3), np.float32), "y": x[:, 0]})


def with_model_state(x):
    return train.create_state(kv.from_params({"w": jnp.ones(3)}), 0, model_state={"a": x})


# What takes an array of (8, 3), and what its message names.
TAKERS = {
    "kv.init: value of key 4": lambda x: kv.init(STORE, 4, x),
    "kv.init: value of key 5": lambda x: kv.init(STORE, [4, 5], [jnp.ones(2), [x]]),
    "kv.push: value for key 3": lambda x: kv.push(STORE, 3, [jnp.ones(3), x[0]]),
    "leaf 'a/0' of params": lambda x: kv.from_params({"a": [x]}),
    "allreduce: value 0": lambda x: parallel.allreduce([x]),
    "leaf 'a'": lambda x: checkpoint.save("never", {"a": x}),
    r"train step: batch\['y'\]": stepped,
    r"create_state: model_state\['a'\]": with_model_state,
    "Dataset: images": lambda x: data.Dataset(x, np.arange(8)),
    "Dataset: labels": lambda x: data.Dataset(np.zeros((8, 3)), x[:, 0]),
    "data.from_arrays: 'x'": lambda x: data.from_arrays({"x": x}),
    "data.from_iterable: 'x'": lambda x: next(data.from_iterable([{"x": x}]).batches(8)),
    "data.from_iterable: 'image'": lambda x: next(data.from_iterable([(x, np.arange(8))]).batches(8)),
    "RowSparse": lambda x: sparse.RowSparse(np.arange(8), x, (9, 3)),
    "RowSparse: indices": lambda x: sparse.RowSparse(x[:, 0].astype(int), np.ones(8), (9,)),
    "sparse.from_dense": sparse.from_dense,
    "sparse.take": lambda x: sparse.take(x, [0]),
    "data.from_arrays: an element": lambda x: train.predict({}, lambda p, x: x, x, batch_size=4),
}


class Quantity(np.ndarray):
    """As arrays with units are: of astropy, of unyt."""

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        raise TypeError("units differ")


@pytest.mark.parametrize("where", TAKERS)
def test_masked_arrays_are_refused(where):
    masked = np.ma.masked_array(np.ones((8, 3), np.float32), mask=np.eye(8, 3))
    with pytest.raises(TypeError, match=rf"({where}).*: expected plain numbers, got a MaskedArray, .*\.filled\(0\)"):
        TAKERS[where](masked)


def test_arrays_with_a_meaning_of_their_own_are_refused():
    with pytest.raises(TypeError, match=r"key 3: expected plain numbers, got a Quantity, .*np\.asarray\(array\)"):
        kv.init(kv.create(), 3, np.ones(3).view(Quantity))


def test_arrays_that_are_only_their_numbers_are_taken(tmp_path):
    on_disk = np.memmap(tmp_path / "a", np.float32, "w+", shape=(3,))
    for plain in (on_disk, on_disk[:2], np.float32(3)):
        np.testing.assert_array_equal(kv.pull(kv.init(kv.create(), 3, plain), 3), plain)


def test_a_tensor_that_needs_a_gradient_is_refused_by_name():
    class Tensor:
        def __array__(self, *args, **options):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")

    with pytest.raises(TypeError, match=r"value of key 3: expected an array, .*tensor\.detach"):
        kv.init(kv.create(), 3, Tensor())
