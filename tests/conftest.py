"""Every test sees eight emulated CPU devices; rank promotion is an error, as warnings are.

What XLA compiles is kept in .cache/xla: workers, the processes that tests start, and the next run load it, which takes
a third of the time. JAX_COMPILATION_CACHE_DIR chooses another place.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.02")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(params=[1, 2, 4, 8], ids=lambda n: f"{n}dev")
def devices(request):
    return jax.devices()[: request.param]
