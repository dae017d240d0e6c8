"""Params by name in a `.safetensors` file."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import checkpoint, kv, train

safetensors = pytest.importorskip("safetensors")

PARAMS = {
    "conv1": {"kernel": jnp.arange(30, dtype=jnp.float32).reshape(5, 6), "bias": jnp.ones(6, jnp.bfloat16)},
    "scale": jnp.float16(0.5),
}
WANTED = {"conv1.kernel": PARAMS["conv1"]["kernel"], "conv1.bias": PARAMS["conv1"]["bias"], "scale": PARAMS["scale"]}


def loss_fn(params, batch, rng):
    return jnp.sum(params["conv1"]["kernel"]), {}


@pytest.mark.parametrize("what", ["params", "sharded", "state"])
def test_params_go_out_by_name_and_come_back(tmp_path, what):
    state = {
        "params": lambda: PARAMS,
        "sharded": lambda: kv.from_params(PARAMS, kind="sharded", devices=jax.devices()[:4], optimizer=optax.adam(0.1)),
        "state": lambda: train.start(PARAMS, optax.adam(0.1), loss_fn, kind="sharded", devices=jax.devices()[:4])[0],
    }[what]()
    checkpoint.export(state, tmp_path / "new" / "model.safetensors")
    loaded = checkpoint.load(tmp_path / "new" / "model.safetensors")
    assert loaded.keys() == WANTED.keys()
    for name, array in WANTED.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], np.asarray(array))


def test_what_cannot_be_exported_or_loaded(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=r"two params would have the name 'a\.b'"):
        checkpoint.export({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}, path)
    with pytest.raises(TypeError, match="PRNGKey"):
        checkpoint.export({"rng": jax.random.key(0)}, path)
    with pytest.raises(safetensors.SafetensorError, match="complex128"):
        checkpoint.export({"a": np.ones(2, np.complex128)}, path)
    assert not path.exists()
    checkpoint.export(PARAMS, path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(checkpoint.CheckpointError, match=r"is not a good \.safetensors file"):
        checkpoint.load(path)
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "nothing")
