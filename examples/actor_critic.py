"""An actor and a critic learn to catch a falling ball, in a loop of their own.

The games are played by `state.params` in one compiled function, and each batch is what was played. A checkpoint holds
the state, and the games follow from the number of the step, so a resumed run plays the same games.
"""

import jax
import jax.numpy as jnp
import optax

import jaxpar as jp

ROWS, COLUMNS, GAMES, STEPS = 6, 5, 128, 150


def predict(params, seen):
    hidden = jax.nn.relu(seen @ params["in"])
    return hidden @ params["actor"], (hidden @ params["critic"])[..., 0]


def look(ball, row, paddle):
    one = jax.nn.one_hot
    return jnp.concatenate([one(ball, COLUMNS), one(row, ROWS), one(paddle, COLUMNS)], axis=-1)


@jax.jit
def play(params, rng):
    """What was seen, done and won in some games: 1 for a ball that was caught."""
    start, *moves = jax.random.split(rng, ROWS)
    ball, paddle = jax.random.randint(start, (2, GAMES), 0, COLUMNS)
    seen, actions = [], []
    for row, move in enumerate(moves):
        seen.append(look(ball, jnp.full(GAMES, row), paddle))
        actions.append(jax.random.categorical(move, predict(params, seen[-1])[0]))
        paddle = jnp.clip(paddle + actions[-1] - 1, 0, COLUMNS - 1)
    won = (ball == paddle).astype(jnp.float32)
    return {"seen": jnp.stack(seen, 1), "action": jnp.stack(actions, 1), "won": won}


def loss_fn(params, batch, rng):
    logits, value = predict(params, batch["seen"])
    log_chance = jax.nn.log_softmax(logits)
    taken = jnp.take_along_axis(log_chance, batch["action"][..., None], axis=-1)[..., 0]
    better = batch["won"][:, None] - value
    entropy = -(jnp.exp(log_chance) * log_chance).sum(-1).mean()
    actor, critic = -(taken * jax.lax.stop_gradient(better)).mean(), (better**2).mean()
    return actor + critic - 0.01 * entropy, {"won": batch["won"].mean()}


shapes = {"in": (2 * COLUMNS + ROWS, 64), "actor": (64, 3), "critic": (64, 1)}
keys = jax.random.split(jax.random.key(0), 3)
params = {name: jax.random.normal(k, s) / s[0] ** 0.5 for k, (name, s) in zip(keys, shapes.items())}
state, step = jp.train.start(params, optax.adam(1e-2), loss_fn, virtual_shards=4)
checkpoints = jp.checkpoint.Manager("runs/actor_critic")
state, _ = checkpoints.restore_latest(state) or (state, {})
metrics = {}
for number in range(int(state.step), STEPS):
    games = play(jax.device_get(state.params), jax.random.fold_in(jax.random.key(1), number))
    state, metrics = step(state, games)
    if (number + 1) % 25 == 0:
        checkpoints.save(state)
checkpoints.close()
played = play(jax.device_get(state.params), jax.random.key(2))
print(f"caught {float(played['won'].mean()):.2f} of the balls")
