"""Operators in float16 beside MXNet 1.9.1 on a CPU, and the dtype of what a network gives."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import mxnet

sys.path.insert(0, str(Path(__file__).parent))
from symbols import CASES, REFERENCE, arrays_of, recorded, rule, write
from test_mxnet_operators import OPERATORS, WRONG

RECORDED = np.load(REFERENCE / "mxnet_float16.npz", allow_pickle=False)
COMPUTED = [name for name in OPERATORS if f"{name}/out0" in RECORDED and name not in ("dropout", *WRONG)]
QUICK = COMPUTED[::25]
SINGLE = (
    "argmax",
    "shape cast",
    "argmin",
    "shape arange",
    "shape zeros",
    "embedding",
    "one hot",
)  # their result is float32 by themselves


def given(name, dtype):
    """The model, its arrays in a narrow dtype, and its statistics. As in MXNet, those of a BatchNorm are float32."""
    arrays = arrays_of(name)
    state = {n: arrays.pop(n) for n in CASES[name]["aux"]}
    wide = {n for n in arrays if state and n.endswith(("gamma", "beta"))}
    return {n: jnp.asarray(a, "float32" if n in wide else dtype) for n, a in arrays.items()}, state


def outputs_of(model, arrays, state):
    inputs = {n: a for n, a in arrays.items() if n in model.inputs}
    params = {n: a for n, a in arrays.items() if n not in inputs}
    outs, _ = model.apply(params, inputs, state=state, train=True, rng=0)
    return outs if isinstance(outs, tuple) else (outs,)


def close(found, expected, what):
    scale = max(np.abs(np.float32(expected)).max(), 1e-3)
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=0, atol=4e-3 * scale, err_msg=what)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in COMPUTED])
def test_it_computes_in_float16_what_mxnet_computes(name, tmp_path):
    model = mxnet.load_symbol(write(tmp_path, name))
    arrays, state = given(name, "float16")
    outs = outputs_of(model, arrays, state)
    for i, out in enumerate(outs):
        close(out, RECORDED[f"{name}/out{i}"], f"output {i}")
    if "out0" not in recorded()[name]:
        return  # no gradients, or only some

    def loss(floats):
        outs = outputs_of(model, {**arrays, **floats}, state)
        heads = [jnp.asarray(rule(f"{name}/head{i}", out.shape, "n"), out.dtype) for i, out in enumerate(outs)]
        return sum((jnp.float32(out) * head).sum() for out, head in zip(outs, heads, strict=True))

    floats = {n: a for n, a in arrays.items() if CASES[name]["arrays"][n][1][0] != "i"}
    for n, grad in jax.grad(loss)(floats).items():
        close(grad, RECORDED[f"{name}/grad {n}"], f"gradient of {n}")


def test_what_mxnet_cannot_compute_in_float16_on_a_cpu():
    refused = set(RECORDED["refused"])
    assert {"conv plain", "dense", "dot", "batch dot", "lrn", "rnn lstm 1", "deconv plain", "instance norm"} <= refused
    assert len(refused) + len(COMPUTED) > 270


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_outputs_have_the_dtype_of_the_arrays(dtype, tmp_path):
    for name in OPERATORS:
        if name.startswith(SINGLE):
            continue
        model = mxnet.load_symbol(write(tmp_path, name))
        arrays, state = given(name, dtype)
        outs = jax.eval_shape(lambda a, m=model, s=state: outputs_of(m, a, s), arrays)
        expected = [dtype] + ["float32" if state else dtype] * (len(outs) - 1)  # statistics of a BatchNorm
        assert [out.dtype for out in outs] == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_network_in_a_narrow_dtype(dtype, tmp_path):
    name = "zoo mobilenet_v2_0_25"
    model = mxnet.load_symbol(write(tmp_path, name))
    arrays, state = given(name, dtype)
    arrays = {n: jnp.asarray(a, dtype) for n, a in arrays.items()}
    (out,) = jax.eval_shape(lambda a: outputs_of(model, a, state), arrays)
    assert out.dtype == dtype
