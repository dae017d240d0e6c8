"""`train.compare_meshes`: the same step on several meshes, and what each layer sends on each of them.

`plot_step` says of each collective which layers it is for. So what grows with the devices, and where, is one table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..._core.text import Table, plural
from .accelerators import Slice
from .compiled import construct, in_one_line, picture_of
from .plan import check_make, plan, size_text

if TYPE_CHECKING:
    from ... import viz

_CPUS = re.compile(r"cpu:([1-9]\d{0,5})")
_MOST_NAMES = 3  # of layers in a row


@dataclasses.dataclass(frozen=True, repr=False)
class MeshComparison:
    """One step on several meshes. It prints as a table: a row for what each layer sends, a column for each mesh.

    Attributes:
        steps: for each of `on` the `viz.StepGraph` of the step there. A string says why there is none.
    """

    steps: dict[str, viz.StepGraph | str]
    _pictures: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What is sent, as dicts: `layers`, `phase`, `kind`, and `bytes`, that a device sends in a step, by mesh.

        `phase` is as of a `viz.Collective`. A mesh without such a collective is not in `bytes`.
        """
        place: dict[str, int] = {}  # of each layer, from the batch to the loss
        rows: dict[tuple[str, tuple[str, ...], str], dict[str, int]] = {}
        for on, step in self.steps.items():
            for layer in () if isinstance(step, str) else step.layers:
                place.setdefault(layer.name, len(place))
            for collective in () if isinstance(step, str) else step.collectives:
                sent = rows.setdefault((collective.phase, collective.layers, collective.kind), {})
                sent[on] = sent.get(on, 0) + collective.sent_bytes

        def order(row: tuple[str, tuple[str, ...], str]) -> tuple[bool, int, int]:
            return not row[1], min((place.get(name, len(place)) for name in row[1]), default=0), len(row[1])

        return [
            {"layers": row[1], "phase": row[0], "kind": row[2], "bytes": rows[row]} for row in sorted(rows, key=order)
        ]

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that a device sends in a step, by mesh."""
        drawn = {on: step for on, step in self.steps.items() if not isinstance(step, str)}
        return {on: sum(collective.sent_bytes for collective in step.collectives) for on, step in drawn.items()}

    def plot(self, on: str) -> viz.Plot:
        """The picture of the step on one of the meshes, as of `viz.plot_step`. `ValueError` where there is none."""
        from ... import viz  # who trains does not need it

        if isinstance(reason := self.steps[on], str):
            raise ValueError(f"train.compare_meshes: no picture of {on}: {reason}")
        return viz._plot_drawn(*self._pictures[on], title=on)

    def __repr__(self) -> str:
        head, rows = self._cells()
        return str(Table(_TITLE, head, [head, *rows], most=200))

    def _repr_html_(self) -> str:
        head, rows = self._cells()
        return Table(_TITLE, head, rows, most=200)._repr_html_()

    def _cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The head of the table, and its rows."""
        drawn = [on for on, step in self.steps.items() if not isinstance(step, str)]
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            sizes = (_sent(row["bytes"][on]) if on in row["bytes"] else "" for on in drawn)
            rows.append((_names(row["layers"]), f"{row['phase']}, {row['kind']}", *sizes))
        total = self.sent_bytes
        rows.append(("all", "", *(_sent(total[on]) for on in drawn)))
        wide = len(drawn)
        for on, step in self.steps.items():
            if isinstance(step, str):
                rows.append((on, step, *("" for _ in range(wide))))
        return ("layer", "sent", *drawn), rows


_TITLE = "bytes that a device sends in a step"


def _sent(size: int) -> str:
    return size_text(size) if size >= 1000 else f"{size} B"


def _names(layers: Sequence[str]) -> str:
    if not layers:
        return "(no layer)"
    more = len(layers) - _MOST_NAMES
    return ", ".join(layers) if more <= 0 else f"{', '.join(layers[:_MOST_NAMES])} and {more} more"


def compare_meshes(make: Callable[..., Any], on: Sequence[str], **choices: Any) -> MeshComparison:
    """The same step on several meshes: what each layer sends on each.

    The bytes are those of the collectives of the compiled programs, around a ring of the devices. A bucket with the
    gradients of several layers is a row of its own.

    Args:
        make: `make(devices, **choices) -> (step, state, batch)`, as for `train.plan`.
        on: names of devices. `"v5e:2x4"` and the like, as for `train.plan`, which needs their compiler. `"cpu:8"` is
            eight CPU devices of this process (`parallel.use_cpu_devices(8)`), and needs nothing: XLA for CPUs joins and
            cuts collectives otherwise than a TPU's, so compare CPUs with CPUs.
        **choices: given to `make`.

    Raises:
        TypeError: `make` is no function.
        ValueError: there is no such slice, or there are not as many CPU devices. What `make` or a compiler raises for a
            mesh is in the table.
        RuntimeError: there is no compiler for these devices.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from jaxpar import kv, train
        >>> def make(devices):
        ...     store = kv.from_params(
        ...         {"w": jnp.zeros((64, 8))}, kind="sharded", optimizer=optax.sgd(0.1), devices=devices)
        ...     step = train.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
        ...     return step, train.create_state(store, 0), jax.ShapeDtypeStruct((16, 64), jnp.float32)
        >>> print(train.compare_meshes(make, on=["cpu:2", "cpu:4"]))
        bytes that a device sends in a step
          layer            sent                       cpu:2   cpu:4
          fullyconnected0  parameters, all-gather     1.0 kB  1.5 kB
          fullyconnected0  gradients, reduce-scatter  1.0 kB  1.5 kB
          mean0            forward, all-reduce        4 B     6 B
          all                                         2.1 kB  3.1 kB
    """
    check_make(make, "train.compare_meshes")
    if isinstance(on, str):
        raise TypeError(f"train.compare_meshes: on must be a list of meshes, got {on!r}; write [{on!r}, ...]")

    # A wrong name is said before any work.
    cpus: dict[str, tuple[Any, ...]] = {}  # the CPU devices of this process that a name asks for
    for name in on:
        if not str(name).startswith("cpu"):
            Slice(name, "train.compare_meshes")
            continue
        if (asked := _CPUS.fullmatch(name)) is None:
            raise ValueError(f"train.compare_meshes: unknown mesh {name!r}; write cpu:8 for eight CPU devices")
        devices, count = jax.devices("cpu"), int(asked[1])
        if len(devices) < count:
            raise ValueError(
                f"train.compare_meshes: {name!r} is more than the {plural(len(devices), 'CPU device')} of this "
                f"process; call jaxpar.parallel.use_cpu_devices({count}) before anything of JAX runs"
            )
        cpus[name] = tuple(devices[:count])

    pictures: dict[str, Any] = {}  # the step and the network on each, or words why there is none
    for name in on:
        try:
            picture = _on_cpus(make, cpus[name], choices) if name in cpus else plan(make, name, **choices)._picture
        except ValueError as error:
            picture = str(error)
        pictures[name] = picture
    steps = {name: picture if isinstance(picture, str) else picture[0] for name, picture in pictures.items()}
    return MeshComparison(steps, pictures)


def _on_cpus(make: Callable[..., Any], devices: tuple[Any, ...], choices: dict[str, Any]) -> Any:
    """The step and the network on devices of this process, or words why there is none."""
    try:
        step, state, batch, stages = construct(make, devices, choices)
        if len(stages) > 1:
            return "the step is several programs"
        return picture_of(step, state, batch, stages[0].traced.lower().compile())
    except Exception as error:
        return in_one_line(error)
