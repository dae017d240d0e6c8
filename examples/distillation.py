"""Distillation: a small student learns from a large teacher that does not change.

The teacher is a part of the params and `frozen`: it has no gradient and no optimizer state, and devices send nothing of
it.
"""

import jax
import numpy as np
import optax

import jaxpar as jp

draw = np.random.default_rng(0)
centers = draw.normal(size=(4, 32)).astype("float32")
labels = draw.integers(0, 4, 1024)
x = centers[labels] + 1.5 * draw.normal(size=(1024, 32)).astype("float32")
data, test = jp.data.split({"x": x, "label": labels}, 0.75)


def predict(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


def learn(params, batch, rng):
    loss = optax.softmax_cross_entropy_with_integer_labels(predict(params, batch["x"]), batch["label"])
    return loss.mean(), {}


def distill(params, batch, rng, heat=3.0):
    wanted = jax.nn.softmax(predict(params["teacher"], batch["x"]) / heat)
    logits = predict(params["student"], batch["x"]) / heat
    return optax.softmax_cross_entropy(logits, wanted).mean() * heat**2, {}


def scores(params, batch):
    student, teacher = (predict(params[name], batch["x"]).argmax(1) for name in ("student", "teacher"))
    right = {"student": student == batch["label"], "teacher": teacher == batch["label"]}
    return {**right, "agree": student == teacher}


def init(rng, width):
    first, second = jax.random.split(rng)
    return {"in": jax.random.normal(first, (32, width)) / 6, "out": jax.random.normal(second, (width, 4)) / width**0.5}


run = dict(batch_size=64, progress=False)
state, step = jp.train.start(init(jax.random.key(0), 256), optax.adam(3e-3), learn)
state, _ = jp.train.fit(state, step, data, epochs=4, checkpoint_dir="runs/distillation/teacher", **run)

params = {"teacher": jax.device_get(state.params), "student": init(jax.random.key(1), 8)}
state, step = jp.train.start(params, optax.adam(1e-2), distill, frozen="teacher")
run = dict(**run, eval_data=test, eval_fn=scores, checkpoint_dir="runs/distillation/student")
state, history = jp.train.fit(state, step, data, epochs=12, **run)
last = history[-1]
print(f"teacher {last['eval_teacher']:.3f}, student {last['eval_student']:.3f}, equal answers {last['eval_agree']:.3f}")
