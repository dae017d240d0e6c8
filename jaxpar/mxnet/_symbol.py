"""Networks of MXNet from their files, as pure functions of named params.

Begin with `load_symbol`. `Model.apply` runs the nodes of the graph one after another, under the user's `jit` as one
program. `Model.shapes` runs the same on shapes, forwards, and then backwards from the loss layers to their labels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks, files
from .._core.arguments import no_such_arguments
from .._core.files import CheckpointError
from ..checkpoint import _mxnet_bytes, load_mxnet
from . import _operators as ops
from ._elsewhere import ARGUMENTS, FILE_ARGUMENTS, METHODS
from ._graph import (
    Difference,
    Graph,
    Node,
    Table,
    check_shapes,
    first_difference,
    labels_of,
    needed_nodes,
    output_names,
    parse,
    read_graph,
    roles,
    with_operators,
)
from ._operators import OPERATORS, Operator

_MOST_NAMED = 8  # nodes or names in a message
Shape = tuple[int, ...]
Outputs = tuple[Any, ...]  # of a node: arrays, or their shapes and dtypes. None of them where its label is missing


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A network of MXNet: its graph, its arrays, and `apply`, a pure function of them.

    `load_symbol` and `load_checkpoint` make one. It is never changed: train the params that you take from it.

    Attributes:
        params: what is trained, by MXNet's names. Empty without a params file.
        state: the running statistics, MXNet's auxiliary states, by name: the `model_state` of a training step.
        inputs: the names of what `apply` is given, data and labels, in MXNet's order.
        outputs: the names of what it gives.
        symbol: the graph as plain data: `nodes`, each with `op`, `name`, `inputs` and `attrs`, and `heads`.

    Example:
        >>> from jaxpar import mxnet
        >>> model = mxnet.load_checkpoint("lenet", 10)  # doctest: +SKIP
        >>> probabilities = model.apply(model.params, images)  # doctest: +SKIP
    """

    params: dict[str, jax.Array]
    state: dict[str, jax.Array]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    symbol: Graph
    _operators: Mapping[int, tuple[Operator, Mapping[str, Any]]]
    _needed: frozenset[int]  # the nodes that outputs are computed of. The others are labels, or computed of labels
    _labels: Mapping[int, frozenset[str]]  # the inputs that the label of each loss layer needs, and nothing else does
    _arrays: Mapping[str, str]  # "arg" or "aux", by the names of params and state
    _kernels: frozenset[str] | None  # weights kept as (height, width, in, out). None: the layout is MXNet's

    def __repr__(self) -> str:
        return f"Model({len(self._operators)} operators, inputs {self.inputs}, outputs {self.outputs})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            hint = f"; {METHODS[name]}" if name in METHODS else ""
            raise AttributeError(f"a Model has no attribute {name!r}{hint}")

    @no_such_arguments(ARGUMENTS)
    def apply(
        self,
        params: Mapping[str, Any],
        *inputs: Any,
        state: Mapping[str, Any] | None = None,
        train: bool = False,
        rng: jax.Array | int | None = None,
    ) -> Any:
        """What the network gives, as MXNet computes it.

        A loss layer such as SoftmaxOutput gives its predictions. With its label among the inputs, its gradient is that
        of its loss, summed over the batch, and ignores what comes after it, as in MXNet. Without its label it is a
        plain function, here the softmax: then the loss is yours, of what it gives.

        Args:
            params: `model.params`, or others of these names.
            inputs: arrays in the order of `model.inputs`, or one dict {name: array}.
            state: the running statistics. None: `model.state`.
            train: whether statistics are those of the batch, and dropout drops. A Python bool.
            rng: a random key for dropout, or an int that makes one.

        Returns:
            The output, a tuple if there are several. With `train=True`, (outputs, new state).

        Raises:
            ValueError: a param or an input is missing, or none of the network's.

        Example:
            >>> probabilities = model.apply(model.params, images)  # doctest: +SKIP
            >>> outputs, new_state = model.apply(model.params, images, train=True, rng=0)  # doctest: +SKIP
        """
        inputs_by_name = self._inputs(inputs)
        new_state = dict(self.state if state is None else state)
        statistics = {name for name, kind in self._arrays.items() if kind == "aux"}
        key = None if rng is None else checks.random_key(rng, "Model.apply: rng")
        by_name: dict[str, Any] = {**self._named(params, new_state), **inputs_by_name}
        by_name = {name: jnp.asarray(array) for name, array in by_name.items()}
        # In layout NHWC the arrays carry their axes with them, and are turned for operators that know MXNet's only.
        if self._kernels is not None:
            by_name |= {name: ops.wrap(by_name[name], ops.KERNELS) for name in self._kernels}
            by_name |= {name: ops.wrap(by_name[name], ops.IMAGES) for name in inputs_by_name}
        variables = [by_name.get(node.name) for node in self.symbol.nodes if node.is_variable]
        outputs, new = self._run_all(variables, train, key)
        new_state.update((name, array) for name, array in new.items() if name in statistics)
        to_user = ops.unwrap if self._kernels is None else ops.image
        outputs = tuple(map(to_user, outputs))
        result = outputs[0] if len(outputs) == 1 else outputs
        return (result, new_state) if train else result

    def shapes(self, /, **input_shapes: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shape of each input, param and running statistic, from those of the inputs. Nothing is computed.

        As MXNet's `infer_shape`, it finds the shape of a label from what the loss layer predicts, where that is the
        only one. It leaves out a label of several possible shapes, such as one that is reshaped to (-1,).

        Args:
            input_shapes: by name, such as `data=(32, 1, 28, 28)`. Labels of loss layers need none.

        Raises:
            ValueError: shapes do not fit together, or one more must be given.

        Example:
            >>> mxnet.load_symbol("lenet-symbol.json").shapes(data=(1, 1, 28, 28))  # doctest: +SKIP
        """
        names = {node.name for node in self.symbol.nodes if node.is_variable}
        if unknown := [name for name in input_shapes if name not in names]:
            raise ValueError(f"Model.shapes: the network has no {_listed(unknown)}; its inputs are {list(self.inputs)}")
        shapes = {name: self._shape(name, shape, back=True) for name, shape in input_shapes.items()}

        self._infer(shapes)
        nodes = self.symbol.nodes
        for number in self._operators:
            for i, _ in nodes[number].inputs:
                if i in self._needed and nodes[i].is_variable and nodes[i].name not in shapes:
                    raise ValueError(f"Model.shapes: the shape of {nodes[i].name!r} is unknown; give it too")
        for i, _ in self.symbol.heads:
            head = self.symbol.nodes[i]
            if head.is_variable and head.name not in shapes and (shape := _declared(head)) is not None:
                shapes[head.name] = shape

        in_order = (node.name for node in nodes if node.name in shapes)
        return {name: self._shape(name, shapes[name], back=False) for name in in_order}

    def save_params(
        self,
        file: str | os.PathLike[str],
        params: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a `.params` file that MXNet reads, whole or not at all.

        MXNet's `mx.model.load_checkpoint`, `Module.load` and `SymbolBlock.imports` take it, beside the symbol file.

        Args:
            file: its path, for a Module "prefix-0010.params".
            params: the arrays to write, such as those that were trained. None: `model.params`.
            state: the running statistics. None: `model.state`.

        Raises:
            OSError: the file cannot be written.
            ValueError: an array is missing, or has a dtype that MXNet does not know.

        Example:
            >>> model.save_params("lenet-0011.params", state.store_params)  # doctest: +SKIP
        """
        arrays = self._named(params, state)
        arrays |= {name: ops.back(np.asarray(arrays[name]), ops.KERNELS) for name in self._kernels or ()}
        named = {f"{kind}:{name}": arrays[name] for name, kind in self._arrays.items()}
        files.replace(files.as_path(file, "Model.save_params: file"), _mxnet_bytes(named))

    def compare(
        self,
        reference: str | os.PathLike[str] | Mapping[str, Any],
        params: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        tolerance: float | None = None,
    ) -> Difference | None:
        """The first layer whose output is not MXNet's, in evaluation. None if all are.

        Each layer is given what it is given in MXNet, so a difference is its own, or that of its params.

        Args:
            reference: what `tools/mxnet_outputs.py` of jaxpar's repository writes where MXNet runs, the inputs and the
                outputs of all layers: a file, or {name: array}.
            params: the params to compare. None: `model.params`.
            state: the running statistics. None: `model.state`.
            tolerance: the largest difference, over the largest absolute value of the output. None: 1e-4, and 1e-2
                where an output has 16 bits.

        Returns:
            The layer, `print` shows what is different.

        Raises:
            OSError, CheckpointError: the file cannot be read, or is damaged.
            ValueError: it lacks an input, or is of another network.

        Example:
            >>> print(model.compare("lenet-outputs.params"))  # doctest: +SKIP
            None
        """
        if not isinstance(reference, Mapping):
            reference = load_mxnet(reference)
        inputs = self._inputs([{name: reference[name] for name in self.inputs if name in reference}])
        arrays = {name: jnp.asarray(array) for name, array in {**self._named(params, state), **inputs}.items()}
        arrays |= {name: ops.back(arrays[name], ops.KERNELS) for name in self._kernels or ()}
        return first_difference(
            self.symbol, lambda number, values: self._run(number, values, False, None)[0], arrays, reference, tolerance
        )

    @property
    def lr_mult(self) -> dict[str, float]:
        """The factors of the learning rate that the file gives to params, for `updaters.multipliers`."""
        return self._factors("lr_mult")

    @property
    def wd_mult(self) -> dict[str, float]:
        """The factors of weight decay with which MXNet trains the params, for `updaters.multipliers`.

        A name that ends neither in `_weight` nor in `_gamma` has 0, unless the file says otherwise. Files of Gluon do.
        """
        rule = {name: 0.0 for name in self.frozen if not name.endswith(("_weight", "_gamma"))}
        return rule | self._factors("wd_mult")

    @property
    def frozen(self) -> dict[str, bool]:
        """Whether the file says `__grad_req__="null"` of a param, for `frozen=` of `train.start`."""
        marks = self._marks("grad_req")
        return {name: marks.get(name) == "null" for name, kind in self._arrays.items() if kind == "arg"}

    def _factors(self, key: str) -> dict[str, float]:
        marks = self._marks(key)
        return {name: parse(marks[name], "float", f"{key} of {name!r}") for name in self.frozen if name in marks}

    def _marks(self, key: str) -> dict[str, str]:
        """An attribute of variables. Old files have it as `lr_mult`, or as `weight_lr_mult` of an operator."""
        marks: dict[str, str] = {}
        for number, node in enumerate(self.symbol.nodes):
            owners = {key: node.name, f"__{key}__": node.name}
            if not node.is_variable:
                arrays = zip(self._operators[number][0].slots, node.inputs)  # noqa: B905, the last may be missing
                owners = {f"{slot}_{key}": self.symbol.nodes[i].name for slot, (i, _) in arrays}
            marks |= {owners[name]: text for name, text in node.attrs.items() if name in owners}
        return marks

    def _infer(self, shapes: dict[str, Shape]) -> None:
        """Adds the shapes of variables that follow from those that are known."""
        # Forwards from the inputs, and backwards from loss layers to their labels and from packed weights to those that
        # are joined. What is inferred backwards may be what a node lacked, so until nothing more is inferred.
        same = dict[Any, Outputs]()

        def infer() -> None:
            count = -1
            while len(shapes) > count:
                count = len(shapes)
                values = self._forward_shapes(shapes, same)
                self._add_backward_shapes(shapes, values)

        jax.eval_shape(infer)  # one trace: to begin one for each node would take longer than the nodes

    def _forward_shapes(self, shapes: dict[str, Shape], same: dict[Any, Outputs]) -> list[Outputs]:
        """The outputs of all nodes as shapes and dtypes: none where an array is unknown. Adds shapes of variables.

        `same` are the outputs of nodes of one operator, of attributes and shapes: a network has many of each kind.
        """
        values: list[Outputs] = []
        key = jax.random.key(0)
        for number, node in enumerate(self.symbol.nodes):
            if node.is_variable:
                values.append(())
                continue
            operator, attrs = self._operators[number]
            arrays: list[jax.ShapeDtypeStruct | None] = []
            for place, (i, k) in enumerate(node.inputs):
                if self.symbol.nodes[i].is_variable:
                    arrays.append(self._shaped(number, place, arrays, shapes))
                else:
                    arrays.append(self._output(values, i, k) if values[i] else None)
            if None in (arrays[:1] if operator.labels else arrays):
                values.append(())
                continue
            variables = tuple(self.symbol.nodes[i].is_variable for i, _ in node.inputs)
            structs = tuple(None if a is None else (a.shape, a.dtype) for a in arrays)
            case = node.op, tuple(sorted(attrs.items())), variables, structs
            if case not in same:
                with _naming(node, arrays):  # a size of a weight may be below 0
                    zeros = [None if a is None else jnp.zeros(a.shape, a.dtype) for a in arrays]
                outputs, _ = self._run(number, zeros, train=False, key=key)
                same[case] = tuple(jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outputs)
            values.append(same[case])
        return values

    def _add_backward_shapes(self, shapes: dict[str, Shape], values: Sequence[Outputs]) -> None:
        """Adds the shapes of variables that follow from what is computed of them. `values` are those of the nodes."""
        nodes = self.symbol.nodes
        inferred: dict[int, dict[int, Shape]] = {}  # by node, and by its output
        # A layer says what the shapes of its label and of its weights are; operators between say what their input's is,
        # of their output's.
        for number in range(len(nodes) - 1, -1, -1):
            node = nodes[number]
            if node.is_variable:
                if number in inferred:
                    shapes.setdefault(node.name, inferred[number][0])
                continue
            of_inputs = [self._known_shape(values, shapes, i, k) for i, k in node.inputs]
            if None not in of_inputs:
                continue
            operator, attrs = self._operators[number]
            backwards: Sequence[Shape | None] = ()
            if operator.labels and of_inputs[0] is not None:
                backwards = [None, operator.labels(of_inputs[0], attrs)]
            elif operator.shapes and of_inputs[0] is not None:
                with _naming(node, ()):
                    by_slot = operator.shapes(of_inputs[0], attrs)
                backwards = [None, *(by_slot.get(slot) for slot in operator.slots[1:])]
            elif operator.back and (number in inferred or operator.graphs):
                known = inferred.get(number, {})
                of_outputs = [known.get(k) for k in range(max(known, default=0) + 1)]
                with _naming(node, ()):
                    backwards = operator.back(of_outputs, of_inputs, attrs)
                if backwards == [None] and of_outputs[0] is not None:  # reshaped: the variable's file knows the others
                    backwards = [_declared(nodes[node.inputs[0][0]], size=math.prod(of_outputs[0]))]
            for (i, k), shape, new in zip(node.inputs, of_inputs, backwards, strict=False):
                if shape is None and new is not None:
                    inferred.setdefault(i, {}).setdefault(k, new)

    def _known_shape(
        self, values: Sequence[Outputs], shapes: Mapping[str, Shape], number: int, place: int
    ) -> Shape | None:
        if self.symbol.nodes[number].is_variable:
            return shapes.get(self.symbol.nodes[number].name)
        return values[number][place].shape if place < len(values[number]) else None

    def _run_all(
        self, variables: Sequence[Any], train: bool, key: jax.Array | None
    ) -> tuple[Outputs, dict[str, jax.Array]]:
        """The outputs of the network, of the values of its variables in the order of the file; and new statistics."""
        values: list[Outputs] = []  # of the nodes so far
        new_statistics: dict[str, jax.Array] = {}
        left = iter(variables)
        kept = _computed_once(self.symbol)
        for number, node in enumerate(self.symbol.nodes):
            if node.is_variable:
                values.append((next(left),))
                continue
            arrays = [self._output(values, i, k) for i, k in node.inputs]
            outputs, new = self._run(number, arrays, train, key)
            values.append(tuple(map(ops.once, outputs)) if number in kept else outputs)
            # Running statistics are the last arrays that a node takes.
            names = [self.symbol.nodes[i].name for i, _ in node.inputs[len(node.inputs) - len(new) :]]
            new_statistics.update(zip(names, new, strict=True))
        return tuple(self._output(values, i, k) for i, k in self.symbol.heads), new_statistics

    def _is_unknown(self, number: int, arrays: Sequence[Any]) -> bool:
        """Whether a node is computed of a label that is not given."""
        taken = arrays[:1] if self._operators[number][0].labels else arrays
        return number not in self._needed and any(array is None for array in taken)

    def _output(self, values: Sequence[Outputs], number: int, place: int) -> Any:
        """One output of a node, None of one that is unknown. `CheckpointError` if it has fewer."""
        if not values[number] and number not in self._needed:
            return None
        if place >= len(values[number]):
            node = self.symbol.nodes[number]
            raise CheckpointError(f"the symbol is damaged: {node} has no output {place}")
        return values[number][place]

    def _run(
        self, number: int, arrays: Sequence[Any], train: bool, key: jax.Array | None
    ) -> tuple[Outputs, tuple[jax.Array, ...]]:
        """The outputs of one node, and its new running statistics. Nothing, if it is computed of a missing label."""
        if self._is_unknown(number, arrays):
            return (), ()
        node = self.symbol.nodes[number]
        operator, attrs = self._operators[number]
        by_model: dict[str, Any] = {}
        if "train" in operator.by_model:
            by_model["train"] = train
        if "rng" in operator.by_model:
            by_model["rng"] = None if key is None else jax.random.fold_in(key, number)
        with jax.named_scope(node.name), _naming(node, arrays):
            # States that MXNet makes itself have a batch of 1 here. Those that are given have the batch of the data.
            shapes = operator.shapes(np.shape(arrays[0]), attrs) if node.op == "RNN" and operator.shapes else {}
            for slot, (i, _), array in zip(operator.slots, node.inputs, arrays, strict=False):
                if self.symbol.nodes[i].is_variable and slot in shapes and array.shape != shapes[slot]:
                    raise ValueError(f"{slot} must have the shape {shapes[slot]}, got {array.shape}")
            result = ops.run(operator, attrs, arrays, lambda a, attrs: operator.fn(*a, **attrs, **by_model))
        outputs, new_statistics = result if operator.state else (result, ())
        return outputs if isinstance(outputs, tuple) else (outputs,), new_statistics

    def _inputs(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """The inputs by name."""
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            by_name: dict[str, Any] = dict(inputs[0])
        else:
            if len(inputs) > len(self.inputs):
                raise ValueError(f"Model.apply: {len(inputs)} inputs are given, the network has {list(self.inputs)}")
            by_name = dict(zip(self.inputs, inputs))  # noqa: B905, labels may be missing
        names = dict.fromkeys(self.inputs)
        if unknown := [name for name in by_name if name not in names]:
            raise ValueError(f"Model.apply: the network has no input {_listed(unknown)}; it has {list(self.inputs)}")
        needed = {self.symbol.nodes[i].name for i in self._needed}
        if missing := [name for name in names if name in needed and name not in by_name]:
            raise ValueError(f"Model.apply: no array is given for input {_listed(missing)}{self._use(missing[0])}")
        for number, labels in self._labels.items():
            if 0 < len(missing_labels := labels - by_name.keys()) < len(labels):
                raise ValueError(
                    f"Model.apply: the label of {self.symbol.nodes[number]} needs {_listed(sorted(labels))}, and no "
                    f"array is given for {_listed(sorted(missing_labels))}; give all of them, or none"
                )
        return by_name

    def _use(self, name: str) -> str:
        """Which output needs an input that is a label of a loss layer too."""
        layers = [number for number, (operator, _) in self._operators.items() if operator.labels]
        if not any(name in labels_of(self.symbol, number) for number in layers):
            return ""
        for head, output in zip(self.symbol.heads, self.outputs, strict=True):
            if any(self.symbol.nodes[i].name == name for i in needed_nodes(self.symbol, self._operators, [head])):
                return f": it is a label, and output {output!r} is computed of it"
        return ""

    def _named(self, params: Mapping[str, Any] | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """All arrays by name, checked. None: the model's own."""
        params, state = self.params if params is None else params, self.state if state is None else state
        for argument, arrays, kind in (("params", params, "arg"), ("state", state, "aux")):
            if missing := [name for name, of_kind in self._arrays.items() if of_kind == kind and name not in arrays]:
                raise ValueError(f"Model: {argument} has no {_listed(missing)}")
            if unknown := [name for name in arrays if self._arrays.get(name) != kind]:
                raise ValueError(f"Model: {argument} has {_listed(unknown)}, which the network has not")
        return {**state, **params}

    def _shape(self, name: str, shape: Sequence[int], *, back: bool) -> Shape:
        """A shape in the layout of the network; with `back`, one of that layout in MXNet's."""
        if self._kernels is None or len(shape) != 4 or not (name in self._kernels or name in self.inputs):
            return tuple(shape)
        axes = ops.KERNELS if name in self._kernels else ops.IMAGES
        return tuple(shape[i] for i in (np.argsort(axes) if back else axes))

    def _shaped(
        self, number: int, place: int, before: Sequence[Any], shapes: dict[str, Shape]
    ) -> jax.ShapeDtypeStruct | None:
        """A variable that a node takes, as shape and dtype. None: its shape is unknown so far.

        `before` are the arrays that the node takes before it. A shape that is inferred is added to `shapes`.
        """
        node = self.symbol.nodes[number]
        operator, attrs = self._operators[number]
        variable = self.symbol.nodes[node.inputs[place][0]]
        if variable.name not in shapes:
            shape = _declared(variable)
            is_slot = 0 < place < len(operator.slots)
            if shape is None and operator.shapes and is_slot and before[0] is not None:
                with _naming(node, before):
                    shape = operator.shapes(before[0].shape, attrs).get(operator.slots[place])
            if shape is None:
                return None
            shapes[variable.name] = shape
        return jax.ShapeDtypeStruct(shapes[variable.name], jnp.float32)


_NODES_BETWEEN = 32


def _computed_once(graph: Graph) -> set[int]:
    """Nodes with several readers, some dozen from each other, whose values XLA is to compute once.

    On CPUs, XLA computes a value that is cheap again for each reader, with all that it is computed of. In a transformer
    each layer reads the sum of those before it, and adds to it. So the program, and the time to compile it, would grow
    with the square of the layers.
    """
    readers = Counter(i for node in graph.nodes for i, _ in node.inputs)
    nodes, last = set[int](), 0
    for number, node in enumerate(graph.nodes):
        if not node.is_variable and readers[number] > 1 and number - last >= _NODES_BETWEEN:
            nodes.add(number)
            last = number
    return nodes


@dataclasses.dataclass(frozen=True, eq=False)
class Subgraph:
    """A graph inside of a node, as a function of the arrays of the node.

    Attributes:
        model: the graph. All its variables are inputs.
        places: of its variables among the arrays of the node.
        weights: the places of those that it trains.
    """

    model: Model
    places: tuple[int, ...]
    weights: frozenset[int]

    def __call__(self, *arrays: jax.Array, train: bool, rng: jax.Array | None) -> Outputs:
        return self.model._run_all([arrays[place] for place in self.places], train, rng)[0]

    def infer(self, shapes: Sequence[Shape | None]) -> list[Shape | None]:
        """The shapes of the arrays of the node, as far as they follow from those that are known."""
        names = [node.name for node in self.model.symbol.nodes if node.is_variable]
        known = {name: shapes[place] for name, place in zip(names, self.places, strict=True)}
        inferred = {name: shape for name, shape in known.items() if shape is not None}
        self.model._infer(inferred)
        found = list(shapes)
        for name, place in zip(names, self.places, strict=True):
            found[place] = inferred.get(name)
        return found


@no_such_arguments(FILE_ARGUMENTS)
def load_symbol(
    symbol_file: str | os.PathLike[str],
    params_file: str | os.PathLike[str] | None = None,
    *,
    layout: str | None = None,
    operators: Mapping[str, Callable[..., Any]] | None = None,
) -> Model:
    """A network of MXNet, from its symbol file and its params.

    The files are those of `Module.save_checkpoint`, `symbol.save`, Gluon's `export` and `mx.nd.save`, of MXNet 1.0 to
    2.0. MXNet itself is not needed, and nothing in the files is run.

    Args:
        symbol_file: the graph, "lenet-symbol.json".
        params_file: its arrays, "lenet-0010.params". Arrays that the graph does not have are left out. None: the
            network has no params, and `model.shapes(...)` says which it needs.
        layout: None, for MXNet's own: images are (batch, channels, height, width). "NHWC": the network takes and gives
            every array of four axes as (batch, height, width, channels), and the weights of its convolutions are
            (height, width, in, out). The results are the same. `save_params` writes MXNet's layout.
        operators: functions for operators that are missing here, or other ones for those that are not, by MXNet's
            name. Such a function takes arrays by position, and attributes by keyword: as int, float, bool or tuple
            where its annotation says so, else as strings. A keyword `train` or `rng` is given by the model.

    Returns:
        The model: `.params`, `.state`, `.apply(params, *inputs)`.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: a file is damaged, or of another network.
        ValueError: an operator or an attribute is unknown. Every node that has the operator is named.

    Example:
        >>> from jaxpar import mxnet
        >>> model = mxnet.load_symbol("lenet-symbol.json", "lenet-0010.params")  # doctest: +SKIP
        >>> model.apply(model.params, images)  # doctest: +SKIP
    """
    if layout is not None:  # None is MXNet's own, as NCHW
        checks.choice(layout, "mxnet.load_symbol", "layout", ("NCHW", "NHWC"))
    path = files.as_path(symbol_file, "mxnet.load_symbol: symbol_file")
    graph, table = with_operators(path, read_graph(path), operators or {})
    table = _with_subgraphs(path, graph, table, operators or {})

    # Which variables are params: those that the file has, and without a file those that an operator trains.
    statistics, weights, kernels = roles(graph, table)
    arrays = {} if params_file is None else load_mxnet(params_file)
    named = {name.split(":", 1)[-1] if name[:4] in ("arg:", "aux:") else name: a for name, a in arrays.items()}
    variables = [node.name for node in graph.nodes if node.is_variable]
    is_statistic = {*statistics}
    trained = [name for name in variables if name not in is_statistic and (name in named or name in weights)]
    kinds = {name: "aux" if name in statistics else "arg" for name in (*trained, *statistics)}
    if params_file is not None and (missing := [name for name in kinds if name not in named]):
        raise CheckpointError(f"{params_file} has no array {_listed(missing)}, which {path} needs")

    # All others are inputs. A label is one that only a loss layer is computed of: it may be left out.
    inputs = tuple(name for name in variables if name not in kinds)
    needed = needed_nodes(graph, table, graph.heads)
    not_labels = {*kinds, *(graph.nodes[i].name for i in needed)}
    layers = [number for number, (each, _) in table.items() if each.labels]
    labels = {number: labels_of(graph, number) - not_labels for number in layers}
    check_shapes(path, graph, table, inputs)

    # Weights are turned once, here, so that no step turns them.
    kernels = frozenset(kernels & {*trained}) if layout == "NHWC" else None
    params = {name: jnp.asarray(named[name]) for name in trained if named}
    return Model(
        params | {name: ops.turn(params[name], ops.KERNELS) for name in kernels or () if named},
        {name: jnp.asarray(named[name]) for name in statistics if named},
        inputs,
        output_names(graph),
        graph,
        table,
        needed,
        labels,
        kinds,
        kernels,
    )


def _with_subgraphs(path: Path, graph: Graph, table: Table, operators: Mapping[str, Callable[..., Any]]) -> Table:
    """The table, with the graphs of loops and branches as functions."""
    found = dict(table)
    for number, (operator, attrs) in table.items():
        if operator.graphs is None:
            continue
        node, places = graph.nodes[number], operator.graphs(attrs)
        if len(node.subgraphs) != len(places):
            raise CheckpointError(f"{path} is damaged: {node} has {len(node.subgraphs)} graphs, not {len(places)}")
        subgraphs = [_subgraph(path, node, *each, operators) for each in zip(node.subgraphs, places, strict=True)]
        if len(subgraphs[-1].model.outputs) != attrs.get("num_outputs"):
            raise CheckpointError(f"{path} is damaged: {node} has other outputs than its graph")
        found[number] = operator, {**attrs, "subgraphs": tuple(subgraphs)}
    return found


def _subgraph(
    path: Path, node: Node, graph: Graph, places: tuple[int, ...], operators: Mapping[str, Callable[..., Any]]
) -> Subgraph:
    graph, table = with_operators(path, graph, operators)
    table = _with_subgraphs(path, graph, table, operators)
    names = tuple(node.name for node in graph.nodes if node.is_variable)
    if not len(names) == len({*names}) == len(places) or not all(0 <= place < len(node.inputs) for place in places):
        raise CheckpointError(f"{path} is damaged: a graph of {node} takes {len(names)} arrays, of the places {places}")
    statistics, weights, _ = roles(graph, table)
    if statistics:
        raise ValueError(f"{path}: {node} has running statistics inside, {_listed(statistics)}, which are not read")
    check_shapes(path, graph, table, names)
    trained = frozenset(place for name, place in zip(names, places, strict=True) if name in weights)
    model = Model(
        {}, {}, names, output_names(graph), graph, table, needed_nodes(graph, table, graph.heads), {}, {}, None
    )
    return Subgraph(model, places, trained)


@no_such_arguments(FILE_ARGUMENTS)
def load_checkpoint(
    prefix: str | os.PathLike[str],
    epoch: int,
    *,
    layout: str | None = None,
    operators: Mapping[str, Callable[..., Any]] | None = None,
) -> Model:
    """A network that MXNet saved after an epoch, as `mx.model.load_checkpoint` reads it.

    Args:
        prefix: of the files "prefix-symbol.json" and "prefix-0010.params".
        epoch: the number in the name of the latter, 10.
        layout, operators: as of `load_symbol`.

    Raises:
        OSError, CheckpointError, ValueError: as of `load_symbol`.

    Example:
        >>> from jaxpar import mxnet
        >>> model = mxnet.load_checkpoint("resnet18", 10)  # doctest: +SKIP
    """
    epoch = checks.whole_number(epoch, "mxnet.load_checkpoint", "epoch", least=0)
    prefix = files.as_path(prefix, "mxnet.load_checkpoint: prefix")
    return load_symbol(f"{prefix}-symbol.json", f"{prefix}-{epoch:04d}.params", layout=layout, operators=operators)


def operator(name: str) -> Callable[..., Any]:
    """The function that computes an operator of MXNet.

    It takes arrays by position and attributes by keyword. Where it has a keyword `train` or `rng`, give it too.

    Raises:
        ValueError: there is no such operator.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import mxnet
        >>> mxnet.operator("broadcast_greater")(jnp.array([1.0, 3.0]), jnp.array([2.0])).tolist()
        [0.0, 1.0]
    """
    checks.choice(name, "mxnet.operator", "name", OPERATORS)
    return OPERATORS[name].fn


@contextlib.contextmanager
def _naming(node: Node, arrays: Sequence[Any]) -> Generator[None]:
    """A block in which an error of an operator names its node. It may be of any kind, as attributes may be wrong."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        shapes = [None if a is None else tuple(a.shape) for a in map(ops.unwrap, arrays)]
        reason = str(error).split("\n")[0]
        raise ValueError(f"{node}, of arrays of shapes {shapes}: {reason}") from error


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(repr(name) for name in names[:_MOST_NAMED]) + more


def _declared(variable: Node, size: int | None = None) -> Shape | None:
    """The shape that the file says a variable has. None: nothing, or not all of it.

    A single number that is open follows from the `size` of the array.
    """
    if "__shape__" not in variable.attrs:
        return None
    shape = parse(variable.attrs["__shape__"], "tuple[int, ...]", f"the shape of {variable.name!r}")
    if size is not None and sum(n <= 0 for n in shape) == 1:
        rest = math.prod(n for n in shape if n > 0)
        shape = tuple(n if n > 0 else size // rest for n in shape)
    return shape if shape and all(n > 0 for n in shape) else None
