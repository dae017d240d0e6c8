"""A graph network after Gilmer et al. in plain JAX: three layers of message passing, one number for each graph."""

import jax
import jax.numpy as jnp

NODES, EDGES, GRAPHS, ATOMS, BONDS, WIDTH, LAYERS = 2048, 4352, 128, 119, 8, 128, 3


def linear_init(inputs, outputs):
    return {"w": jnp.zeros((inputs, outputs)), "b": jnp.zeros(outputs)}


def init():
    layer = {"message": linear_init(3 * WIDTH, WIDTH), "update": linear_init(2 * WIDTH, WIDTH)}
    return {
        "atoms": jnp.zeros((ATOMS, WIDTH)),
        "bonds": jnp.zeros((BONDS, WIDTH)),
        "layers": [layer] * LAYERS,
        "readout": [linear_init(WIDTH, WIDTH), linear_init(WIDTH, 1)],
    }


def linear(params, x):
    return x @ params["w"] + params["b"]


def message_passing(params, nodes, edges, senders, receivers):
    inputs = jnp.concatenate([nodes[senders], nodes[receivers], edges], axis=-1)
    messages = jax.nn.relu(linear(params["message"], inputs))
    gathered = jax.ops.segment_sum(messages, receivers, num_segments=nodes.shape[0])
    update = linear(params["update"], jnp.concatenate([nodes, gathered], axis=-1))
    return nodes + jax.nn.relu(update)


def apply(params, graph):
    nodes, edges = params["atoms"][graph["atom"]], params["bonds"][graph["bond"]]
    for layer in params["layers"]:
        nodes = message_passing(layer, nodes, edges, graph["senders"], graph["receivers"])
    pooled = jax.ops.segment_sum(nodes, graph["graph_of_node"], num_segments=GRAPHS)
    hidden = jax.nn.relu(linear(params["readout"][0], pooled))
    return linear(params["readout"][1], hidden)[:, 0]


def gnn():
    lengths = {"atom": NODES, "bond": EDGES, "senders": EDGES, "receivers": EDGES, "graph_of_node": NODES}
    graph = {name: jax.ShapeDtypeStruct((length,), jnp.int32) for name, length in lengths.items()}
    return apply, (jax.eval_shape(init), graph), {"title": "a graph neural network"}
