"""Params that are not trained: no gradient, no state, no byte between devices, for every engine, kind and option."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kv_model import placed_collectives_in
from world import EVERYWHERE, close, line, start, step_of, trained

from jaxpar import checkpoint, kv, parallel, train, updaters, viz

X = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
BATCH = {"x": X, "y": X[:, :2].sum(1)}
TEACHER = 4096  # elements, far more than the student has


def network(net, x):
    return jnp.tanh(x @ net["in"]) @ net["out"]


def loss_fn(params, batch, rng):
    student = network(params["student"], batch["x"])
    wanted = network(params["teacher"], batch["x"]) + batch["y"]
    return ((student - wanted) ** 2).mean(), {}


def net(seed, width):
    rng = np.random.default_rng(seed)
    return {"in": np.float32(rng.normal(size=(6, width))), "out": np.float32(rng.normal(size=width) / width)}


INIT = {"student": net(0, 8), "teacher": net(1, TEACHER // 8)}


def alone():
    """The same training without the teacher among the params."""

    def student_loss(params, batch, rng):
        teacher = jax.tree.map(lambda x: x.astype(batch["x"].dtype), INIT["teacher"])
        return loss_fn({"student": params, "teacher": teacher}, batch, rng)

    return INIT["student"], student_loss


def both(tx, **options):
    """The states and steps with a frozen teacher, and without one."""
    params, student_loss = alone()
    with_teacher = train.start(INIT, tx, loss_fn, frozen="teacher", **options)
    return with_teacher, train.start(params, tx, student_loss, **options)


def steps(state, step):
    return trained(step, state, [BATCH] * 3)


OPTIONS = {
    "plain": {},
    "pmap": {"engine": "pmap"},
    "jit": {"engine": "jit"},
    "local": {"kind": "local"},
    "sharded": {"kind": "sharded"},
    "sharded by jit": {"kind": "sharded", "engine": "jit"},
    "dist_async": {"kind": "dist_async"},
    "accumulate": {"accumulate": 3},
    "loss scale": {"loss_scale": "dynamic"},
    "nonfinite": {"nonfinite": "skip"},
    "remat": {"remat": True},
    "bfloat16": {"compute_dtype": jnp.bfloat16},
    "transform": {"grad_transform": optax.clip_by_global_norm(0.1)},
    "unused": {"unused": "skip"},
    "local steps": {"local_steps": 2},
    "diloco": {"local_steps": 2, "outer_optimizer": optax.sgd(0.7, momentum=0.9, nesterov=True)},
    "virtual shards": {"virtual_shards": 4},
    "2bit": {"compression": {"type": "2bit", "threshold": 0.1}},
    "2bit sharded": {"compression": {"type": "2bit", "threshold": 0.1}, "kind": "sharded"},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_others_train_as_if_the_frozen_were_constants(name):
    made = both(optax.adamw(0.05), devices=jax.devices()[:4], **OPTIONS[name])
    (state, metrics), (other, expected) = (steps(*each) for each in made)
    assert_equal(state.params["teacher"], INIT["teacher"])
    assert jax.tree.structure(state.params) == jax.tree.structure(INIT)
    close(state.params["student"], other.params, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-4)


def assert_equal(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.slow
@pytest.mark.parametrize("updater", [updaters.mxnet_adam(0.05), updaters.from_optax(optax.adam(0.05))])
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_an_updater_of_each_key_has_no_state_of_a_frozen_one(updater, kind):
    made = both(updater, kind=kind)
    assert made[0][0].store.updater_state[2] == made[0][0].store.updater_state[3] == ()
    (state, _), (other, _) = (steps(*each) for each in made)
    assert_equal(state.params["teacher"], INIT["teacher"])
    close(state.params["student"], other.params, rtol=1e-6, atol=0)


def test_the_schedule_of_mxnet_counts_without_them():
    (state, _), (other, _) = (steps(*each) for each in both(updaters.mxnet_sgd(lambda count: 0.1 / (1 + count))))
    close(state.params["student"], other.params, rtol=1e-6, atol=0)


def elements_sent(text):
    """How many elements the collectives of a compiled program have."""
    return sum(math.prod(shape) for _, _, shapes in placed_collectives_in(text) for _, shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "pmap"},
        {"engine": "jit"},
        {"kind": "sharded"},
        {"kind": "dist_async"},
        {"local_steps": 2},
        {"compression": {"type": "int8"}},
        {"kind": "sharded", "engine": "jit"},
    ],
    ids=str,
)
def test_devices_send_nothing_of_them(options):
    tx = optax.lamb(0.1) if options == {"kind": "sharded", "engine": "jit"} else optax.adam(0.1)
    texts = (step.lower(state, BATCH).compile().as_text() for state, step in both(tx, **options))
    sent, without = map(elements_sent, texts)
    assert 0 < sent <= without + 8
    assert sent < TEACHER


@pytest.mark.parametrize(
    "frozen",
    [
        "teacher",
        "teacher/*",
        ["teacher/in", "teacher/out"],
        lambda name, leaf: name.startswith("teacher"),
        lambda name, leaf: leaf.size > 100 or name == "teacher/out",
        {"student": False, "teacher": True},
        {"student": {"in": False, "out": False}, "teacher": {"in": np.True_, "out": True}},
    ],
    ids=range(7),
)
def test_what_is_frozen_may_be_said_in_several_ways(frozen):
    assert kv.from_params(INIT, frozen=frozen).frozen == (2, 3)


@pytest.mark.parametrize("frozen", [None, [], (), False, lambda name, leaf: False])
def test_nothing_may_be_frozen(frozen):
    assert kv.from_params(INIT, frozen=frozen).frozen == ()


@pytest.mark.parametrize(
    ("frozen", "kind", "words"),
    [
        ("techer", ValueError, "'techer' matches no param; did you mean teacher?"),
        (["teacher", "head"], ValueError, "'head' matches no param"),
        ("teacher|head", ValueError, "'head' matches no param"),
        ({"student": 0, "teacher": 1}, TypeError, "must give True or False for each param, got 0 for 'student/in'"),
        (lambda name, leaf: None, TypeError, "must give True or False"),
        (True, ValueError, "leaves no floating param to train"),
        ("*", ValueError, "leaves no floating param to train"),
    ],
    ids=range(7),
)
def test_what_says_nothing_of_the_params_is_refused(frozen, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        kv.from_params(INIT, frozen=frozen)


@pytest.mark.parametrize("name", ["trainable", "requires_grad", "freeze"])
def test_the_words_of_other_libraries_are_answered(name):
    with pytest.raises(TypeError, match='frozen="body"'):
        train.start(INIT, optax.sgd(0.1), loss_fn, **{name: "student"})
    with pytest.raises(TypeError, match='frozen="body"'):
        kv.from_params(INIT, **{name: "student"})


def test_a_push_to_a_frozen_key_is_refused_a_pull_gives_its_value_and_the_table_knows_it():
    store = kv.from_params(INIT, optimizer=optax.sgd(1.0), frozen="teacher")
    with pytest.raises(ValueError, match=r"kv.push: key 3 \('teacher/out'\) is frozen"):
        kv.push(store, "teacher/out", jnp.ones(TEACHER // 8))
    np.testing.assert_array_equal(kv.pull(store, "teacher/out"), INIT["teacher"]["out"])
    grads = [jnp.ones((6, 8)), jnp.ones(8)]
    pushed = kv.push(store, ["student/in", "student/out"], grads)
    np.testing.assert_allclose(kv.to_params(pushed)["student"]["out"], INIT["student"]["out"] - 1, rtol=1e-6)
    assert "teacher/in (frozen)" in repr(store)
    assert repr(store).count("(frozen)") == 2
    inside = jax.jit(lambda store, grads: kv.push(store, [0, 1], grads))(store, grads)
    assert_equal(kv.to_params(inside), kv.to_params(pushed))
    assert inside.frozen == (2, 3)


@pytest.mark.parametrize("kind", ["sharded", "device"])
def test_a_store_goes_to_other_devices_with_them(kind):
    store = kv.from_params(INIT, optimizer=optax.adam(0.1), frozen="teacher", kind=kind)
    moved = kv.place(store, jax.devices()[:3])
    assert_equal(kv.to_params(moved), INIT)
    assert moved.frozen == (2, 3)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    assert_equal(kv.to_params(kv.place(store, mesh=mesh)), INIT)


@pytest.mark.slow
def test_frozen_params_may_be_split_over_a_mesh():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    rule = parallel.fsdp("data", min_size=1)
    state, step = train.start(INIT, optax.adamw(0.05), loss_fn, frozen="teacher", mesh=mesh, sharding=rule)
    params, student_loss = alone()
    state, other = steps(state, step)[0], steps(*train.start(params, optax.adamw(0.05), student_loss))[0]
    assert not state.store.values[2].sharding.is_fully_replicated
    assert_equal(state.params["teacher"], INIT["teacher"])
    close(state.params["student"], other.params, rtol=1e-5, atol=0)


def states_of(state, name):
    """The arrays that an optimizer has for a param."""
    store = state.store
    key = next(k for k, called in kv.names(store).items() if called == name)
    whole = jax.tree_util.tree_leaves_with_path(store.optimizer_state)
    own = [leaf for path, leaf in whole if jax.tree_util.keystr(path, simple=True, separator="/").endswith(name)]
    return [np.asarray(leaf) for leaf in (*own, *jax.tree.leaves(store.updater_state[key])) if leaf.ndim]


@pytest.mark.slow
@pytest.mark.parametrize("tx", [optax.adamw(0.05), optax.sgd(0.1, 0.9), updaters.mxnet_adam(0.05)], ids=range(3))
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_a_checkpoint_goes_to_a_run_that_freezes_others(tx, kind, tmp_path, capsys):
    few = ["teacher", "student/out"]
    first, _ = steps(*train.start(INIT, tx, loss_fn, frozen=few, kind=kind))
    checkpoint.save(tmp_path / "few", first)
    new, step = train.start(INIT, tx, loss_fn, frozen="teacher", kind=kind)
    second = checkpoint.restore(tmp_path / "few", new)
    said = capsys.readouterr()
    assert "'student/out': frozen in the checkpoint" in said.out + said.err
    assert_equal(second.params, jax.device_get(first.params))
    assert_equal(states_of(second, "student/in"), states_of(first, "student/in"))
    assert states_of(second, "student/in")
    assert all((leaf == 0).all() for leaf in states_of(second, "student/out"))
    assert second.store.frozen == (2, 3)

    second, _ = steps(second, step)
    assert not np.array_equal(second.params["student"]["out"], INIT["student"]["out"])
    checkpoint.save(tmp_path / "more", second)
    third = checkpoint.restore(tmp_path / "more", train.start(INIT, tx, loss_fn, frozen=few, kind=kind)[0])
    said = capsys.readouterr()
    assert "anew" not in said.out + said.err
    assert_equal(third.params, jax.device_get(second.params))
    assert_equal(states_of(third, "student/in"), states_of(second, "student/in"))
    assert states_of(third, "student/out") == []


def test_a_checkpoint_goes_to_a_store_that_freezes_others_beside_integers(tmp_path):
    params = {"a": np.ones(2, np.float32), "b": np.full(3, 2, np.float32), "n": np.arange(3)}

    def store(*frozen):
        return kv.from_params(params, optimizer=updaters.mxnet_adam(0.1), frozen=frozen)

    few = kv.push(store("n", "b"), "a", np.ones(2, np.float32))
    checkpoint.save(tmp_path / "few", few)
    more = checkpoint.restore(tmp_path / "few", store("n"))
    assert_equal(jax.device_get(more.updater_state[0]), jax.device_get(few.updater_state[0]))
    assert_equal(jax.device_get(more.updater_state[1]), jax.device_get(store("n").updater_state[1]))


def test_another_optimizer_is_refused_beside_other_frozen_params(tmp_path):
    checkpoint.save(tmp_path / "a", train.start(INIT, optax.adamw(0.05), loss_fn, frozen="teacher")[0])
    for tx, words in ((optax.sgd(0.1, momentum=0.9), "optimizer"), (optax.nadamw(0.05), "another optimizer")):
        new, _ = train.start(INIT, tx, loss_fn, frozen="*/out")
        with pytest.raises(ValueError, match=words):
            checkpoint.restore(tmp_path / "a", new)


def test_the_optimizer_has_no_state_of_them_and_a_picture_of_the_step_no_update():
    state, step = train.start(INIT, optax.adam(0.1), loss_fn, frozen="teacher")
    sizes = [leaf.size for leaf in jax.tree.leaves(state.store.optimizer_state)]
    assert sum(sizes) == 1 + 2 * (6 * 8 + 8)
    graph = viz.trace(step, state, BATCH)
    names = kv.names(state.store)
    updated = {names[key] for key in names if f"state.store.values[{key}]" in graph["Adam"].weights}
    assert updated == {"student/in", "student/out"}
    assert {"student/in", "teacher/in"} <= {node.name for node in graph.nodes}


def links(folder):
    """How many names the files of the frozen arrays in each checkpoint have."""
    files = ([f for f in path.rglob("frozen/**/*") if f.is_file()] for path in folder.glob("step*"))
    return [sorted({f.stat().st_nlink for f in of_one}) for of_one in files]


@pytest.mark.slow
def test_the_checkpoints_of_a_run_have_them_once_on_disk(tmp_path):
    def run(epochs):
        state, step = train.start(INIT, optax.adam(0.1), loss_fn, frozen="teacher")
        options = {"checkpoint_dir": tmp_path / "run", "keep": 2, "progress": False}
        return train.fit(state, step, BATCH, epochs=epochs, batch_size=16, **options)[0]

    run(3)
    assert links(tmp_path / "run") == [[2], [2]]  # the third name went with the first checkpoint
    state = run(4)
    assert links(tmp_path / "run") == [[2], [2]]
    new, _ = train.start(INIT, optax.adam(0.1), loss_fn, frozen="teacher")
    restored = checkpoint.restore(checkpoint.latest(tmp_path / "run"), new)
    assert_equal(jax.device_get(restored.params), jax.device_get(state.params))


def test_other_frozen_params_and_damaged_ones_are_written(tmp_path):
    state, _ = train.start(INIT, optax.adam(0.1), loss_fn, frozen="teacher")
    other = {**INIT, "teacher": jax.tree.map(lambda x: x + 1, INIT["teacher"])}
    checkpoint.save(tmp_path / "step_1", state)
    checkpoint.save(tmp_path / "step_2", train.start(other, optax.adam(0.1), loss_fn, frozen="teacher")[0])
    assert links(tmp_path) == [[1], [1]]
    for path in tmp_path.glob("step_1/frozen/state/**/d/*"):
        path.write_bytes(b"?" + path.read_bytes()[1:])
    checkpoint.save(tmp_path / "step_3", state)
    assert links(tmp_path) == [[1], [1], [1]]
    checkpoint.save(tmp_path / "step_4", state)
    assert sorted(links(tmp_path)) == [[1], [1], [2], [2]]  # the arrays of step 3 have a second name
    with pytest.raises(checkpoint.CheckpointError, match=r"step_1.* is damaged: key .*teacher"):
        checkpoint.restore(tmp_path / "step_1", state)
    assert_equal(jax.device_get(checkpoint.restore(tmp_path / "step_3", state).params), INIT)


@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_what_is_pulled_may_be_donated(kind):
    store = kv.from_params(INIT, optimizer=optax.adam(0.1), frozen="teacher", kind=kind)
    jax.jit(lambda tree: jax.tree.map(jnp.sin, tree), donate_argnums=0)(kv.to_params(store))
    for copy in kv.pull(store, "teacher/in", devices=jax.devices()[:2]):
        jax.jit(jnp.sin, donate_argnums=0)(copy)
    assert_equal(kv.to_params(store), INIT)


@pytest.mark.slow
def test_a_module_that_can_be_called_is_a_pytree_of_bools():
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    params, _ = eqx.partition(net, eqx.is_inexact_array)
    flags = eqx.tree_at(lambda tree: tree.layers[0].weight, jax.tree.map(lambda _: False, params), True)
    assert len(kv.from_params(params, frozen=flags).frozen) == 1


def test_a_checkpoint_of_a_smaller_model_is_refused_in_words(tmp_path):
    small = {"a": jnp.ones(2), "b": jnp.ones(3)}
    checkpoint.save(tmp_path / "small", kv.from_params(small, optimizer=optax.adam(0.1)))
    with pytest.raises(checkpoint.CheckpointError, match="does not fit `like`"):
        checkpoint.restore(tmp_path / "small", kv.from_params({**small, "c": jnp.ones(4)}, optimizer=optax.adam(0.1)))


# ---- params without gradients, such as random keys and counts


PLACES = [(engine, kind) for engine, kind in EVERYWHERE if kind != "sharded"] + [("jit", "device")]
CLIP, TRACE, OUTER = optax.clip_by_global_norm(0.1), optax.trace(0.9), optax.adam(0.1)


def trained_with(more, transform, engine, kind, is_given):
    params = {"b": jnp.zeros(()), "w": jnp.ones(3), **more}
    state = start(2, kind, OUTER, params, grad_transform=transform if is_given else None)
    return trained(step_of(engine=engine, grad_transform=transform), state, [line()] * 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "is_given"), [(CLIP, True), (TRACE, False)], ids=["clip", "trace"])
@pytest.mark.parametrize(("engine", "kind"), PLACES)
def test_a_grad_transform_sees_the_floating_params_only(engine, kind, transform, is_given):
    more = {"a": jax.random.key(3), "n": jnp.arange(3), "on": jnp.array([True, False])}
    state = trained_with(more, transform, engine, kind, is_given)
    plain = trained_with({}, transform, engine, kind, is_given)
    found = dict(state.params)
    assert (jax.random.key_data(found.pop("a")) == jax.random.key_data(more["a"])).all()
    np.testing.assert_array_equal(found.pop("n"), more["n"])
    np.testing.assert_array_equal(found.pop("on"), more["on"])
    close(found, plain.params)
    assert len(jax.tree.leaves(state.transform)) == len(jax.tree.leaves(plain.transform))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tx", [optax.contrib.sophia(0.1), optax.lbfgs(0.1)], ids=["sophia", "lbfgs"])
@pytest.mark.parametrize("kind", ["device", "sharded"])
def test_an_optimizer_that_needs_the_loss_as_a_function_says_so_in_every_kind(kind, tx):
    with pytest.raises(
        (TypeError, ValueError), match=r"obj_fn must be provided|required keyword-only arguments?.*value_fn"
    ):
        step_of()(start(8, kind, tx), line())
    with pytest.raises(ValueError, match=r"the updater fails .*(obj_fn|value_fn)"):
        kv.set_optimizer(kv.from_params({"w": jnp.ones(3)}, kind="sharded"), tx)
