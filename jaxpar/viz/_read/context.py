"""Where an equation is: the calls, scopes and loops around it."""

from __future__ import annotations

from typing import Any, NamedTuple

from .source import Frame, Sources, name_stack


class Context(NamedTuple):
    """Where an equation is, as far as its own jaxpr and those around it say."""

    stack: tuple[Frame, ...] = ()
    scope: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    backward: bool = False
    tangent: bool = False
    times: int = 1
    enclosing: tuple[int, ...] = ()
    again: bool = False

    def of(self, eqn: Any, sources: Sources) -> Context:
        """The context of an equation in a jaxpr of this context."""
        info = getattr(eqn, "source_info", None)
        names, backward, tangent, again = name_stack(info)
        return Context(
            self.stack + sources.stack(info),
            self.scope + names,
            self.levels + (-1,) * len(names),
            (self.backward or backward) and not again,
            self.tangent or tangent,
            self.times,
            self.enclosing,
            self.again or again,
        )

    def in_library(self, name: str, file: str, number: int) -> Context:
        """The context inside a function of JAX. Its number is negative and its own, as it is a call of its own."""
        return self._replace(stack=(*self.stack, Frame("jax", "jax", name, file, 0, number, number)))
