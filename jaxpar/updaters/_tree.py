"""Optax transforms of a whole pytree of params, with one state for all of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ._evaluated import Lookahead, evaluated

if TYPE_CHECKING:
    import optax

Tree = Any  # a pytree of params, with None in place of leaves that have no gradient


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands in a pytree for a param. It has no leaves, so functions that map over the params copy it."""

    key: int


class UnknownOwners(Exception):
    """Why nobody can tell which leaf of an optimizer's state belongs to which param."""


@dataclasses.dataclass(frozen=True)
class TreeOptimizer:
    """An optax transform that sees all params at once. `kv.from_params(params, optimizer=tx)` makes it.

    The same `tx` object makes an equal optimizer, another `optax.sgd(0.1)` does not.

    Attributes:
        tx: the transform.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv
        >>> tx = optax.masked(optax.sgd(0.5), {"w": True, "b": False})
        >>> store = kv.from_params({"w": jnp.ones(2), "b": jnp.ones(1)}, optimizer=tx)
        >>> store.updater == TreeOptimizer(tx)
        True
    """

    tx: optax.GradientTransformation

    def init(self, params: Tree) -> Any:
        """The state before the first update."""
        import optax

        state = self.tx.init(params)
        return Lookahead(state, params) if isinstance(state, optax.LookaheadState) else state

    def update(self, grads: Tree, state: Any, params: Tree, value: jax.Array | None = None) -> tuple[Tree, Any]:
        """The next params and the next state. The params keep their dtypes.

        Args:
            value: the loss, float32 scalar, if it is known. A transform that takes `value=` or `grad=` gets the loss
                and the gradients.

        Raises:
            TypeError: the transform needs an argument that is not there.
        """
        import optax

        if isinstance(state, Lookahead):
            both = optax.LookaheadParams(fast=params, slow=state.slow)
            updates, inner = self._updates(grads, state.state, both, value)
            both = optax.apply_updates(both, updates)
            return both.fast, Lookahead(inner, both.slow)  # pyright: ignore[reportAttributeAccessIssue]
        updates, state = self._updates(grads, state, params, value)
        return optax.apply_updates(params, updates), state

    def owners(self, params: Tree) -> list[int | None]:
        """For each leaf of the state the position of the param that it belongs to. None: to no single one.

        The state is a part of pytrees with the structure of the params, and the rest. `init` is evaluated on params
        that have no leaves. What then stands in its place in the state belongs to the param. Nothing is computed.

        Args:
            params: shapes and dtypes.

        Raises:
            UnknownOwners: `init` needs the params themselves, or puts several of them into one array.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> TreeOptimizer(optax.adam(0.1)).owners({"mu": jnp.ones(2), "nu": jnp.ones(3)})  # count, mu, nu
            [None, 0, 1, 0, 1]
        """
        structure = jax.tree.structure(params)
        found: list[int | None] = []

        def note(place: Any, part: Any) -> None:
            found.extend([place.key if isinstance(place, _Place) else None] * len(jax.tree.leaves(part)))
            if not isinstance(place, _Place) and place.shape != part.shape:
                raise UnknownOwners(f"its state has an array for several params together, of shape {part.shape}")

        state = jax.eval_shape(self.init, params)
        try:
            places = jax.eval_shape(self.init, structure.unflatten(map(_Place, range(structure.num_leaves))))
            jax.tree.map(note, places, state, is_leaf=lambda x: isinstance(x, _Place))
        except UnknownOwners:
            raise
        except Exception as error:  # any error is the optimizer's own
            first = str(error).strip().partition("\n")[0][:200]
            raise UnknownOwners(
                f"its init does not map over the params (jax.tree.map): {type(error).__name__}: {first}"
            ) from error
        return found

    def evaluated(self, state: Any, params: Tree) -> Tree:
        """The params to evaluate, where these are others than those that are trained."""
        return evaluated(state, params)

    def reads_loss(self, params: Tree) -> bool:
        """Whether an update depends on the loss. Nothing is computed."""

        def update(value: jax.Array, grads: Tree, state: Any, params: Tree) -> Any:
            return self.update(grads, state, params, value)

        specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        state = jax.eval_shape(self.init, specs)
        traced = jax.make_jaxpr(update)(jax.ShapeDtypeStruct((), jnp.float32), specs, state, specs).jaxpr
        read = [v for eqn in traced.eqns for v in eqn.invars] + list(traced.outvars)
        return any(v is traced.invars[0] for v in read if not isinstance(v, Literal))

    def _updates(self, grads: Tree, state: Any, params: Tree, value: jax.Array | None) -> tuple[Tree, Any]:
        import optax

        plain = isinstance(self.tx, optax.GradientTransformation)  # `optax.MultiSteps` is none
        update = optax.with_extra_args_support(self.tx).update if plain else self.tx.update
        known = {} if value is None else {"value": value, "grad": grads}
        try:
            try:
                return update(grads, state, params, **known)
            except TypeError as error:
                if not known or "unexpected keyword argument" not in str(error):
                    raise
                return update(grads, state, params)  # `optax.contrib.sam` takes no other arguments
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise TypeError(
                f"this optimizer needs more than gradients ({error}); a training step (train.make_train_step) gives "
                "value=, the loss, and grad=, and nothing else; a push gives neither"
            ) from error
