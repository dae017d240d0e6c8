"""Numbers at and beyond the limits of what they mean: each is taken, or refused by name."""

import copy
import math
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launched import refused

from jaxpar import checkpoint, data, kv, parallel, train
from jaxpar.checkpoint import _mxnet

POINTS = data.Dataset(np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], np.array([0, 1, 2, 1]))
HUGE = 10**5000
NUMBERS = {
    "devices": (parallel.use_cpu_devices, (), [True, 0, -1, 4097, 2**70, HUGE, 1.0, math.nan]),
    "size": (lambda n: data.num_batches(n, 4), (0, 10), [True, -1, 2**70, HUGE, 1.5]),
    "batch_size": (lambda n: data.num_batches(10, n), (1, 11), [True, 0, -3, 2**70, HUGE, math.inf]),
    "most": (lambda n: train.mistakes({}, lambda p, x: 9 * x, POINTS, most=n), (0, 1, None), [True, -1, 2**70, 0.5]),
    "fraction": (lambda n: data.split(POINTS, n), (0.5, 1), [0, 4, -1, 1e308, -1e308, math.inf, math.nan, True]),
    "initial": (lambda n: train.DynamicLossScale(initial=n), (8,), [0, -1.0, 1e9, math.inf, math.nan, "8", True]),
    "period": (lambda n: train.DynamicLossScale(period=n), (1,), [0, -1, 1.5, math.inf, math.nan, True, 2**70]),
    "factor": (lambda n: train.DynamicLossScale(factor=n), (1.5, 4), [1, 0.5, math.inf, math.nan, True]),
    "least": (lambda n: train.DynamicLossScale(least=n), (1e-3,), [0, -1, math.inf, math.nan, 1e9]),
    "keep": (lambda n: checkpoint.Manager("unused", keep=n), (), [0, -1, 1.5, True, HUGE, None]),
}
CASES = [(name, value) for name, (_, _, wrong) in NUMBERS.items() for value in wrong]


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda x: str(x)[:12] if x is not HUGE else "huge")
def test_a_number_beyond_its_limits_is_refused(name, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, good, _ = NUMBERS[name]
    for number in good:
        call(number)
    with pytest.raises((TypeError, ValueError), match=name if name not in ("devices",) else "n must be"):
        call(value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["seed = " + "9" * 5000, "seed = 0x" + "f" * 5000, "epochs = 1e999", "x = " + "[" * 9999]
)
def test_a_number_of_many_digits_in_a_configuration(text, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(text)
    assert "run.toml" in refused(capsys, "train", "--config", str(tmp_path / "run.toml"))


@pytest.mark.parametrize("epochs", ["9" * 400, "9" * 5000, "1e3", "9223372036854775808"])
def test_a_number_of_many_digits_on_the_command_line(epochs, capsys):
    assert "must be an int of 1 or more" in refused(capsys, "train", "--epochs", epochs)


def params_file(path, *shapes):
    array = b"".join(
        struct.pack(f"<Iii{len(shape)}qiii", _mxnet._ARRAY_NUMPY, 0, len(shape), *shape, 1, 0, 0) for shape in shapes
    )
    path.write_bytes(struct.pack("<QQQ", _mxnet._LIST, 0, len(shapes)) + array + struct.pack("<Q", 0))
    return path


@pytest.mark.parametrize("shape", [(0, 2**62), (2**62, 0), (2**40, 0, 2**40), (2**62,), (2**31, 2**31, 4, 0)])
def test_a_file_of_mxnet_whose_shape_nothing_holds(shape, tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        checkpoint.load_mxnet(params_file(tmp_path / "a.params", (0, 3), shape))


def test_a_file_of_mxnet_with_empty_arrays(tmp_path):
    found = checkpoint.load_mxnet(params_file(tmp_path / "a.params", (0, 3), (2, 0)))
    assert [array.shape for array in found.values()] == [(0, 3), (2, 0)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["local", "sharded", "device", "dist_async"])
def test_a_deep_copy_of_a_state(kind):
    store = kv.from_params({"w": jnp.ones((4, 2))}, kind=kind, optimizer=optax.adam(0.1), devices=jax.devices()[:2])
    state = train.create_state(store, 0)
    other = copy.deepcopy(state)
    assert other.store == state.store
    assert jax.tree.structure(other) == jax.tree.structure(state)
    step = train.make_train_step(lambda params, batch, rng: ((params["w"] - batch).sum(), {}))
    assert step(state, jnp.ones((2, 1)))[1]["loss"] == step(other, jnp.ones((2, 1)))[1]["loss"]
    assert jnp.isfinite(kv.to_params(copy.deepcopy(store))["w"]).all()
    assert copy.copy(state).store is state.store
