"""Networks of MXNet's examples beside MXNet 1.9.1: shapes, outputs, the port, and a step of SGD.

tools/mxnet_models_there.py recorded a few of its sixty networks; tools/mxnet_models.py compares all of them. MXNet's
step is in float64 there, for in float32 its own gradients of this small Inception are off by a tenth.
"""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from symbols import REFERENCE, arrays_of, write

from jaxpar import checkpoint, mxnet, updaters

CASES = json.loads(gzip.decompress((REFERENCE / "mxnet_models.json.gz").read_bytes()))["cases"]
DOUBLE = ("inception_v3",)  # in float64 here too, where a gradient that is not MXNet's shows at 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_networks_of_the_examples(name, tmp_path):
    # MXNet ran its step without dropout.
    case = json.loads(CASES[name]["symbol"])
    for node in case["nodes"]:
        if node["op"] in ("Dropout", "RNN"):
            node["attrs"]["p"] = "0"
    symbol = write(tmp_path, name, {name: {"symbol": json.dumps(case)}})
    params, double = arrays_of(name, CASES), name in DOUBLE
    params = {n: np.float64(a) if double and a.dtype == np.float32 else a for n, a in params.items()}
    inputs = {n: params.pop(n) for n in CASES[name]["inputs"]}
    state = {n: params.pop(n) for n in CASES[name]["aux"]}

    # Without params, and without labels, the file has the shapes of all params.
    model, arrays = mxnet.load_symbol(symbol), params | state | inputs
    labels = {n for names in model._labels.values() for n in names}
    found = model.shapes(**{n: arrays[n].shape for n in model.inputs if n not in labels})
    assert {n: found[n] for n in params | state} == {n: a.shape for n, a in (params | state).items()}

    file = tmp_path / "case-0000.params"
    file.write_bytes(
        checkpoint._mxnet_bytes({f"arg:{n}": a for n, a in params.items()} | {f"aux:{n}": a for n, a in state.items()})
    )
    model = mxnet.load_symbol(symbol, file)
    module = {"__name__": "ported"}
    exec(mxnet.port(symbol, file), module)

    # In one program: it is the compiling that takes time.
    @jax.jit
    def compute(params):
        sgd = updaters.mxnet_sgd(0.05, momentum=0.9, wd=1e-3, rescale_grad=1 / len(outputs[0]))
        loss = lambda params: sum(out.sum() for out in jax.tree.leaves(train(params)[0]))  # noqa: E731
        train = lambda params: model.apply(params, inputs, state=state, train=True, rng=0)  # noqa: E731
        grads = jax.grad(loss)(params)
        new = {n: sgd.update(n, grads[n], sgd.init(n, p), p)[0] for n, p in params.items()}
        needed = {model.symbol.nodes[i].name for i in model._needed}
        with jax.numpy_rank_promotion("allow"):  # as users have it
            ported = module["apply"](params, *(inputs[n] for n in model.inputs if n in needed), state=state)
        return model.apply(params, inputs, state=state), ported, new

    with np.load(REFERENCE / "mxnet_models.npz") as recorded, jax.enable_x64(double):
        outputs = [recorded[key] for key in recorded.files if key.startswith(f"{name}/eval")]
        applied, ported, new = compute({n: jnp.asarray(a) for n, a in params.items()})
        for found in applied, ported:
            for out, expected in zip(jax.tree.leaves(found), outputs, strict=True):
                np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
        for n, array in new.items():
            total, size = recorded[f"{name}/param {n}"]
            moved = np.abs(np.float64(array) - params[n]).sum()
            # MXNet's rate is 0.05 in float32.
            gap = 1e-7 * moved if double else 5e-4 * moved + 1e-6 * size
            np.testing.assert_allclose(np.sum(array, dtype=float), total, rtol=0, atol=gap, err_msg=n)
            np.testing.assert_allclose(
                np.abs(np.float64(array)).sum(), size, rtol=gap / size if double else 2e-6, err_msg=n
            )
