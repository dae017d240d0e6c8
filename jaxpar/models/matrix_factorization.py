"""Matrix factorization for recommenders: a score is the inner product of two embeddings."""

import jax

from .._core import checks
from .._core.transfers import allows_transfers

_WHERE = "matrix_factorization"


@allows_transfers
def init(rng: jax.Array | int, users: int, items: int, k: int) -> dict[str, jax.Array]:
    """Two embedding tables drawn from N(0, 1/k), float32.

    Args:
        rng: a random key, or an int that makes one.
        users, items: the number of users and of items.
        k: the length of an embedding.

    Returns:
        `{"user": (users, k), "item": (items, k)}`.

    Example:
        >>> {name: table.shape for name, table in init(jax.random.key(0), 10, 5, 4).items()}
        {'user': (10, 4), 'item': (5, 4)}
    """
    for name, value in {"users": users, "items": items, "k": k}.items():
        checks.whole_number(value, f"{_WHERE}.init", name)
    rng = checks.random_key(rng, f"{_WHERE}.init")
    rng_user, rng_item = jax.random.split(rng)
    scale = k**-0.5
    return {
        "user": scale * jax.random.normal(rng_user, (users, k)),
        "item": scale * jax.random.normal(rng_item, (items, k)),
    }


def apply(params: dict[str, jax.Array], user_ids: jax.Array, item_ids: jax.Array) -> jax.Array:
    """The score of each pair of a user and an item.

    Args:
        params: from `init`.
        user_ids, item_ids: (n,) integers.

    Returns:
        (n,) scores, in the dtype of the tables.

    Example:
        >>> import jax.numpy as jnp
        >>> apply(init(jax.random.key(0), 10, 5, 4), jnp.array([0, 1]), jnp.array([4, 4])).shape
        (2,)
    """
    return (params["user"][user_ids] * params["item"][item_ids]).sum(axis=-1)


def __dir__() -> list[str]:
    return ["apply", "init"]
