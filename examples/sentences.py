"""Tags for the words of sentences of several lengths.

Sentences are padded, and a mask says which words count. The loss is a sum over words and their number, `(sum, weight)`,
so every word counts alike, whichever device it is on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

draw = np.random.default_rng(0)
words = draw.integers(1, 50, (1024, 12))
lengths = draw.integers(3, 13, 1024)
mask = np.arange(12) < lengths[:, None]
words = np.where(mask, words, 0)
before = np.pad(words, ((0, 0), (1, 0)))[:, :-1]
kinds = draw.integers(0, 3, 50)
tags = np.where(kinds[before] == 2, 0, kinds[words])  # a tag depends on the word and on the one before
train, validation = jp.data.split({"words": words, "tags": tags, "mask": mask.astype("float32")}, 0.8)


def predict(params, words):
    def read(memory, word):
        memory = jnp.tanh(word @ params["word"] + memory @ params["memory"])
        return memory, memory

    embedded = params["table"][words].swapaxes(0, 1)
    start = jnp.zeros((len(words), params["memory"].shape[0]))
    states = jax.lax.scan(read, start, embedded)[1].swapaxes(0, 1)
    return states @ params["out"]


def loss_fn(params, batch, rng):
    logits, mask = predict(params, batch["words"]), batch["mask"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tags"])
    correct = (logits.argmax(-1) == batch["tags"]) * mask
    return ((losses * mask).sum(), mask.sum()), {"accuracy": (correct.sum(), mask.sum())}


def scores(params, batch):
    correct = (predict(params, batch["words"]).argmax(-1) == batch["tags"]) * batch["mask"]
    return {"accuracy": (correct.sum(1), batch["mask"].sum(1))}


shapes = {"table": (50, 24), "word": (24, 48), "memory": (48, 48), "out": (48, 3)}
keys = jax.random.split(jax.random.key(0), 4)
params = {name: jax.random.normal(k, s) / s[0] ** 0.5 for k, (name, s) in zip(keys, shapes.items())}
state, step = jp.train.start(params, optax.adam(1e-2), loss_fn)
run = dict(epochs=12, batch_size=64, checkpoint_dir="runs/sentences", progress=False)
state, history = jp.train.fit(state, step, train, eval_data=validation, eval_fn=scores, **run)
print(f"accuracy by word {history[-1]['eval_accuracy']:.3f}")
