"""A language model of MXNet over sentences of several lengths: its example/rnn/bucketing, read from its symbol files.

MXNet unrolls an LSTM once for each bucket, a length to which sentences are padded, and all buckets share the params.
`load_symbol` makes a model of each file. A batch has sentences of one bucket, so its length says which model computes
it, and the step compiles once for each. docs/from_mxnet.md has the script of MXNet beside it, with its numbers.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxpar as jp

BUCKETS, WORDS, BATCH = (4, 6), 30, 16
files = Path(__file__).parent / "mxnet"
models = {length: jp.mxnet.load_symbol(files / f"lstm-{length}-symbol.json") for length in BUCKETS}

# Sentences: after each word come three others, and one of them most often. Word 0 is padding.
draw = np.random.RandomState(0)
following = draw.randint(1, WORDS, (WORDS, 3))
batches = []
for number in range(80):
    length = BUCKETS[number % 2]
    sentences = np.zeros((BATCH, length + 1), np.int32)
    sentences[:, 0] = draw.randint(1, WORDS, BATCH)
    for i in range(length):
        sentences[:, i + 1] = following[sentences[:, i], draw.choice(3, BATCH, p=(0.8, 0.15, 0.05))]
    sentences[np.arange(length + 1) >= draw.randint(length - 2, length + 2, (BATCH, 1))] = 0
    batches.append({"data": sentences[:, :-1], "softmax_label": sentences[:, 1:]})
train, validation = batches[:64], batches[64:]

# The params of all buckets, as MXNet's Xavier(factor_type="in", magnitude=2.34) draws them. Biases are 0.
shapes = models[4].shapes(data=(BATCH, 4))
shapes = {name: shape for name, shape in shapes.items() if name not in models[4].inputs}
bound = {name: (2.34 / np.prod(shape[1:])) ** 0.5 if len(shape) > 1 else 0.0 for name, shape in shapes.items()}
params = {name: draw.uniform(-bound[name], bound[name], shape).astype("float32") for name, shape in shapes.items()}


def losses(params, batch):
    """The negative logarithm of the chance of each word, (sentences, words)."""
    labels = batch["softmax_label"]
    chances = models[labels.shape[1]].apply(params, {"data": batch["data"]})  # (sentences * words, WORDS)
    chosen = jnp.take_along_axis(chances, labels.reshape(-1, 1), axis=1)
    return -jnp.log(jnp.maximum(chosen, 1e-10)).reshape(labels.shape)


def loss_fn(params, batch):
    return losses(params, batch).sum(1).mean()  # over the sentences: MXNet's gradient, with its rescale_grad


def scores(params, batch):
    """The loss of a word, without padding: the logarithm of the perplexity."""
    counts = batch["softmax_label"] > 0
    return {"word_loss": ((losses(params, batch) * counts).sum(1), counts.sum(1))}


names = jp.kv.names(jp.kv.from_params(params))
sgd = jp.mxnet.sgd(0.1, momentum=0.9, wd=1e-5, wd_mult=jp.mxnet.wd_mult(names))
state, step = jp.train.start(params, sgd, loss_fn)
run = dict(epochs=4, batch_size=BATCH, checkpoint_dir="runs/mxnet_bucketing", progress=False)
state, history = jp.train.fit(state, step, train, eval_data=validation, eval_fn=scores, **run)
for record in history:
    print(f"epoch {record['epoch']} perplexity {np.exp(record['eval_word_loss']):.4f}")
