"""Devices: emulating them, spreading a batch over them, summing over them, running one function on all."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from . import _check, kv
from ._pmapped import forget
from ._recent import Recent
from ._settle import settle
from ._store import copied, mesh_of
from ._types import Device

Engine = Literal["pmap", "shard_map"]
ENGINES: tuple[Engine, ...] = ("pmap", "shard_map")


def use_cpu_devices(n: int) -> None:
    """Makes JAX run on `n` emulated CPU devices. To be called before the first use of JAX.

    In a notebook this belongs into the first cell; running that cell again does no harm. Other platforms are
    switched off: leave the call out where there are GPUs to train on.

    Args:
        n: how many, at least 1. They share the cores of the machine.

    Raises:
        ValueError: `n` is no positive int.
        RuntimeError: JAX runs already, with other devices.

    Example:
        >>> use_cpu_devices(8)
        >>> len(jax.devices())
        8
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"use_cpu_devices: the number of devices must be an int of 1 or more, got {n!r}")
    try:
        jax.config.update("jax_num_cpu_devices", int(n))
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:
        devices = jax.devices()
        if len(devices) == n and devices[0].platform == "cpu":
            return
        raise RuntimeError(
            f"use_cpu_devices({n}): JAX runs already, on {len(devices)} {devices[0].platform} device(s), and takes "
            "no other number now; restart the Python process or the notebook's kernel and call this first"
        ) from error


def check_devices(devices: Sequence[Device] | None, what: str) -> tuple[Device, ...]:
    """The devices as a tuple, all local ones for None; `ValueError` where there is none or one stands twice."""
    return _check.devices(jax.local_devices() if devices is None else devices, what)


def _check_own(devices: Iterable[Device], what: str) -> None:
    """`ValueError` for a device of another process, to which nothing can be sent from here."""
    for d in devices:
        if d.process_index != jax.process_index():
            raise ValueError(
                f"{what}: {d} belongs to process {d.process_index} and this is process {jax.process_index()}; give "
                "devices of this process, jax.local_devices()"
            )


def split_and_load(data: Any, devices: Sequence[Device], *, even_split: bool = True) -> list[Any]:
    """Splits a batch along its first axis and puts one part on each device, as gluon's function of this name.

    Args:
        data: an array with a first axis of n examples, or a pytree of such arrays. In several processes each
            gives what it has loaded for its own devices.
        devices: k devices, of this process.
        even_split: whether n must be divisible by k. False: the first n % k parts are one example larger
            (10 on 4 devices: 3, 3, 2, 2).

    Returns:
        A list of k parts, part i on device i.

    Raises:
        ValueError: n is not divisible by k and `even_split`; arrays of different length; a device of another
            process.

    Example:
        >>> [part.shape for part in split_and_load(jnp.zeros((8, 3)), jax.devices()[:4])]
        [(2, 3), (2, 3), (2, 3), (2, 3)]
    """
    devices = _check.devices(devices, "split_and_load")
    _check_own(devices, "split_and_load")
    n, k = batch_length(data, "split_and_load"), len(devices)
    if even_split and n % k:
        raise ValueError(
            f"split_and_load: a batch of {n} cannot be divided by {k} devices; use a batch of {n // k * k or k} or "
            f"{-(-n // k) * k}, or even_split=False"
        )
    ends = np.cumsum([n // k + (i < n % k) for i in range(k)])
    parts = [jax.tree.map(lambda x, i=i: x[ends[i - 1] if i else 0 : ends[i]], data) for i in range(k)]
    return [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]


def batch_length(data: Any, what: str, axis: int = 0) -> int:
    """The length of the first axis that all arrays of a batch share; `axis` 1: of the second, of several batches."""
    lengths = {np.shape(leaf)[axis : axis + 1] for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1 or () in lengths:
        shapes = [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(data)]
        which = "second axis, the one after that of the steps" if axis else "first axis"
        raise ValueError(f"{what}: the arrays of a batch must share the length of their {which}, got {shapes}")
    return next(iter(lengths))[0]


def copy_to(params: Any, device: Device) -> Any:
    """A copy of a pytree of arrays on one device, of this process: the articles' `get_params`.

    Example:
        >>> copy_to({"w": jnp.ones(2)}, jax.devices()[0])["w"].tolist()
        [1.0, 1.0]
    """
    _check_own([device], "copy_to")
    return copied(params, SingleDeviceSharding(device))


def replicate(tree: Any, devices: Sequence[Device]) -> Any:
    """A pytree with a copy of every array on each device, as arrays over all of them.

    Args:
        tree: a pytree of arrays.
        devices: one or more different devices. They may belong to several processes, which must then all call
            this with the same arrays.

    Returns:
        The pytree as fully replicated arrays, ready for a program over these devices.

    Example:
        >>> replicate({"w": jnp.ones(2)}, jax.devices()[:2])["w"].sharding.is_fully_replicated
        True
    """
    return copied(tree, NamedSharding(mesh_of(check_devices(devices, "replicate")), P()))


def allreduce(values: Sequence[Any]) -> list[jax.Array]:
    """The sum of the values, once on the device of each of them.

    Args:
        values: arrays of one shape and dtype, on any devices of this process. (Over processes a store of kind
            `dist_sync` sums.)

    Returns:
        A list as long as `values`; entry i is the sum, on the device of `values[i]`. The given arrays stay as
        they are (MXNet's article changed them in place).

    Raises:
        ValueError: no values, or values of different shapes.
        TypeError: what is no array, or dtypes that differ.

    Example:
        >>> first, second = jax.devices()[:2]
        >>> a, b = allreduce([jax.device_put(jnp.ones(2), first), jax.device_put(jnp.ones(2), second)])
        >>> a.tolist(), b.devices() == {second}
        ([2.0, 2.0], True)
    """
    arrays = [_check.array(v, f"allreduce: value {i}") for i, v in enumerate(values)]
    if not arrays:
        raise ValueError("allreduce: give at least one value")
    for i, array in enumerate(arrays):
        _check_own(array.devices(), f"allreduce: value {i}")
        _check.same_shape(array, arrays[0].shape, f"allreduce: value {i}")
        if array.dtype != arrays[0].dtype:
            raise TypeError(f"allreduce: value {i}: expected dtype {arrays[0].dtype}, got {array.dtype}")
    like = jax.device_put(jnp.zeros(arrays[0].shape, arrays[0].dtype), arrays[0].sharding)
    store = kv.push(kv.init(kv.create("device"), 0, like), 0, arrays)
    devices = [next(iter(a.devices())) for a in arrays]
    unique = list(dict.fromkeys(devices))
    copies = dict(zip(unique, kv.pull(store, 0, devices=unique), strict=True))
    return [copies[d] for d in devices]


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
    """Runs one function on every device, each with its own slice, by `jax.pmap` or by `jax.shard_map`.

    Both engines have the meaning of `pmap`: an argument with axis 0 has one entry for each device, and the
    function sees its entry without that axis; results are stacked along it. Collectives in the function take
    `axis_name`.

    In several processes `devices` may be those of all of them, jax.devices(). Then every process calls the
    function with the entries of its own devices and gets back theirs, while collectives run over all.

    Args:
        fn: the function of one device.
        engine: `pmap` or `shard_map`; same results.
        axis_name: the name of the axis over the devices.
        devices: None takes all local ones.
        in_axes: 0 (an entry for each device) or None (the same for all), for all arguments, or a tuple with
            one of them for each.
        out_axes: the same for the results; None asks for a result that is equal on all devices.
        donate_argnums: arguments whose memory the results may take.

    Returns:
        A compiled function of the stacked arguments.

    Raises:
        ValueError: an unknown engine; an argument whose first axis is not the number of this process's devices.

    Example:
        >>> total = spmd(lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=jax.devices()[:2])
        >>> total(jnp.array([1.0, 2.0])).tolist()
        [3.0, 3.0]
    """
    check_engine(engine, "spmd")
    chosen = check_devices(devices, "spmd")
    donate = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    run = _pmapped if engine == "pmap" else _shard_mapped
    compiled = run(fn, axis_name, chosen, in_axes, out_axes, donate)

    own = sum(d.process_index == jax.process_index() for d in chosen)

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        _check_entries(args, in_axes, own)
        settle(args, chosen)
        return compiled(*args)

    return call


def check_engine(engine: str, what: str) -> None:
    if engine not in ENGINES:
        raise ValueError(f"{what}: unknown engine {engine!r}; known are {', '.join(ENGINES)}")


def _make_pmapped(
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


_pmapped = Recent(_make_pmapped)  # the same function is compiled once, as by `jax.pmap` itself


def _shard_mapped(
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
    """`change` at the leaves that have axis 0."""
    if isinstance(axes, tuple) and isinstance(tree, tuple):
        return tuple(_over(change, t, a) for t, a in zip(tree, axes, strict=True))
    return tree if axes is None else jax.tree.map(change, tree)


def _specs(axes: Any, axis_name: str) -> Any:
    if isinstance(axes, tuple):
        return tuple(_specs(a, axis_name) for a in axes)
    return P() if axes is None else P(axis_name)


def _check_entries(args: tuple[Any, ...], in_axes: Any, count: int) -> None:
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    for i, (arg, axis) in enumerate(zip(args, axes, strict=True)):
        for leaf in jax.tree.leaves(arg) if axis == 0 else ():
            if np.shape(leaf)[:1] != (count,):
                raise ValueError(
                    f"spmd: argument {i} must have one entry for each of the {count} devices along its first axis, "
                    f"got shape {tuple(np.shape(leaf))}; reshape a batch to ({count}, n // {count}, ...)"
                )
