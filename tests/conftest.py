"""Every test sees eight emulated CPU devices; rank promotion is an error, as warnings are."""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(params=[1, 2, 4, 8], ids=lambda n: f"{n}dev")
def devices(request):
    return jax.devices()[: request.param]
