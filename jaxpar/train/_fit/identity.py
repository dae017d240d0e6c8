"""Which run a call of `fit` is: what decides its numbers, each as a short hash, by names for people."""

from __future__ import annotations

import dataclasses
import platform
import secrets
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import kv
from ..._core.arrays import is_prng_key
from ..._store.store import specs_of
from .._callbacks.fingerprint import fingerprint
from .._step.state import TrainState
from .._step.train_step import TrainStep

if TYPE_CHECKING:
    from .run import Run


def describe(run: Run, state: TrainState) -> dict[str, Any]:
    """The model's shapes, data, seed, optimizer, loss, options of the step, and batch size of a run.

    What cannot be known is None: the data of an iterable, before it is read.
    """
    leaves = jax.tree_util.tree_leaves_with_path((specs_of(state.store), state.model_state))
    shapes = [(jax.tree_util.keystr(path), tuple(x.shape), str(x.dtype)) for path, x in leaves]
    # The number of devices is not in it: a run that goes on elsewhere is the same run.
    step, options = run.step, dict[str, Any]()
    if isinstance(step, TrainStep):  # else it is the user's own function
        of_device = step.device_step
        names = [field.name for field in dataclasses.fields(of_device) if field.name != "loss_fn"]
        options = {name: getattr(of_device, name) for name in names}
        # What computes the same is described alike, however the user has written it: in which order, by which pattern
        # of names, as a type or its name.
        options["record"] = tuple(sorted(of_device.record))
        options["row_sparse"] = tuple(sorted(of_device.tables(state.store).values()))
        if of_device.compute_dtype is not None:
            dtype = jnp.dtype(of_device.compute_dtype).name
            options["compute_dtype"] = getattr(jnp, dtype, dtype)
        # Of the store, what decides how gradients are summed.
        options |= {"compressor": state.store.compressor, "staleness": state.store.staleness}
        for name in ("record", "row_sparse", "compressor", "staleness"):  # as before it was described
            if not options[name]:
                del options[name]
    # The rules say what an optimizer computes, whatever its functions are called. Where one cannot be traced, its code
    # and its settings stand for it.
    rules = kv._rule_of_each(state.store)
    has_rules = all(rule is not None for rule in rules.values())
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),  # the hashes of functions are of its code
        "model": fingerprint(shapes),
        "data": run.data_digest,
        "seed": fingerprint(np.asarray(jax.random.key_data(state.rng))),
        "optimizer": fingerprint(rules if has_rules else state.store.updater),
        "loss": fingerprint(step.loss_fn if isinstance(step, TrainStep) else step),
        "step": fingerprint(options, getattr(step, "nonfinite", "")),
        "batch_size": run.batch_size,
    }


_SHOWN = {
    **{"data": "the data", "seed": "the seed", "loss": "the loss function", "step": "the options of the step"},
    **{"model": "the shapes of the model", "optimizer": "the optimizer", "start": "the values at the start"},
}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> str:
    """In which of these a run differs from what a file says, in words. "" in none."""
    return "; ".join(
        f"{_SHOWN[name]} differs"
        if name in _SHOWN
        else f"{name.replace('_', ' ')}: {before[name]} in the file, {now[name]} now"
        for name in names
        if before[name] != now[name]
    )


def identity(run: Run, state: TrainState) -> str:
    """A name of the run: equal for two calls of `fit` that compute the same numbers, as far as that is known."""
    about = describe(run, state)
    unique = secrets.token_hex(8) if about["data"] is None else ""  # of unknown data no two runs are the same
    # Ensembles differ in their values alone. A vector is often a bias of zeros, and a random key has no numbers.
    values = [x for x in state.store.values.values() if not is_prng_key(x)]
    first = min([x for x in values if x.ndim > 1] or values, key=lambda x: x.size, default=None)
    numbers = None if first is None else np.asarray(first.addressable_data(0)).reshape(-1)[:1024].astype(np.complex128)
    return fingerprint(about, unique, int(state.step), numbers)
