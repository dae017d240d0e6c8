"""Every example once, on the devices that hold the parameters.

A function of a batch may let rows see each other, as a softmax over the batch does. So it never gets rows that are no
examples: the last batch is run at its own size, by one more program. Where the devices cannot share a batch evenly,
copies of its last row fill it up on the way to the devices, and the program cuts them off before it calls the function.
The compiler keeps what is left split over the devices, so it needs no more memory than a whole batch.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from ... import data
from ..._core import checks
from ..._core.arrays import Device, PyTree
from ..._core.recent import Recent
from ..._devices import processes, user_mesh
from ..._devices.mesh import STORE_AXIS, copies_on, spans_processes, split_over, wait_before_collectives
from .._step.modules import joined, take_apart
from .._step.state import TrainState, carries

EvalSource = data.DatasetSource | data.ArraySource | data.IterableSource
EvalBatch = tuple[PyTree, int]  # arrays on the devices, and how many of their rows are examples: the first ones
# `of(call, batch)`, where `call(batch)` is the user's function with the model: what is kept of a batch.
Of = Callable[[Callable[[PyTree], PyTree], PyTree], Any]


def model_of(state_or_params: PyTree) -> tuple[Any, ...]:
    """(params to evaluate,), or (params, model_state) of a state that has one. A whole module is in place of params."""
    module: Any = ()
    if isinstance(state := state_or_params, TrainState):
        params, model_state, module = state.eval_params, state.model_state, state.module
    elif (taken := take_apart(state_or_params)) is not None:
        params, model_state, module = taken.params, taken.model_state, taken.module
    else:
        params, model_state = state_or_params, ()
    params, model_state = user_mesh.without_types((params, model_state))
    if carries(module):
        return module.arguments(params, model_state)
    return (params, model_state) if carries(model_state) else (params,)


class EvalProgram:
    """A function of a batch, compiled, over every example of data of any origin, on the devices of a model's params.

    For each batch it gives `of(call, batch)`, where `call(batch)` is `fn` with the model. `check(program, batch)` is
    called before a new program is kept. An iterable is read inside of `user`, the user's mesh. `caller` begins
    messages.
    """

    def __init__(
        self,
        caller: str,
        state_or_params: Any,
        examples: Any,
        batch_size: int,
        user: Mesh | None,
        *,
        of: Of,
        fn: Callable[..., Any],
        check: Callable[[EvalProgram, PyTree], object] | None = None,
    ):
        if user is None:
            user_mesh.check_traced(state_or_params, caller)
        self._caller, self._user = caller, user
        self.model = model_of(state_or_params)
        # The size counts the examples of all processes. Batches that a source gives stay as long as they are.
        self._batch_size = checks.whole_number(batch_size, caller, "batch_size")
        # A data set or arrays, of which each process has all. Or batches, of which each reads its own share.
        self.source: EvalSource = as_eval_source(caller, examples)
        if any(map(spans_processes, jax.tree.leaves(self.model))) and not isinstance(self.source, data.IterableSource):
            data._agree_on_arrays(self.source.arrays, caller)  # all processes make this call

        # The devices of the first parameter that is on a mesh. Without one JAX chooses the device.
        placed = (x.sharding for x in jax.tree.leaves(self.model[0]) if isinstance(x, jax.Array))
        mesh: Any = next((sharding.mesh for sharding in placed if isinstance(sharding, NamedSharding)), None)
        mesh = mesh if isinstance(mesh, Mesh) else None
        self.devices: tuple[Device, ...] = () if mesh is None else tuple(mesh.devices.flat)
        self._count = max(1, len(self.devices))
        self._split = split_over(self.devices) if self.devices else None
        # The axes over which a function of a batch may sum: that of the step, and those of the mesh.
        self.axes = tuple(dict.fromkeys((STORE_AXIS, *(() if mesh is None else mesh.axis_names))))

        if not isinstance(self.source, data.IterableSource):
            count = self.source.examples(self._batch_size)
            if not count:
                kind = "an empty data set" if isinstance(self.source, data.DatasetSource) else "empty arrays"
                raise ValueError(f"{caller}: expected examples, got {kind}")
            self.size = min(self._round_up(self._batch_size), count)  # of the first batch

        # What the compiled program depends on beside shapes. Its results are copies on each device: the host reads all.
        self.leaves, structure = jax.tree.flatten(self.model)
        copies = copies_on(self.devices) if self.devices else None
        self._key = of, fn, structure, copies, self.axes
        self._check = check
        self._compiled: Any = None  # see `trace`
        self._result_shapes: Any = None

    def jit(self) -> Any:
        """A function of (leaves of the model, batch, number of rows that are examples; None: all)."""
        return jax.jit(functools.partial(_on_batch, *self._key), static_argnums=2)

    def trace(self, batch: PyTree) -> Any:
        """The shapes of the result. The program, as it is for the first batch, is that of `run`."""
        # What a function reads by name, as another function that a cell of a notebook has changed, counts too. So it is
        # traced anew for each pass: JAX, and a key that is the function itself, know nothing of that.
        if self._compiled is None:
            try:
                traced = self.jit().trace(self.leaves, batch, None)
                key = *self._key, traced.lower().as_text()
                if self._check is not None and _programs(*key, make=False) is None:
                    self._check(self, batch)
            except Exception as error:
                error.add_note(f"eval_fn or apply_fn was traced for a batch {jax.tree.map(checks.describe, batch)}")
                raise
            self._compiled, self._result_shapes = _programs(*key), traced.out_info
        return self._result_shapes

    def run(self, ahead: int) -> Iterator[Any]:
        """The result of each batch. `ahead` batches are started before one is given, so the host need not wait."""

        def results() -> Iterator[Any]:
            for batch, count in self._batches():
                wait_before_collectives((self.leaves, batch), self.devices)
                is_full = count == jax.tree.leaves(batch)[0].shape[0]
                leaves = jax.tree.leaves(self._compiled(self.leaves, batch, None if is_full else count))
                # With the functions of now in it: the program may be of an earlier call.
                yield jax.tree.structure(self._result_shapes).unflatten(leaves)

        for result in data._ahead(results(), ahead):
            yield result
            processes.note_progress()

    def shapes(self) -> Any:
        """A whole batch as `jax.ShapeDtypeStruct`s. None if nothing is known before it is read."""
        if not isinstance(self.source, data.IterableSource):
            return self.source.batch_shapes(self.size)
        first = self.source.first_batch() if processes.count() == 1 else None
        if first is None:
            return None
        return self.source.batch_shapes(checks.batch_length(first, self._caller), first)

    def _batches(self) -> Iterator[EvalBatch]:
        """Every example, in order. With several processes the batches of all of them side by side."""
        source = self.source
        if isinstance(source, data.IterableSource):
            yield from self._batches_of_stream(source)
            return
        # What is wrong with the function is said before a batch is sent.
        self.trace(self.shapes())
        size = self._round_up(self._batch_size)
        full, remainder = divmod(source.examples(size), size)
        for batch in source.batches(size, devices=self.devices or None) if full else ():
            yield batch, size
        if remainder:
            yield self._placed(source, jax.tree.map(lambda x: x[full * size :], source.arrays), remainder)

    def _batches_of_stream(self, source: data.IterableSource) -> Iterator[EvalBatch]:
        """Each process reads its own batches. All agree on the sizes before a program is started."""
        # How many of the devices each process has.
        counts = [self._count]
        if processes.count() > 1:
            owners = [d.process_index for d in self.devices]
            counts = [owners.count(i) for i in range(processes.count())]
            if not all(counts):
                raise ValueError(
                    f"{self._caller}: the params must be on devices of all processes, or give a data.Dataset or arrays"
                )

        batches, last = self._read(source), None
        while True:
            # The next batch of each process. One whose data have ended takes part with no example. An error in one
            # process is raised in all: else the others would wait in the exchange.
            own_size, own_shapes = 0, None
            with processes.raise_together():
                batch = next(batches, None)
                if batch is not None:
                    if any(map(spans_processes, jax.tree.leaves(batch))):
                        raise ValueError(
                            f"{self._caller}: a batch is on devices of several processes; each process gives its own "
                            "share"
                        )
                    own_size = checks.batch_length(batch, self._caller)
                    own_shapes = str(jax.tree.map(lambda x: f"{x.dtype}{list(np.shape(x)[1:])}", batch))

            # How many examples each process has. Programs of different shapes would wait for each other in their
            # collectives.
            of_processes = [json.loads(text) for text in processes.exchange(json.dumps([own_size, own_shapes]))]
            if len({shapes for _, shapes in of_processes if shapes}) > 1:
                raise processes.in_all(
                    ValueError(f"{self._caller}: all processes must have the same arrays, got {of_processes}")
                )
            sizes = [size for size, _ in of_processes]
            if not any(sizes):
                break
            if not all(sizes) and last is None:
                raise processes.in_all(
                    ValueError(f"{self._caller}: each process must have batches; they have {sizes} examples")
                )
            last = batch if batch is not None else last
            self.trace(source.batch_shapes(sum(sizes), last))

            # On the devices. Each process places its own examples, if each device then has as many of them. Else the
            # batches are gathered in host memory, and cut anew.
            of_device = {n / devices for n, devices in zip(sizes, counts, strict=True)}
            if len(counts) == 1:
                yield self._placed(source, last, sizes[0])
            elif len(of_device) == 1 and of_device.pop().is_integer():
                yield source.place(last, self._split), sum(sizes)
            else:
                gathered = processes.gather_rows(last, sizes)
                yield self._placed(data.ArraySource(gathered, source.dtype), gathered, sum(sizes))
        if last is None:
            hint = data._READ_ONCE if source.is_read_once else "give at least one"
            raise processes.in_all(ValueError(f"{self._caller}: expected examples, got no batch; {hint}"))

    def _read(self, source: data.IterableSource) -> Iterator[Any]:
        """This process's batches in host memory, read inside of the user's mesh. Empty ones are left out."""
        batches = source.every_batch(-(-self._batch_size // processes.count()))
        while True:
            with contextlib.nullcontext() if self._user is None else jax.set_mesh(self._user):
                batch = next(batches, None)
            if batch is None:
                return
            batch = user_mesh.without_types(batch)
            if checks.batch_length(batch, self._caller):
                yield batch

    def _placed(self, source: EvalSource, batch: PyTree, count: int) -> EvalBatch:
        """A batch of host memory with `count` examples, and copies of the last one where the devices need them."""
        copies = self._round_up(count) - count
        if copies:
            batch = jax.tree.map(
                lambda x: np.pad(x, np.array([(0, copies), *[(0, 0)] * (np.ndim(x) - 1)]), "edge"), batch
            )
        return source.place(batch, self._split), count

    def _round_up(self, n: int) -> int:
        """The next number that the devices can share evenly."""
        return -(-n // self._count) * self._count


def as_eval_source(caller: str, examples: Any) -> EvalSource:
    """A data set, arrays or batches as a source that gives every example."""
    if isinstance(examples, data.Dataset):
        return data.DatasetSource(examples)
    if isinstance(examples, (data.DatasetSource, data.ArraySource, data.IterableSource)):
        return examples
    if isinstance(examples, data.Source):
        raise TypeError(
            f"{caller}: expected a data.Dataset, arrays or batches, got {type(examples).__name__}, which may leave out "
            "the last examples; give the arrays themselves, or what data.from_iterable takes"
        )
    examples = data._as_arrays(examples, caller)

    # Whether these are arrays or batches. A list is one of arrays only, otherwise it is one of batches.
    def is_array(x: object) -> bool:
        return hasattr(x, "dtype") and hasattr(x, "shape")

    if isinstance(examples, list):
        has_arrays = bool(examples) and all(map(is_array, examples))
    else:
        leaves = [] if isinstance(examples, Iterator) else jax.tree.leaves(examples)
        has_arrays = bool(leaves) and (leaves[0] is not examples or is_array(examples))
    if not has_arrays:
        return data.from_iterable(examples)
    user_mesh.check_traced(examples, caller)
    examples = user_mesh.without_types(examples)
    checks.batch_length(examples, caller)
    return data.from_arrays(examples)


# The program of a batch.


def _on_batch(
    of: Of,
    fn: Callable[..., Any],
    structure: Any,
    copies: NamedSharding | None,
    axes: tuple[str, ...],
    leaves: list[jax.Array],
    batch: PyTree,
    count: int | None,
) -> Any:
    params, *model_state = structure.unflatten(leaves)
    if count is not None:  # the other rows are no examples
        batch = jax.tree.map(lambda x: x[:count], batch)
    result = of(lambda inputs: with_axes(fn, axes)(params, inputs, *model_state), batch)
    return result if copies is None else lax.with_sharding_constraint(result, copies)


_programs = Recent(lambda *key: jax.jit(functools.partial(_on_batch, *key[:-1]), static_argnums=2))


def with_axes(fn: Callable[..., Any], axes: tuple[str, ...]) -> Callable[..., Any]:
    """The function, which may use collectives over these axes."""
    # A batch is whole here, as if one device had it. So each axis has one part, and the sum over it is the sum itself.

    def call(*args: Any) -> Any:
        args = joined(*args)
        try:
            return fn(*args)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
        names: list[Any] = []

        def noted(*args: Any) -> Any:
            returned = fn(*args)
            names[:] = returned if isinstance(returned, Mapping) else ()
            return returned

        for axis in axes:
            noted = jax.vmap(noted, in_axes=None, out_axes=0, axis_name=axis, axis_size=1)
        returned = jax.tree.map(lambda x: x[(0,) * len(axes)], noted(*args))
        return {name: returned[name] for name in names} if names else returned  # vmap sorts the names of a dict

    return call
