"""A table with numbers, categories and missing values, with early stopping at the best epoch.

A data set is a dict of columns. `split` cuts the rows, and the means for the missing values are those of the training
rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

draw = np.random.default_rng(0)
table = {
    "age": draw.integers(18, 80, 2048).astype("float32"),
    "income": draw.lognormal(10, 0.5, 2048).astype("float32"),
    "city": draw.integers(0, 6, 2048),
}
chance = 1 / (1 + np.exp(-(table["age"] - 50) / 10 - np.float32([-2, -1, 0, 0, 1, 2])[table["city"]]))
table["bought"] = (draw.random(2048) < chance).astype("int32")
table["income"][draw.random(2048) < 0.1] = np.nan
train, validation = jp.data.split(table, 0.75)
middle = {name: np.nanmean(train[name]) for name in ("age", "income")}
scale = {name: np.nanstd(train[name]) for name in ("age", "income")}


def predict(params, rows):
    columns = [jnp.nan_to_num((rows[name] - middle[name]) / scale[name]) for name in ("age", "income")]
    missing = jnp.isnan(rows["income"]).astype("float32")
    x = jnp.concatenate([jnp.stack([*columns, missing], axis=1), params["city"][rows["city"]]], axis=1)
    return (jax.nn.relu(x @ params["in"]) @ params["out"])[:, 0]


def loss_fn(params, rows, rng):
    return optax.sigmoid_binary_cross_entropy(predict(params, rows), rows["bought"]).mean(), {}


def scores(params, rows):
    logits = predict(params, rows)
    loss = optax.sigmoid_binary_cross_entropy(logits, rows["bought"])
    return {"loss": loss, "accuracy": (logits > 0) == rows["bought"]}


keys = jax.random.split(jax.random.key(0), 3)
shapes = {"city": (6, 3), "in": (6, 32), "out": (32, 1)}
params = {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items())}
state, step = jp.train.start(params, optax.adamw(1e-2), loss_fn)
stop = jp.train.EarlyStopping("eval_loss", patience=3)
run = dict(epochs=30, batch_size=64, checkpoint_dir="runs/tabular", callbacks=stop, progress=False)
state, history = jp.train.fit(state, step, train, eval_data=validation, eval_fn=scores, **run)
print(f"stopped after epoch {history[-1]['epoch']}, accuracy {history[-1]['eval_accuracy']:.3f}")
