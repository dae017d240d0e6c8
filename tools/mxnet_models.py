"""Networks of MXNet beside MXNet: loaded, applied, trained for a step, drawn and ported, as a table.

tools/mxnet_models_there.py wrote the folder, where MXNet runs.

    python tools/mxnet_models.py FOLDER [NAME ...]

A number is the largest difference from MXNet's, over the largest absolute value of the array. Behind it in brackets, if
it is 1e-5 or more, is that of MXNet from itself, of inputs that are off by the last bit.
"""

import os
import sys
import traceback
from pathlib import Path

# Programs that run once are best compiled quickly.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import jaxpar as jp

LR = 0.05


def difference(found, expected):
    """The largest one of two arrays or lists of arrays, relative to the largest value of each."""
    found = found if isinstance(found, (list, tuple)) else [found]
    assert len(found) == len(expected), f"{len(found)} outputs, MXNet has {len(expected)}"
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape, f"shape {a.shape}, MXNet has {b.shape}"
        a, b = np.float64(a), np.float64(b)
        worst = max(worst, np.abs(a - b).max(initial=0) / (np.abs(b).max(initial=0) or 1))
    return worst


class Checks:
    """One network. Each method is a column of the table: a number that must be small, or a word."""

    def __init__(self, folder, name):
        self.symbol, self.params = folder / f"{name}-symbol.json", folder / f"{name}-0000.params"
        self.train_symbol = folder / f"{name}-train-symbol.json"
        self.there = dict(np.load(folder / f"{name}.npz"))
        self.inputs = self.of("input ")

    def of(self, start):
        """The arrays of MXNet whose name begins so, by the rest of it."""
        return {n.removeprefix(start): a for n, a in self.there.items() if n.startswith(start)}

    def outputs(self, kind):
        return [self.there[f"{kind}{i}"] for i in range(sum(n.rstrip("0123456789") == kind for n in self.there))]

    def load(self):
        self.model = jp.mxnet.load_symbol(self.symbol, self.params)
        return f"{len(self.model._operators)}"

    def shapes(self):
        """From those of the inputs that are no labels, as `infer_shape`."""
        model = jp.mxnet.load_symbol(self.symbol)
        labels = {name for names in model._labels.values() for name in names}
        found = model.shapes(**{n: a.shape for n, a in self.inputs.items() if n not in labels})
        arrays = {**self.model.params, **self.model.state, **self.inputs}
        # A label that is not given may have an axis of 1 less.
        wrong = [n for n, shape in found.items() if shape != arrays[n].shape and n not in labels]
        wrong += [n for n in arrays if n not in found and n not in labels]
        assert not wrong, f"shapes of {wrong}"
        return "yes"

    def apply(self):
        found = jax.jit(self.model.apply)(self.model.params, self.inputs)
        return self.of_outputs(found)

    def of_outputs(self, found):
        own = difference(self.outputs("shaken eval"), self.outputs("eval"))
        return difference(found, self.outputs("eval")), own

    def train(self):
        """A step of SGD."""
        if not self.outputs("out"):
            return ""
        # In float64 where MXNet's was: in float32 both round, and a network of many norms makes a tenth of it.
        with jax.enable_x64(any(a.dtype == np.float64 for a in self.of("param ").values())):
            return self.step()

    def step(self):
        model = jp.mxnet.load_symbol(self.train_symbol, self.params)
        heads = self.outputs("head")
        dtype = jax.dtypes.canonicalize_dtype(np.float64)

        def wide(arrays):
            return {n: a.astype(dtype) if a.dtype == np.float32 else a for n, a in arrays.items()}

        inputs, old_state, old = wide(self.inputs), wide(model.state), wide(model.params)

        def loss(params):
            outputs, state = model.apply(params, inputs, state=old_state, train=True, rng=0)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return sum((o * h).sum() for o, h in zip(outputs, heads, strict=True)), (outputs, state)

        sgd = jp.updaters.mxnet_sgd(LR, momentum=0.9, wd=1e-3, rescale_grad=1 / heads[0].shape[0])

        @jax.jit
        def step(params):
            grads, (outputs, state) = jax.grad(loss, has_aux=True)(params)
            new = {n: sgd.update(n, grads[n], sgd.init(n, p), p)[0] for n, p in params.items()}
            return outputs, new, state

        shaken = self.of("shaken param "), self.outputs("shaken out"), self.of("shaken state ")
        own = self.of_step(old, *shaken)
        outputs, new, state = step(old)
        return self.of_step(old, new, outputs, state), own

    def of_step(self, old, new, outputs, state):
        """The difference of a step from MXNet's: of what it adds to each param, of its outputs and its statistics."""
        expected = self.of("param ")
        assert new.keys() == expected.keys()
        moved = {n: new[n] - old[n] for n in new}
        moved_there = {n: expected[n] - np.asarray(old[n]) for n in new}
        # MXNet's own gradient of PReLU is wrong behind another operator, see docs/from_mxnet.md.
        prelu = {
            self.model.symbol.nodes[n.inputs[1][0]].name
            for n in self.model.symbol.nodes
            if n.op == "LeakyReLU" and n.attrs.get("act_type") == "prelu"
        }
        # A gradient that is 0 but for rounding, as that of a bias before a norm, counts beside the largest one.
        largest = max((np.abs(m).max() for m in moved_there.values()), default=1)
        # A param that only decays moves by so little that its own last bit counts.
        gaps = {
            n: (np.abs(moved[n] - moved_there[n]) - np.spacing(np.abs(old[n]))).max()
            / max(np.abs(moved_there[n]).max(), 1e-2 * largest)
            for n in new
            if n not in prelu
        }
        self.worst = max(gaps, key=gaps.get, default="")
        return max(
            [
                *gaps.values(),
                difference(outputs, self.outputs("out")),
                difference([*state.values()], [self.there[f"state {n}"] for n in state]),
            ]
        )

    def plot(self):
        picture = jp.viz.plot_network(self.model.apply, self.model.params, self.inputs)
        assert picture.source
        return "yes"

    def port(self):
        """The module, with the same numbers, of arrays that it reads itself."""
        text = jp.mxnet.port(self.symbol, self.params)
        module = {"__name__": "ported"}
        exec(compile(text, "ported.py", "exec"), module)
        params, state = module["load"](self.params)
        names = [n for n in self.model.inputs if n in self.inputs]
        needed = {self.model.symbol.nodes[i].name for i in self.model._needed}
        inputs = [self.inputs[n] for n in names if n in needed]
        found = jax.jit(lambda params, *inputs: module["apply"](params, *inputs, state=state))(params, *inputs)
        return self.of_outputs(found)


COLUMNS = ("load", "shapes", "apply", "train", "plot", "port")


def main(folder, *names):
    folder = Path(folder)
    names = names or sorted(path.stem for path in folder.glob("*.npz"))
    failures = []
    print(f"| network | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}", flush=True)
    for name in names:
        cells = []
        try:
            checks = Checks(folder, name)
            for column in COLUMNS:
                result = getattr(checks, column)()
                if isinstance(result, str):
                    cells.append(result)
                    continue
                found, own = result
                cells.append(f"{found:.1e}" + (f" ({own:.1e})" if own >= 1e-5 else ""))
                if not found < max(5e-4 if column == "train" else 1e-4, 4 * own):
                    worst = getattr(checks, "worst", "") if column == "train" else ""
                    failures.append(f"{name}: {column}: {cells[-1]} {worst}")
        except Exception as error:
            cells.append("NO")
            failures.append(f"{name}: {COLUMNS[len(cells) - 1]}: {error!r:.600}")
            if "-v" in os.environ.get("FLAGS", ""):
                traceback.print_exc()
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        jax.clear_caches()
    print(*failures, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
