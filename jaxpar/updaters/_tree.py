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
