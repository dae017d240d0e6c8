"""A module of a library, or a network of MXNet, and its inputs are enough for a picture."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from viz_models import LENET, Spec, f32, summary

from jaxpar import mxnet, viz
from jaxpar.models import lenet

sys.path.append(str(Path(__file__).parents[1] / "mxnet"))
from symbols import Symbol, symbol_of

PARAMS = 4 * 6 + 6 + 2 * 6 + 6 * 2 + 2
X = Spec((3, 4), f32)


def ops(graph):
    return [node.op for node in graph.layers]


def test_shapes_by_name_stand_for_arrays():
    graph = viz.trace(lenet.apply, LENET, shape={"images": (2, 28, 28, 1)})
    assert graph == viz.trace(lenet.apply, LENET, images=Spec((2, 28, 28, 1), f32))
    assert "conv1" in summary(lenet.apply, LENET, shape={"images": (2, 28, 28, 1)})
    own = viz.trace(lambda x, shape: x[shape["x"][0]], X, shape={"x": (4, 3)})  # an argument of this name
    assert [node.name for node in own.inputs] == ["shape['x'][0]"]


@pytest.fixture
def model(tmp_path):
    net = Symbol()
    dense = net.add("FullyConnected", "fc1", "data", "fc1_weight", "fc1_bias", num_hidden=6)
    statistics = ("bn_gamma", "bn_beta", "bn_moving_mean", "bn_moving_var")
    norm = net.add("BatchNorm", "bn", dense, *statistics, fix_gamma=False)
    drop = net.add("Dropout", "drop", net.add("Activation", "relu", norm, act_type="relu"), p=0.5)
    last = net.add("FullyConnected", "fc2", drop, "fc2_weight", "fc2_bias", num_hidden=2)
    net.add("SoftmaxOutput", "softmax", last, "softmax_label")
    return mxnet.load_symbol(symbol_of(tmp_path, *net.nodes))


def test_a_network_of_mxnet_and_its_shapes_are_enough(model):
    graph = viz.trace(model, shape={"data": (3, 4)})
    assert graph == viz.trace(model, X) == viz.trace(model, {"data": X})
    assert ops(graph) == ["FullyConnected", "BatchNorm", "Activation", "FullyConnected", "Softmax"]  # no dropout
    assert (graph.total_params, graph.total_state) == (PARAMS, 2 * 6)
    assert [node.name for node in graph.inputs] == ["data"]
    assert "Dropout" in ops(viz.trace(model, X, train=True, rng=0))
    with pytest.raises(TypeError, match=r"no \['dat'\]; its inputs are \['data', 'softmax_label'\]"):
        viz.plot_network(model, shape={"dat": (3, 4)})


@pytest.mark.others
def test_linen():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(6)(x))
            return nn.Dense(2)(nn.Dropout(0.1, deterministic=not train)(nn.relu(x)))

    variables = jax.eval_shape(lambda key: Net().init(key, jnp.ones((3, 4))), jax.random.key(0))
    graph = viz.trace(Net(), shape={"x": (3, 4)})
    assert ops(graph) == ops(viz.trace(Net().apply, variables, X))
    assert (graph.total_params, graph.total_state) == (PARAMS, 2 * 6)
    in_training = {"train": True, "mutable": ["batch_stats"], "rngs": {"dropout": jax.random.key(0)}}
    assert "Dropout" in ops(viz.trace(Net(), X, **in_training))


@pytest.mark.others
def test_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.norm = nnx.Linear(4, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs)
            self.drop, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(6, 2, rngs=rngs)

        def __call__(self, x):
            return self.last(self.drop(nnx.relu(self.norm(self.dense(x)))))

    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))  # of shapes alone
    assert "Dropout" in ops(viz.trace(model, X))
    model.eval()
    graph = viz.trace(model, shape={"x": (3, 4)})
    assert ops(graph) == ["FullyConnected", "BatchNorm", "Activation", "FullyConnected"]
    assert (graph.total_params, graph.total_state) == (PARAMS, 2 * 6)


@pytest.mark.others
def test_equinox():
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.Sequential([eqx.nn.Linear(4, 6, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    assert "Dropout" in ops(viz.trace(net, Spec((4,), f32), key=jax.random.key(0)))
    graph = viz.trace(eqx.nn.inference_mode(net), shape={"x": (4,)})
    assert (ops(graph), graph.total_params) == (["FullyConnected"], 30)


@pytest.mark.others
def test_keras():
    keras = pytest.importorskip("keras")
    net = keras.Sequential([keras.layers.Dense(6), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    # It would be built inside of the trace, with random numbers for params and traced arrays left in it.
    with pytest.raises(ValueError, match=r"call its build"):
        viz.trace(net, X)
    net.build((None, 4))
    with jax.numpy_rank_promotion("allow"):
        graph = viz.trace(net, shape={"inputs": (3, 4)})
        in_training = viz.trace(net, X, training=True)
    assert (ops(graph), graph.total_params) == (["FullyConnected"] * 2, 44)
    assert "Dropout" in ops(in_training)
