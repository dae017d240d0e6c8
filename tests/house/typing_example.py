# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false
"""A user's script, for the type checker: `test_types.py` holds it against pyright's strict mode.

`assert_type` says what a user's editor shows. The rules that are off concern others: jax's own functions are partly
untyped (`jax.Device` comes from a compiled module without stubs), optax and graphviz have no `py.typed`.
"""

from pathlib import Path
from typing import Any, assert_type

import graphviz
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp
from jaxpar.sparse import RowSparse
from jaxpar.train import History, TrainState, TrainStep

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]


def apply(params: Params, image: jax.Array) -> jax.Array:
    return image.reshape(image.shape[0], -1) @ params["w"] + params["b"][None]


class Counts(jp.train.Callback):
    """A callback of the user's own, on the base."""

    def init(self, state: TrainState) -> dict[str, int]:
        return {"steps": 0}

    def on_step(self, memory: dict[str, int], step: int, metrics: dict[str, float]) -> dict[str, int]:
        return {"steps": memory["steps"] + 1}


class StopsAt:
    """One that is no `jp.train.Callback`."""

    def init(self, state: TrainState) -> int:
        return 0

    def on_epoch(self, memory: int, state: TrainState, record: dict[str, Any]) -> tuple[int, bool]:
        return memory + 1, memory == 3


def loss_fn(params: Params, batch: Batch, rng: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    del rng
    losses = optax.softmax_cross_entropy_with_integer_labels(apply(params, batch["image"]), batch["label"])
    return jnp.mean(losses), {}


def loss_with_state(
    params: Params, batch: Batch, rng: jax.Array, model_state: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    return *loss_fn(params, batch, rng), model_state + 1


def store(gpus: list[Any]) -> None:
    kv = jp.kv.create("device", devices=gpus)
    assert_type(kv, jp.kv.KVStore)
    kv = jp.kv.init(kv, 3, jnp.ones((2, 3)))
    kv = jp.kv.init(kv, [5, 7], [jnp.ones(2), np.zeros(2, np.float32)])
    kv = jp.kv.set_updater(kv, lambda key, pushed, stored: stored + key * pushed)
    kv = jp.kv.set_updater(kv, jp.updaters.accumulate)
    kv = jp.kv.set_optimizer(kv, optax.sgd(0.1))
    kv = jp.kv.set_optimizer(kv, jp.updaters.mxnet_sgd(0.1, momentum=0.9, rescale_grad=0.5))
    kv = jp.kv.set_gradient_compression(kv, {"type": "2bit", "threshold": 0.5})
    kv = jp.kv.push(kv, 3, [jnp.ones((2, 3))] * 4)
    assert_type(jp.kv.push(kv, [5, 7], [jnp.ones(2), jnp.ones(2)]), jp.kv.KVStore)
    assert_type(jp.kv.pull(kv, 3), jax.Array)
    assert_type(jp.kv.pull(kv, [5, 7]), list[jax.Array])
    assert_type(jp.kv.pull(kv, 3, devices=gpus), list[jax.Array])
    assert_type(jp.kv.pull(kv, [5, 7], devices=gpus), list[list[jax.Array]])
    assert_type(jp.kv.pushpull(kv, 3, jnp.ones((2, 3)), axis_name="data"), tuple[jp.kv.KVStore, jax.Array])
    assert_type(jp.kv.broadcast(kv, 9, jnp.ones(2), devices=gpus), tuple[jp.kv.KVStore, list[jax.Array]])
    assert_type(jp.kv.row_sparse_pull(kv, 3, [0, 1]), RowSparse)
    assert_type(jp.kv.names(kv), dict[int, str])
    assert_type(jp.kv.rank(), int)
    jp.kv.barrier("end")


def devices_and_data(gpus: list[Any]) -> None:
    shards = jp.parallel.split_and_load(np.ones((8, 2)), gpus)
    assert_type(jp.parallel.allreduce(shards), list[jax.Array])
    dataset = jp.data.load("fashion_mnist", "train")
    assert_type(dataset, jp.data.Dataset)
    assert_type(dataset.images, np.ndarray)
    for batch in jp.data.batches(dataset, 256, rng=jax.random.key(0)):
        assert_type(batch, Batch)


def training(folder: Path) -> None:
    params = {"w": jnp.zeros((784, 10)), "b": jnp.zeros(10)}
    kv = jp.kv.from_params(params, optimizer=optax.adam(1e-3))
    state = jp.train.create_state(kv, jax.random.key(0))
    assert_type(state, TrainState)
    step = jp.train.make_train_step(loss_fn, engine="shard_map", nonfinite="skip")
    assert_type(step, TrainStep)
    state, metrics = step(state, {"image": jnp.ones((8, 784)), "label": jnp.zeros(8, jnp.int32)})
    assert_type(metrics, dict[str, jax.Array])
    jp.train.make_train_step(loss_with_state)
    jp.train.make_train_step(lambda params, batch, rng: (jnp.sum(params["w"] * batch + rng), {}))
    step = jp.train.make_train_step(jp.train.classification_loss(jp.models.lenet.apply))
    train, test = jp.data.load(), jp.data.load(split="test")
    state, history = jp.train.fit(
        state, step, train, test_data=test, apply_fn=apply, epochs=2, batch_size=256, checkpoint_dir=folder
    )
    assert_type(state, TrainState)
    assert_type(history, History)
    assert_type(jp.train.evaluate(state, apply, test, batch_size=256), dict[str, float])
    assert_type(jp.train.confusion_matrix(state, apply, test), np.ndarray)
    plot = jp.train.LivePlot()
    both: list[Counts | jp.train.LivePlot] = [Counts(), plot]
    jp.train.fit(state, step, train, epochs=1, batch_size=256, callbacks=both, on_step=plot.on_step)
    jp.train.fit(state, step, train, epochs=1, batch_size=256, callbacks=[Counts(), plot, StopsAt()])
    jp.checkpoint.save(folder / "state", state)
    assert_type(jp.checkpoint.restore(folder / "state", state), TrainState)
    assert_type(jp.checkpoint.latest(folder), Path | jp.checkpoint.BucketPath | None)
    jp.distributed.initialize("localhost:1234", 2, 0)


def pictures(params: Params) -> None:
    plot = jp.viz.plot_network(apply, params, jax.ShapeDtypeStruct((1, 784), jnp.float32), depth=1, heat="flops")
    digraph: graphviz.Digraph = plot
    assert_type(digraph.source, str)
    assert_type(plot.network, jp.viz.Graph)
    assert_type(plot.save("net.svg"), str)
    jp.viz.print_summary(apply, params, jnp.ones((1, 784)))
    for node in jp.viz.trace(apply, params, jnp.ones((1, 784))).nodes:
        assert_type(node.name, str)
        assert_type(node.flops, int)
