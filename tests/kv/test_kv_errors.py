"""What comes in wrong is named, with what was expected, and no store changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from kv_model import FOUR, assert_unchanged, on_mesh, put, snapshot
from world import squares

from jaxpar import checkpoint, data, kv, parallel, sparse, train, updaters
from jaxpar.sparse import RowSparse

F = jnp.zeros((2, 3))
ROWS = RowSparse(np.array([0]), np.ones((1, 3), np.float32), (2, 3))
TWO = {"type": "2bit", "threshold": 0.5}
CLIPPED_ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
SKIPS_NAN = optax.apply_if_finite(optax.sgd(1.0), 2)


def filled(kind="device"):
    store = kv.init(kv.create(kind), [3, 5, 7], [jnp.ones((2, 3)), jnp.zeros(4, jnp.int32), jnp.ones((), jnp.bfloat16)])
    return kv.set_updater(store, updaters.accumulate)


CALLS = {
    "push_unknown": (lambda s: kv.push(s, 4, F), KeyError, r"key 4 was never initialised.*\[3, 5, 7\].*call kv.init"),
    "push_unknown_in_list": (lambda s: kv.push(s, [3, 4], [F, F]), KeyError, "kv.push: key 4 was never"),
    "push_unknown_list_of_values": (lambda s: kv.push(s, 4, [F, F]), KeyError, "kv.push: key 4"),
    "pull_unknown": (lambda s: kv.pull(s, 4), KeyError, "kv.pull: key 4 was never initialised"),
    "pull_unknown_in_list": (lambda s: kv.pull(s, [3, 4]), KeyError, "kv.pull: key 4"),
    "rows_unknown": (lambda s: kv.row_sparse_pull(s, 4, [0]), KeyError, "kv.row_sparse_pull: key 4"),
    "init_twice": (lambda s: kv.init(s, 3, F), ValueError, "key 3 is initialised already"),
    "init_twice_in_list": (lambda s: kv.init(s, [9, 3], [F, F]), ValueError, "key 3 is initialised already"),
    "init_named_twice": (lambda s: kv.init(s, [9, 9], [F, F]), ValueError, "key 9"),
    "init_no_array": (lambda s: kv.init(s, 9, [1, 2]), TypeError, "key 9: expected an array, got a list of 2"),
    "init_none": (lambda s: kv.init(s, 9, None), TypeError, "key 9: expected an array, got None"),
    "init_text": (lambda s: kv.init(s, 9, "abc"), TypeError, "key 9: expected an array"),
    "init_atomic": (lambda s: kv.init(s, [9, 10], [F, None]), TypeError, "key 10"),
    "init_length": (lambda s: kv.init(s, [9, 10], [F]), ValueError, r"2 keys \[9, 10\].*a list of 1"),
    "shape": (lambda s: kv.push(s, 3, jnp.ones((3, 3))), ValueError, r"key 3: expected shape \(2, 3\), got \(3, 3\)"),
    "shape_in_list": (lambda s: kv.push(s, 3, [F, jnp.ones(6)]), ValueError, r"expected shape \(2, 3\), got \(6,\)"),
    "shape_broadcast": (lambda s: kv.push(s, 3, jnp.ones(())), ValueError, r"expected shape \(2, 3\), got \(\)"),
    "shape_of_last_key": (lambda s: kv.push(s, [3, 7], [F, F]), ValueError, r"key 7: expected shape \(\)"),
    "dtype_of_last_key": (lambda s: kv.push(s, [3, 5], [F, jnp.zeros(4)]), TypeError, "key 5"),
    "none_of_last_key": (lambda s: kv.push(s, [3, 3], [F, None]), TypeError, "key 3: expected an array, got None"),
    "length": (lambda s: kv.push(s, [3, 5], [F]), ValueError, r"2 keys \[3, 5\].*a list of 1"),
    "no_list": (lambda s: kv.push(s, [3, 5], F), TypeError, r"value must be a list .*keys \[3, 5\]"),
    "value_none": (lambda s: kv.push(s, 3, None), TypeError, "key 3: expected an array, got None"),
    "value_nested": (lambda s: kv.push(s, 3, [[F]]), TypeError, "key 3: expected an array, got a list of 1"),
    "int_to_float": (lambda s: kv.push(s, 3, F.astype(int)), TypeError, "expected dtype float32, got int32.*astype"),
    "int_to_float_in_list": (lambda s: kv.push(s, 3, [F.astype(int)] * 2), TypeError, "key 3: expected dtype float32"),
    "bool_to_float": (lambda s: kv.push(s, 3, F.astype(bool)), TypeError, "expected dtype float32, got bool"),
    "int_to_bfloat": (lambda s: kv.push(s, 7, jnp.ones((), int)), TypeError, "expected dtype bfloat16, got int32"),
    "float_to_int": (lambda s: kv.push(s, 5, jnp.zeros(4)), TypeError, "expected dtype int32, got float32"),
    "wide_int": (lambda s: kv.push(s, 5, jnp.zeros(4, jnp.uint32)), TypeError, "expected dtype int32, got uint32"),
    "complex_to_float": (
        lambda s: kv.push(s, 3, F.astype(complex)),
        TypeError,
        "expected dtype float32, got complex64",
    ),
    "mixed_rows": (lambda s: kv.push(s, 3, [ROWS, F]), TypeError, "key 3: RowSparse and dense"),
    "rows_shape": (lambda s: kv.push(s, 3, RowSparse(np.array([0]), np.ones((1, 2)), (2, 2))), ValueError, "key 3"),
    "rows_of_scalar": (lambda s: kv.row_sparse_pull(s, 7, [0]), ValueError, "axis"),
    "row_out_of_range": (lambda s: kv.row_sparse_pull(s, 3, [2]), ValueError, "row 2 is not in the table"),
    "row_negative": (lambda s: kv.row_sparse_pull(s, 3, [-1]), ValueError, "row -1 is not in the table"),
    "row_ids_length": (lambda s: kv.row_sparse_pull(s, [3, 5], [[0]]), ValueError, "row_ids must be .* 2 keys"),
    "axis_name": (lambda s: kv.push(s, 3, F, axis_name="data"), NameError, "axis_name='data'; leave it out"),
    "updater": (lambda s: kv.set_updater(s, 3), TypeError, "updater must be a function of .key, pushed, stored.*got 3"),
    "updater_tx": (lambda s: kv.set_updater(s, optax.sgd(1.0)), TypeError, "kv.set_optimizer takes an optax"),
    "optimizer": (lambda s: kv.set_optimizer(s, "sgd"), TypeError, "expected an optax.GradientTransformation"),
    "coupling": (lambda s: kv.set_optimizer(s, optax.clip_by_global_norm(1.0)), ValueError, "grad_transform"),
    "coupling_by_nan": (lambda s: kv.set_optimizer(s, SKIPS_NAN), ValueError, "from the gradients of others"),
    "coupling_chain": (lambda s: kv.set_optimizer(s, CLIPPED_ADAM), ValueError, "from the gradients of others"),
    "compression": (lambda s: kv.set_gradient_compression(s, {"type": "3bit"}), ValueError, "'3bit'.*2bit"),
    "to_params": (kv.to_params, ValueError, "not made by kv.from_params"),
}


@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
@pytest.mark.parametrize(("call", "error", "message"), CALLS.values(), ids=CALLS)
def test_a_failing_call_names_the_trouble_and_changes_nothing(call, error, message, kind):
    store = filled(kind)
    before = snapshot(store)
    with pytest.raises(error, match=message) as caught:
        call(store)
    assert str(caught.value)[:1] not in "\"'", "a KeyError's message is shown without quotes"
    assert_unchanged(store, before)


@pytest.mark.parametrize("key", [True, np.bool_(True), 1.0, "3", None, (3, 5), np.array([3]), jnp.array(3), {3}])
@pytest.mark.parametrize(
    "call",
    [lambda s, k: kv.init(s, k, F), lambda s, k: kv.push(s, k, F), kv.pull, lambda s, k: kv.row_sparse_pull(s, k, [0])],
    ids=["init", "push", "pull", "row_sparse_pull"],
)
def test_a_key_is_an_int(call, key):
    for given in (key, [key]):
        with pytest.raises(TypeError, match="a key of the store must be an int, got"):
            call(filled(), given)


def test_an_optimizer_of_all_params_names_the_first_three_that_lack_gradients():
    store = kv.from_params({name: jnp.zeros(2) for name in "abcde"}, optimizer=optax.adam(0.1))
    with pytest.raises(ValueError, match=r"keys \[1, 2, 3, 4\] \('b', 'c', 'd'\): nothing is pushed to them"):
        kv.push(store, 0, jnp.ones(2))


def test_kinds():
    for kind in ("foo", "", "Local", "distsync"):
        with pytest.raises(ValueError, match=f"unknown kind {kind!r}; known are local, device, sharded"):
            kv.create(kind)
    assert kv.create().kind == "local"
    with pytest.raises(ValueError, match="one or more different devices"):
        kv.create("device", devices=[])
    with pytest.raises(ValueError, match="one or more different devices"):
        kv.create("sharded", devices=jax.devices()[:1] * 2)


def raising(key, pushed, stored):
    if key == 5:
        raise RuntimeError("mine")
    return pushed


RESULTS = {
    "nothing": (lambda key, pushed, stored: None, TypeError, "updater's result for key 3 is None.*in place"),
    "shape": (lambda key, pushed, stored: pushed[0], ValueError, r"key 3: expected shape \(2, 3\), got \(3,\)"),
    "dtype": (lambda key, pushed, stored: pushed + 1j, TypeError, "expected dtype float32, got complex64"),
    "list": (lambda key, pushed, stored: [pushed], TypeError, "key 3: expected an array, got a list of 1"),
}


@pytest.mark.parametrize("wrap", [lambda f: f, updaters.stateless], ids=["function", "Updater"])
@pytest.mark.parametrize(("updater", "error", "message"), RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_what_an_updater_must_not_return(updater, error, message, wrap, jit):
    store = kv.set_updater(kv.init(kv.create(), 3, jnp.ones((2, 3))), wrap(updater))
    before = snapshot(store)
    push = jax.jit(lambda s: kv.push(s, 3, F)) if jit else lambda s: kv.push(s, 3, F)
    with pytest.raises(error, match=message):
        push(store)
    assert_unchanged(store, before)


@pytest.mark.parametrize("wrap", [lambda f: f, updaters.stateless], ids=["function", "Updater"])
def test_an_exception_in_an_updater_reaches_the_caller(wrap):
    store = kv.set_updater(kv.init(kv.create(), [3, 5], [F, F]), wrap(raising))
    before = snapshot(store)
    with pytest.raises(RuntimeError, match="mine"):
        kv.push(store, [3, 5], [F + 1, F + 1])
    assert_unchanged(store, before)
    assert kv.pull(kv.push(store, 3, F + 1), 3)[0, 0] == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_a_compressed_list_keeps_its_length(kind):
    store = kv.set_gradient_compression(kv.init(kv.create(kind, devices=FOUR), 3, jnp.zeros(64)), TWO)
    store = kv.push(store, 3, put([jnp.ones(64)] * 4, FOUR))
    before = snapshot(store)
    with pytest.raises(ValueError, match=r"key.* 3.*compressed"):
        kv.push(store, 3, put([jnp.ones(64)] * 3, FOUR))
    assert_unchanged(store, before)


def test_a_sharded_store_wants_its_own_devices():
    store = kv.init(kv.create("sharded", devices=FOUR), 3, jnp.zeros(8))

    def body(store, value):
        return kv.push(store, 3, value[0], axis_name="data").values[3]

    run = on_mesh(body, jax.devices()[:2], (P(), P("data")), P("data"))
    with pytest.raises(ValueError, match=r"axis 'data' has 2 devices.*made for 4"):
        run(kv.place(store, FOUR), jnp.ones((2, 8)))


def test_rows_do_not_go_into_a_sharded_store():
    store = filled("sharded")
    with pytest.raises(ValueError, match=r"keys \[3\]: a store of kind 'sharded'.*use kind 'device' or 'local'"):
        kv.push(store, 3, ROWS)


def test_a_share_of_a_sharded_store_is_no_value():
    devices = jax.devices()[:2]
    store = kv.init(kv.create("sharded", devices=devices), 3, jnp.zeros(8))
    run = on_mesh(lambda s: kv.pull(s, 3), devices, (kv.partition_specs(store, "data"),))
    with pytest.raises(ValueError, match=r"one device's share.*give axis_name"):
        run(store)


def test_a_store_cannot_be_changed_in_place():
    store = filled()
    with pytest.raises(AttributeError):
        store.kind = "local"
    with pytest.raises(TypeError, match="unhashable"):
        hash(store)


# ---- arrays that say more than their numbers


STORE = kv.init(kv.create(), 3, jnp.zeros(3))
STEP = train.make_train_step(squares)


def stepped(x):
    store = kv.from_params({"w": jnp.ones(3), "b": jnp.zeros(())}, optimizer=optax.sgd(0.1))
    return STEP(train.create_state(store, 0), {"x": np.ones((8, 3), np.float32), "y": x[:, 0]})


# What takes an array of (8, 3), and what its message names.
TAKERS = {
    "kv.init: value of key 4": lambda x: kv.init(STORE, 4, x),
    "kv.init: value of key 5": lambda x: kv.init(STORE, [4, 5], [jnp.ones(2), [x]]),
    "kv.push: value for key 3": lambda x: kv.push(STORE, 3, [jnp.ones(3), x[0]]),
    "leaf 'a/0' of params": lambda x: kv.from_params({"a": [x]}),
    "allreduce: value 0": lambda x: parallel.allreduce([x]),
    "leaf 'a'": lambda x: checkpoint.save("never", {"a": x}),
    r"train step: batch\['y'\]": stepped,
    r"create_state: model_state\['a'\]": lambda x: train.create_state(
        kv.from_params({"w": jnp.ones(3)}), 0, model_state={"a": x}
    ),
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
