"""One function on every device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from .._core.arrays import Device
from .._core.calls import answers
from .._core.checks import ENGINES, Engine, check_devices, choice
from .._core.recent import Recent, forget
from .._core.text import describe
from .._devices.emulated import wait_before_collectives
from .._devices.user_mesh import in_user_mesh


@answers("spmd")
def spmd(
    fn: Callable[..., Any],
    *,
    engine: Engine = "pmap",
    axis_name: str,
    devices: Sequence[Device] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    donate_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """Make a function that runs `fn` on every device.

    Both engines behave as `pmap`. An argument with in_axes 0 has one entry for each device. On each device, `fn` gets
    its entry without that axis. Results are stacked along axis 0.

    With several processes, `devices` may be jax.devices(), the devices of all processes. Then every process calls the
    function with the entries of its own devices and gets their results. Collectives run over all devices.

    Args:
        fn: the function for one device. Its collectives use `axis_name`.
        engine: `pmap` or `shard_map`, with the same results.
        axis_name: the name of the axis over the devices.
        devices: None: all local devices.
        in_axes: 0 (an entry for each device) or None (the same value for all), for all arguments or as a tuple with one
            for each argument.
        out_axes: the same for the results. None returns one result, which must be equal on all devices.
        donate_argnums: the numbers of the donated arguments, from 0.

    Returns:
        A compiled function of the stacked arguments. It raises `ValueError` if the first axis of an argument is not the
        number of this process's devices, or if a donated argument is missing.

    Raises:
        TypeError: `devices` is not a list of devices.
        ValueError: the engine is unknown; `devices` is empty or repeats a device; `donate_argnums` has a negative
            number.

    Example:
        >>> total = spmd(lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=jax.devices()[:2])
        >>> total(jnp.array([1.0, 2.0])).tolist()
        [3.0, 3.0]
    """
    if not callable(fn):
        raise TypeError(f"spmd: expected the function of one device, got {describe(fn)}")
    choice(engine, "spmd", "engine", ENGINES)
    chosen = check_devices(devices, "spmd")
    donate = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    if min(donate, default=0) < 0:
        raise ValueError(f"spmd: donate_argnums counts arguments from 0, got {donate_argnums}")
    run = _pmap if engine == "pmap" else _shard_map
    compiled = run(fn, axis_name, chosen, in_axes, out_axes, donate)

    own = sum(d.process_index == jax.process_index() for d in chosen)

    @in_user_mesh
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if max(donate, default=-1) >= len(args):  # jax sees *args, so it would donate nothing and say nothing
            raise ValueError(f"spmd: donate_argnums has {max(donate)}, but the call has {len(args)} arguments")
        _check_entries(args, in_axes, own)
        wait_before_collectives(args, chosen)
        return compiled(*args)

    return call


def _make_pmap(
    fn: Callable[..., Any],
    axis_name: str,
    devices: Sequence[Device],
    in_axes: Any,
    out_axes: Any,
    donate: tuple[int, ...],
) -> Callable[..., Any]:
    @functools.wraps(fn)
    def own(*args: Any) -> Any:
        return fn(*args)

    run = jax.pmap(own, axis_name, in_axes=in_axes, out_axes=out_axes, devices=devices, donate_argnums=donate)
    weakref.finalize(run, forget, own).atexit = False
    return run


_pmap = Recent(_make_pmap)  # the same function is compiled once, as by `jax.pmap` itself


def _shard_map(
    fn: Callable[..., Any],
    axis_name: str,
    devices: Sequence[Device],
    in_axes: Any,
    out_axes: Any,
    donate: tuple[int, ...],
) -> Callable[..., Any]:
    mesh = Mesh(np.array(devices), (axis_name,))
    in_specs, out_specs = _specs(in_axes, axis_name), _specs(out_axes, axis_name)

    def run(*args: Any) -> Any:
        def body(*args: Any) -> Any:
            out = fn(*_over(lambda x: x[0], args, in_axes))
            return _over(lambda x: jnp.asarray(x)[None], out, out_axes)

        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)

    compiled = jax.jit(run, donate_argnums=donate)
    if not mesh.is_multi_process:
        return compiled

    def of_this_process(*args: Any) -> Any:
        from jax.experimental import multihost_utils

        out = compiled(*multihost_utils.host_local_array_to_global_array(args, mesh, in_specs))
        return multihost_utils.global_array_to_host_local_array(out, mesh, out_specs)

    return of_this_process


def _over(change: Callable[[Any], Any], tree: Any, axes: Any) -> Any:
    """The tree with `change` applied to the leaves that have axis 0."""
    if isinstance(axes, tuple) and isinstance(tree, tuple):
        return tuple(_over(change, t, a) for t, a in zip(tree, axes, strict=True))
    return tree if axes is None else jax.tree.map(change, tree)


def _specs(axes: Any, axis_name: str) -> Any:
    if isinstance(axes, tuple):
        return tuple(_specs(a, axis_name) for a in axes)
    if axes not in (0, None):
        raise ValueError(f"spmd: engine 'shard_map' takes axes 0 and None, got {describe(axes)}; use engine='pmap'")
    return P() if axes is None else P(axis_name)


def _check_entries(args: tuple[Any, ...], in_axes: Any, count: int) -> None:
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    for i, (arg, axis) in enumerate(zip(args, axes, strict=True)):
        for leaf in jax.tree.leaves(arg) if axis == 0 else ():
            if np.shape(leaf)[:1] != (count,):
                wanted = f"one entry for each of the {count} devices along its first axis"
                hint = f"reshape a batch to ({count}, n // {count}, ...)"
                raise ValueError(f"spmd: argument {i} must have {wanted}, got shape {np.shape(leaf)}; {hint}")
