"""`plot_step`: from a training step to its picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..._core.calls import answers
from ..._core.checks import choice, describe, number
from .._draw.style import THEMES
from .._fold.known import Call
from .._fold.patterns import Rule
from .dot import StepOptions
from .profile import Profile, is_folder
from .step import read_step

if TYPE_CHECKING:
    from .picture import StepPlot

_HEATS = ("flop/byte", "memory")


@answers("plot_step")
def plot_step(
    step: Callable[..., Any],
    *args: Any,
    title: str = "step",
    heat: Literal["flop/byte", "memory"] | Profile | None = None,
    theme: Literal["light", "dark"] = "light",
    time_limit: float = 30.0,
    params_argnums: int | Sequence[int] | None = 0,
    depth: int | None = None,
    max_nodes: int | None = 200,
    repeats: bool = True,
    rules: Sequence[Rule | Call] = (),
) -> StepPlot:
    """Draw what a training step does on its devices.

    The forward pass is on the left and goes up. The backward pass is beside it and goes down. The parameters are a band
    between them, and the optimizer is on the right. What devices send to each other is purple, on the edge where the
    compiled program sends it. The step is compiled and not run.

    Args:
        step, args, params_argnums, depth, max_nodes, repeats, rules: as for `trace_step`.
        title: the text below the picture, and the name of the file that `render` writes.
        heat: what colours the layers: "flop/byte", "memory" for the bytes that are live while they run, seconds of
            each layer as a dict, or the directory of a profile of `jax.profiler.trace`.
        theme: "light" or "dark".
        time_limit: seconds that the renderer may take.

    Returns:
        A `Plot` whose `step` is the `StepGraph`. `save("step.svg")` writes it.

    Raises:
        TypeError: as for `trace_step`. A title that is no string.
        ValueError: as for `trace_step`. An unknown theme or heat, a time limit that is not above 0.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def step(params, batch):
        ...     grads = jax.grad(lambda params: (batch @ params["w"]).sum())(params)
        ...     return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        >>> plot_step(step, {"w": jnp.ones((3, 2))}, jnp.ones((5, 3))).step.devices
        1
    """
    if not isinstance(title, str):
        raise TypeError(f"plot_step: title must be a string, got {describe(title)}")
    choice(theme, "plot_step", "theme", THEMES)
    number(time_limit, "plot_step", "time_limit", "a number of seconds above 0", lambda seconds: seconds > 0)
    named = isinstance(heat, str) and heat in _HEATS
    profile = None if named else heat
    if isinstance(profile, str) and not is_folder(profile):
        raise ValueError(
            f"plot_step: heat must be one of {', '.join(_HEATS)}, a dict of layers and seconds, or the directory of a "
            f"profile, got {profile!r}"
        )
    options = (depth, max_nodes, repeats, rules)
    graph, network = read_step(step, args, params_argnums, profile, options)
    from .picture import StepPlot  # loads graphviz

    shown = str(heat) if named else "seconds" if profile is not None else None
    return StepPlot(graph, network, StepOptions(title, shown, theme), time_limit)
