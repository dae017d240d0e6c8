"""One function on every device, by `pmap`, or by a `shard_map` that behaves as `pmap` does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from .._core import checks, host
from .._core.arrays import Device, PyTree
from .._core.recent import Recent, forget
from .._devices.mesh import wait_before_collectives
from .._devices.user_mesh import in_user_mesh


def spmd(
    fn: Callable[..., Any],
    *,
    engine: checks.Engine = "pmap",
    axis_name: str,
    devices: Sequence[Device] | None = None,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
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
        donate_argnums: the numbers of the donated arguments, from 0. One that a call does not have donates nothing.

    Returns:
        A compiled function of the stacked arguments. It raises `ValueError` if the first axis of an argument is not the
        number of this process's devices.

    Raises:
        ValueError: the engine is unknown; `devices` is empty or repeats a device.

    Example:
        >>> total = spmd(lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=jax.devices()[:2])
        >>> total(jnp.array([1.0, 2.0])).tolist()
        [3.0, 3.0]
    """
    checks.choice(engine, "spmd", "engine", checks.ENGINES)
    chosen = checks.devices(jax.local_devices() if devices is None else devices, "spmd")
    donate = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    options: dict[str, Any] = {
        "axis_name": axis_name,
        "devices": chosen,
        "in_axes": in_axes,
        "out_axes": out_axes,
        "donate_argnums": donate,
    }
    compiled = _pmap(fn, options) if engine == "pmap" else _shard_map(fn, **options)
    local_count = sum(d.process_index == jax.process_index() for d in chosen)

    @in_user_mesh
    @functools.wraps(fn)
    def call(*args: PyTree) -> PyTree:
        # Of 8 entries for 4 devices a `shard_map` would give each device the first of its two, without a word, and
        # `pmap` takes 2 entries for 4 devices. Jax itself says what is wrong with a tuple of axes of another length.
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        for i, (arg, axis) in enumerate(zip(args, axes, strict=False)):
            for leaf in jax.tree.leaves(arg) if axis == 0 else ():
                if np.shape(leaf)[:1] != (local_count,):
                    raise ValueError(
                        f"spmd: argument {i} must have one entry for each of the {local_count} devices, got shape "
                        f"{np.shape(leaf)}; reshape it to ({local_count}, n // {local_count}, ...)"
                    )
        args = host.own_copies(args, "spmd: args")
        wait_before_collectives(args, chosen)
        return compiled(*args)

    return call


@Recent  # the same function is compiled once, as by `jax.pmap` itself
def _pmap(fn: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    # JAX forgets this function together with `run`. The user's own may be in other calls of `jax.pmap`.
    @functools.wraps(fn)
    def mapped(*args: PyTree) -> PyTree:
        return fn(*args)

    run = jax.pmap(mapped, **options)
    weakref.finalize(run, forget, mapped).atexit = False  # when the process ends nothing has to be released
    return run


def _shard_map(
    fn: Callable[..., Any],
    *,
    axis_name: str,
    devices: tuple[Device, ...],
    in_axes: PyTree,
    out_axes: PyTree,
    donate_argnums: tuple[int, ...],
) -> Callable[..., Any]:
    mesh = Mesh(np.array(devices), (axis_name,))
    in_specs, out_specs = _specs(in_axes, axis_name), _specs(out_axes, axis_name)

    def run(*args: PyTree) -> PyTree:
        # `shard_map` gives each device (1, ...) of a stacked argument, and `fn` is for one device, as with `pmap`.
        def body(*args: PyTree) -> PyTree:
            out = fn(*_map_stacked(lambda x: x[0], args, in_axes))
            return _map_stacked(lambda x: jnp.asarray(x)[None], out, out_axes)

        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)

    compiled = jax.jit(run, donate_argnums=donate_argnums)
    if not mesh.is_multi_process:
        return compiled

    # As with `pmap`, each process gives and gets the entries of its own devices. `jit` takes arrays over all of them.
    def of_this_process(*args: PyTree) -> PyTree:
        from jax.experimental import multihost_utils

        out = compiled(*multihost_utils.host_local_array_to_global_array(args, mesh, in_specs))
        return multihost_utils.global_array_to_host_local_array(out, mesh, out_specs)

    return of_this_process


def _map_stacked(change: Callable[[jax.Array], jax.Array], tree: PyTree, axes: PyTree) -> PyTree:
    """The tree with `change` applied to the leaves that have axis 0. `axes` may be a prefix of it."""

    def map_part(axis: int | None, subtree: PyTree) -> PyTree:
        return subtree if axis is None else jax.tree.map(change, subtree)

    return jax.tree.map(map_part, axes, tree, is_leaf=lambda axis: axis is None)


def _specs(axes: PyTree, axis_name: str) -> PyTree:
    """Axes of `pmap` as specs of `shard_map`."""
    if isinstance(axes, tuple):
        return tuple(_specs(a, axis_name) for a in axes)
    if axes not in (0, None):
        raise ValueError(
            f"spmd: engine 'shard_map' takes axes 0 and None, got {checks.describe(axes)}; use engine='pmap'"
        )
    return P() if axes is None else P(axis_name)
