"""Devices: splitting, copying, summing, one function on all of them."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_model import put, whole_numbers
from launched import python

from jaxpar import parallel
from jaxpar.parallel import _arrays, _spmd

_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGES = _HUGE.read_text() if _HUGE.exists() else ""


@pytest.mark.parametrize(
    ("n", "k", "sizes"), [(8, 4, [2] * 4), (10, 4, [3, 3, 2, 2]), (38, 8, [5] * 6 + [4] * 2), (3, 4, [1, 1, 1, 0])]
)
def test_uneven_splits_are_mxnets(n, k, sizes):
    devices = jax.devices()[:k]
    parts = parallel.split_and_load(jnp.arange(n), devices, even_split=False)
    assert [len(p) for p in parts] == sizes
    assert [p.devices() for p in parts] == [{d} for d in devices]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(n))


def test_trees_and_numpy_arrays_are_split_too():
    parts = parallel.split_and_load({"image": np.ones((4, 2)), "label": np.arange(4)}, jax.devices()[:2])
    assert [p["label"].tolist() for p in parts] == [[0, 1], [2, 3]]
    assert parts[1]["image"].devices() == {jax.devices()[1]}


def test_copies_have_memory_of_their_own():
    params = {"w": jnp.ones(3)}
    for device in jax.devices()[:2]:
        copy = parallel.copy_to(params, device)
        assert copy["w"].devices() == {device}
        copy["w"].delete()
    everywhere = parallel.replicate(params, jax.devices()[:4])
    assert everywhere["w"].sharding.is_fully_replicated
    assert len(everywhere["w"].addressable_shards) == 4
    everywhere["w"].delete()
    np.testing.assert_array_equal(params["w"], np.ones(3))


@pytest.mark.parametrize("place", [[0], [0, 1, 2, 3], [1, 1], [3, 0, 3, 2, 1], list(range(8))], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_allreduce(place, dtype):
    given = list(whole_numbers(0, len(place), 3, 2).astype(dtype))
    devices = [jax.devices()[i] for i in place]
    values = put(given, devices)
    sums = parallel.allreduce(values)
    assert [s.devices() for s in sums] == [{d} for d in devices]
    for total, value, before in zip(sums, values, given, strict=True):
        assert total.dtype == dtype
        np.testing.assert_array_equal(total, sum(given))
        np.testing.assert_array_equal(value, before)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_spmd(engine, count):
    devices = jax.devices()[:count]

    def fn(x, tree, scale):
        total = jax.lax.psum(x, "i")
        return total * scale, {"own": x + tree["y"], "rank": jax.lax.axis_index("i")}

    run = parallel.spmd(fn, engine=engine, axis_name="i", devices=devices, in_axes=(0, 0, None), out_axes=(None, 0))
    x, y = whole_numbers(0, count, 3), whole_numbers(1, count, 3)
    total, rest = run(x, {"y": y}, 2.0)
    np.testing.assert_array_equal(total, 2 * x.sum(0))
    np.testing.assert_array_equal(rest["own"], x + y)
    assert rest["rank"].tolist() == list(range(count))
    assert rest["own"].sharding.device_set == set(devices)
    assert run.__name__ == "fn"


def test_spmd_gives_the_gradient_of_the_whole_batch(engine):
    """shard_map sums the gradients of replicated arguments by itself where its checks are on: four times too much."""
    x, w = whole_numbers(0, 4, 2), jnp.float32(1.5)

    def fn(w, x):
        return jax.lax.pmean(jax.grad(lambda w: (w * x).mean())(w), "i")

    run = parallel.spmd(fn, engine=engine, axis_name="i", devices=jax.devices()[:4], in_axes=(None, 0), out_axes=None)
    np.testing.assert_allclose(run(w, x), x.mean(), rtol=1e-6)


def test_spmd_donates():
    run = parallel.spmd(lambda x: x + 1, axis_name="i", devices=jax.devices()[:2], donate_argnums=0)
    x = run(jnp.zeros((2, 3)))
    run(x)
    assert x.is_deleted()


def test_use_cpu_devices_after_jax_has_started():
    parallel.use_cpu_devices(len(jax.devices()))
    assert len(jax.devices()) == 8


@pytest.mark.slow
def test_use_cpu_devices_before():
    program = "from jaxpar.parallel import use_cpu_devices as use; use(3); import jax; print(jax.devices()); use(3)"
    assert python("-c", program, JAX_PLATFORMS="").stdout.count("Cpu") == 3


STEPS = """
import resource, sys
from jaxpar import parallel
parallel.use_cpu_devices(1, keep_memory=sys.argv[1] == "keep")
import jax, jax.numpy as jnp

@jax.jit
def step(x):  # 40 MB in between
    return jnp.sin(jnp.broadcast_to(x[:, None], (2000, 5000))) @ jnp.ones((5000, 8))

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

x = jnp.ones(2000)
print(sorted(pages() for _ in range(60))[30])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of the GNU C library")
@pytest.mark.skipif("[always]" in HUGE_PAGES, reason="huge pages: a step touches a few pages anew in any case")
def test_a_step_touches_no_new_pages_where_memory_is_kept():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "MALLOC", "GLIBC"))}
    pages = {
        how: int(subprocess.run([sys.executable, "-c", STEPS, how], env=clean, capture_output=True, check=True).stdout)
        for how in ("keep", "give back")
    }
    assert pages["keep"] < 100 < 5_000 < pages["give back"]


def test_memory_that_cannot_be_kept_is_said(monkeypatch):
    monkeypatch.setattr(_arrays, "keep_freed_memory", lambda: False)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="keep_memory needs the GNU C library"):
        parallel.use_cpu_devices(8, keep_memory=True)


def test_spmd_waits_for_its_inputs_where_older_jax_can_hang(monkeypatch):
    """A program with collectives that was started while its inputs were being computed hung in a notebook."""
    ready = []
    monkeypatch.setattr(_spmd, "wait_before_collectives", lambda args, devices: ready.append((args, devices)))
    devices, values = tuple(jax.devices()[:2]), jnp.arange(2.0)
    total = parallel.spmd(lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=devices)
    assert total(values).tolist() == [1.0, 1.0]
    assert ready == [((values,), devices)]
