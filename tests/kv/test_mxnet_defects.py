"""What MXNet 1.9.1 does wrong, one by one, and that jaxpar does better."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import put

from jaxpar import kv, parallel, train, updaters
from jaxpar.sparse import RowSparse

ONES = jnp.ones((2, 3))


def filled(kind="device"):
    return kv.init(kv.create(kind), [3, 5], [ONES, ONES])


def test_an_unknown_name_gave_a_local_store():
    for kind in ("foo", "", "p3"):
        with pytest.raises(ValueError, match="unknown kind"):
            kv.create(kind)


def test_init_of_a_list_was_half_done():
    store = kv.create()
    with pytest.raises(TypeError, match="key 2"):
        kv.init(store, [1, 2], [ONES, None])
    assert kv.pull(kv.init(store, [1, 2], [ONES, ONES]), 1).shape == (2, 3)


def test_an_empty_list_pushes_nothing_here_too():
    np.testing.assert_array_equal(kv.pull(kv.push(filled(), 3, []), 3), ONES)


def test_pushing_an_unknown_key_did_not_name_it_and_crashed_with_a_list():
    for value in (ONES, [ONES, ONES]):
        with pytest.raises(KeyError, match="key 4 was never initialised"):
            kv.push(filled(), 4, value)


def test_one_value_of_another_shape_changed_the_stored_shape():
    with pytest.raises(ValueError, match=r"key 3: expected shape \(2, 3\), got \(3, 2\)"):
        kv.push(filled(), 3, jnp.ones((3, 2)))


@pytest.mark.parametrize("count", [1, 2])
def test_another_dtype_was_cast_or_ignored_by_the_number_of_values(count):
    store = kv.push(filled(), 3, [jnp.full((2, 3), 2, jnp.float16)] * count)
    assert kv.pull(store, 3).dtype == jnp.float32
    np.testing.assert_array_equal(kv.pull(store, 3), np.full((2, 3), 2 * count))
    with pytest.raises(TypeError, match="key 3: expected dtype float32, got int32"):
        kv.push(filled(), 3, [jnp.ones((2, 3), int)] * count)


def test_a_single_pushed_array_was_kept_by_reference():
    mine = np.ones((2, 3), np.float32)
    store = kv.push(filled(), 3, mine)
    mine[:] = 9
    np.testing.assert_array_equal(kv.pull(store, 3), ONES)


def test_a_list_of_one_behaved_differently_from_a_list_of_two():
    for updater in (updaters.assign, updaters.accumulate):
        store = kv.set_updater(filled(), updater)
        one = kv.push(store, 3, [2 * ONES])
        two = kv.push(store, 3, put([ONES, ONES], jax.devices()))
        bare = kv.push(store, 3, 2 * ONES)
        for other in (two, bare):
            np.testing.assert_array_equal(kv.pull(one, 3), kv.pull(other, 3))


@pytest.mark.parametrize("kind", ["local", "device", "sharded"])
def test_row_ids_out_of_range_were_skipped_and_negative_ones_aborted(kind):
    for ids, named in (([0, 2], "2"), ([-1], "-1")):
        with pytest.raises((ValueError, IndexError), match=named):
            kv.row_sparse_pull(filled(kind), 3, ids)


def test_the_result_of_an_updater_was_ignored():
    store = kv.set_updater(filled(), lambda key, pushed, stored: stored * 10 + pushed)
    np.testing.assert_array_equal(kv.pull(kv.push(store, 3, ONES), 3), np.full((2, 3), 11))
    with pytest.raises(TypeError, match="is None; an updater returns the new value"):
        kv.push(kv.set_updater(filled(), lambda key, pushed, stored: None), 3, ONES)


def test_an_exception_in_an_updater_was_swallowed():
    def updater(key, pushed, stored):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        kv.push(kv.set_updater(filled(), updater), 3, ONES)


def test_uint8_wrapped_when_it_was_pulled():
    with pytest.raises(TypeError, match="cannot be cast safely"):
        kv.push(kv.init(kv.create(), 3, jnp.zeros(2, jnp.uint8)), 3, jnp.full(2, 300.0))


def test_a_bogus_compression_was_ignored_on_one_device():
    with pytest.raises(ValueError, match="'bogus'"):
        kv.set_gradient_compression(filled(), {"type": "bogus"})


def test_an_exact_2bit_of_float16_values():
    """#15252: 2bit was for float32 alone."""
    store = kv.init(kv.create("device"), 3, jnp.zeros(64, jnp.float16))
    store = kv.push(kv.set_gradient_compression(store, {"type": "2bit", "threshold": 0.5}), 3, jnp.ones(64))
    np.testing.assert_array_equal(kv.pull(store, 3), np.full(64, 0.5, np.float16))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_adam_counted_a_step_for_each_device(count):
    store = kv.set_optimizer(filled(), optax.adam(0.1))
    for _ in range(3):
        store = kv.push(store, 3, put([ONES / count] * count, jax.devices()))
    assert int(store.updater_state[3][0].count) == 3
    assert int(store.updater_state[5][0].count) == 0


def test_the_rate_was_ignored_on_the_store():
    """#15919, #8907: a rate that changes acts on the next push, without a new program."""
    store = kv.set_optimizer(filled(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    store = kv.push(store, 3, ONES)
    np.testing.assert_allclose(kv.pull(store, 3), np.full((2, 3), 0.5))
    store.updater_state[3].hyperparams["learning_rate"] = jnp.float32(0.1)
    np.testing.assert_allclose(kv.pull(kv.push(store, 3, ONES), 3), np.full((2, 3), 0.4), rtol=1e-6)
    store = kv.set_optimizer(filled(), optax.sgd(optax.piecewise_constant_schedule(0.5, {1: 0.2})))
    store = kv.push(kv.push(store, 3, ONES), 3, ONES)
    np.testing.assert_allclose(kv.pull(store, 3), np.full((2, 3), 0.4), rtol=1e-6)


def test_two_trainers_clashed_in_one_store():
    first, second = kv.set_optimizer(filled(), optax.sgd(1.0)), kv.set_optimizer(filled(), optax.sgd(0.1))
    first = kv.push(first, 3, ONES)
    np.testing.assert_array_equal(kv.pull(second, 3), ONES)
    assert not kv.pull(first, 3).any()


def test_a_stale_gradient_was_applied_again():
    store = kv.set_optimizer(filled(), optax.sgd(0.5))
    store = kv.push(store, 3, ONES)
    pulled = kv.pull(kv.push(store, 5, ONES), 3)
    np.testing.assert_array_equal(pulled, np.full((2, 3), 0.5))


def test_replicas_diverged():
    """After a push, the copies on all devices are one value."""
    devices = jax.devices()[:4]
    store = kv.set_optimizer(filled(), optax.sgd(0.1, momentum=0.9))
    for i in range(2):
        store = kv.push(store, 3, put([i * ONES, ONES, -ONES, ONES / 3], devices))
    copies = kv.pull(store, 3, devices=devices)
    assert len({np.asarray(c).tobytes() for c in copies}) == 1


def test_clipping_with_several_devices_is_clipping_of_the_sum():
    def loss(params, batch, rng):
        return (params["w"] * batch.mean(0)).sum(), {}

    clip = optax.clip_by_global_norm(1.0)
    batch = jnp.array([[3.0, 0.0], [0.0, 4.0], [3.0, 4.0], [6.0, 8.0]])
    results = []
    for count in (1, 4):
        store = kv.from_params({"w": jnp.zeros(2)}, optimizer=optax.sgd(1.0))
        state = train.create_state(store, 0, devices=jax.devices()[:count])
        state, _ = train.make_train_step(loss, grad_transform=clip)(state, batch)
        results.append(state.params["w"])
    np.testing.assert_allclose(results[0], [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)


def test_a_batch_that_cannot_be_divided_names_one_that_can():
    with pytest.raises(ValueError, match="use a batch of 8 or 12, or even_split=False"):
        parallel.split_and_load(np.ones((10, 2)), jax.devices()[:4])


def test_rows_pushed_by_assignment_replace_the_whole_value_as_there():
    store = kv.push(filled(), 3, RowSparse(np.array([1]), 2 * np.ones((1, 3), np.float32), (2, 3)))
    np.testing.assert_array_equal(kv.pull(store, 3), [[0, 0, 0], [2, 2, 2]])


def test_keys_overflowed():
    key = 2**40 + 1
    store = kv.push(kv.init(kv.create(), [key, 1], [ONES, ONES]), key, 7 * ONES)
    np.testing.assert_array_equal(kv.pull(store, 1), ONES)


def test_ranks_and_barriers_without_other_processes():
    assert (kv.rank(), kv.num_workers()) == (0, 1)
    kv.barrier("here")
