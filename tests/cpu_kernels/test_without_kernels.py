"""Without the kernels of jaxpar-cpu, or where they do not fit, XLA's own are used, and one line says why."""

import importlib
import logging
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar._cpu import fast_loops, kernels
from jaxpar.models import fast_on_cpus

X, W = np.ones((2, 6, 6, 8), np.float32), np.ones((3, 3, 8, 8), np.float32)


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.fixture
def package(monkeypatch):
    """The package jaxpar_cpu of this repository, new, with or without a library beside it."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "cpu")
    monkeypatch.delitem(sys.modules, "jaxpar_cpu", raising=False)
    kernels.are_loaded.cache_clear()
    yield importlib.import_module("jaxpar_cpu")
    kernels.are_loaded.cache_clear()
    sys.modules.pop("jaxpar_cpu", None)


def falls_back(caplog, level, reason):
    with caplog.at_level(logging.INFO, "jaxpar"):
        texts = [jax.jit(lambda x, w: fast_on_cpus(conv)(x, w)).lower(X, W).as_text() for _ in range(2)]
    assert all("stablehlo.convolution" in text for text in texts)
    lines = [record for record in caplog.records if record.name == "jaxpar"]
    assert [line.levelno for line in lines] == [level]
    assert reason in lines[0].getMessage()
    np.testing.assert_array_equal(jax.jit(fast_on_cpus(conv))(X, W), jax.jit(conv)(X, W))


def test_a_loop_without_kernels_is_the_scan_that_it_was(monkeypatch):
    def gru(w, x):
        def step(h, x):
            xr, xz, xn = jax.numpy.split(x, 3, axis=-1)
            r, z, n = jax.numpy.split(h @ w, 3, axis=-1)
            r, z = jax.nn.sigmoid(xr + r), jax.nn.sigmoid(xz + z)
            h = (1.0 - z) * jax.numpy.tanh(xn + r * n) + z * h
            return h, h

        return jax.lax.scan(step, x[0, :, :4], x)

    args = np.ones((4, 12), np.float32), np.ones((5, 2, 12), np.float32)
    monkeypatch.setattr(kernels, "are_loaded", lambda: False)
    assert fast_loops(gru, "cpu") is gru
    text = str(jax.make_jaxpr(fast_on_cpus(gru))(*args))
    assert "recurrent" not in text
    assert text.count("scan[") == str(jax.make_jaxpr(gru)(*args)).count("scan[") == 1


def test_no_package(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "jaxpar_cpu", None)
    kernels.are_loaded.cache_clear()
    try:
        falls_back(caplog, logging.INFO, "jaxpar-cpu is not installed")
    finally:
        kernels.are_loaded.cache_clear()


def test_no_library(package, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(package, "_LIBRARY", tmp_path / "libjaxpar_cpu.so")
    falls_back(caplog, logging.WARNING, "the library cannot be loaded")


def test_older_kernels_have_none_for_bfloat16(package, monkeypatch):
    monkeypatch.delattr(package, "has_fast_bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "are_loaded", lambda: True)
        assert not kernels.multiply_bfloat16.__wrapped__()


def test_turned_off(package, monkeypatch, caplog):
    monkeypatch.setenv("JAXPAR_CPU_KERNELS", "0")
    falls_back(caplog, logging.INFO, "JAXPAR_CPU_KERNELS=0")


@pytest.mark.parametrize(("more", "more_minor"), [(0, 1), (1, 0)], ids=["newer", "another"])
def test_a_library_for_another_ffi_is_not_registered(package, monkeypatch, caplog, more, more_minor):
    """XLA would stop JAX at a handler of a newer FFI."""
    major, minor = package.ffi_version()
    built = {"JaxparFfiMajor": lambda: major + more, "JaxparFfiMinor": lambda: minor + more_minor}
    library = types.SimpleNamespace(**built)
    monkeypatch.setattr(package.ctypes, "CDLL", lambda path: library)  # it has no handler that could be registered
    falls_back(caplog, logging.WARNING, "install jaxpar-cpu again")


def test_the_version_of_the_ffi_is_that_of_jaxlib(package):
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    major, minor = package.ffi_version()
    assert f"#define XLA_FFI_API_MAJOR {major}\n" in header
    assert f"#define XLA_FFI_API_MINOR {minor}\n" in header
