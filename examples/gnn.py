"""A graph network: does a graph of up to ten nodes have a triangle?

Graphs of several sizes are padded to one, with a mask of the nodes that exist. Each example is one graph, so a batch of
graphs is split over the devices like any other.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

draw = np.random.default_rng(0)
sizes = draw.integers(5, 11, 2048)
nodes = np.arange(10) < sizes[:, None]
upper = np.triu(draw.random((2048, 10, 10)) < 0.25, 1)
edges = (upper | upper.swapaxes(1, 2)) & nodes[:, :, None] & nodes[:, None, :]
edges = edges.astype("float32")
triangle = (np.trace(edges @ edges @ edges, axis1=1, axis2=2) > 0).astype("int32")
train, validation = jp.data.split({"edges": edges, "nodes": nodes.astype("float32"), "label": triangle}, 0.8)


def predict(params, graphs):
    edges, nodes = graphs["edges"], graphs["nodes"][..., None]
    x = edges[..., None] * params["start"]  # features of each pair of nodes
    for layer in params["layers"]:
        along = jnp.einsum("bij,bjkf->bikf", edges, x)
        x = jax.nn.relu(jnp.concatenate([x, along, x * edges[..., None]], axis=-1) @ layer)
    pooled = (x * nodes[:, :, None] * nodes[:, None]).sum((1, 2))
    return jax.nn.relu(pooled @ params["in"]) @ params["out"]


def loss_fn(params, graphs, rng):
    logits = predict(params, graphs)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, graphs["label"]).mean()
    return loss, {"accuracy": (logits.argmax(1) == graphs["label"]).mean()}


def scores(params, graphs):
    return {"accuracy": predict(params, graphs).argmax(1) == graphs["label"]}


keys = jax.random.split(jax.random.key(0), 5)
params = {
    "start": jnp.ones(8),
    "layers": [jax.random.normal(k, (24, 8)) / 24**0.5 for k in keys[:3]],
    "in": jax.random.normal(keys[3], (8, 32)) / 8**0.5,
    "out": jax.random.normal(keys[4], (32, 2)) / 32**0.5,
}
state, step = jp.train.start(params, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), loss_fn)
run = dict(epochs=12, batch_size=64, checkpoint_dir="runs/gnn", progress=False)
state, history = jp.train.fit(state, step, train, eval_data=validation, eval_fn=scores, **run)
print(
    f"accuracy {history[-1]['eval_accuracy']:.3f}, most frequent class {max(triangle.mean(), 1 - triangle.mean()):.3f}"
)
