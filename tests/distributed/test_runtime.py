"""What jaxpar uses of jax beside its public names: all of it in one module, and all of it in the jax at hand."""

import ast
import inspect
from pathlib import Path

import jax

import jaxpar
from jaxpar import distributed
from jaxpar.distributed import _runtime

ROOT = Path(jaxpar.__file__).parent
BESIDE = ("global_state", "live_devices", "ProcessFailureError", "_jax", "_src")


def test_the_jax_at_hand_has_all_of_it():
    names = {**_runtime.NAMES, **_runtime.ELASTIC_NAMES}
    missing = [f"{name} ({names[name]})" for name in _runtime.missing(names)]
    assert not missing, f"jax {jax.__version__} has no {'; no '.join(missing)}"
    takes = inspect.signature(type(_runtime.job()).initialize).parameters
    options = {"coordinator_address", "num_processes", "process_id", "cluster_detection_method", "local_device_ids"}
    options |= {"heartbeat_timeout_seconds", "shutdown_timeout_seconds"}
    assert options <= takes.keys(), f"State.initialize of jax {jax.__version__} has no {options - takes.keys()}"
    live = _runtime.live_devices({})
    assert live is not _runtime.live_devices(), f"live_devices of jax {jax.__version__} is one for all"


def test_a_name_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(jax.experimental.multihost_utils, "ProcessFailureError")
    monkeypatch.delattr(jax.experimental.multihost_utils.distributed.State, "shutdown")
    assert _runtime.missing(_runtime.ELASTIC_NAMES) == ["distributed.State.shutdown", "ProcessFailureError"]


def test_no_other_module_uses_it():
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    users = {
        path
        for path, source in sources.items()
        if any(name in source for name in BESIDE)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in BESIDE
    }
    assert users == {"distributed/_runtime.py"}
    methods = {name.rpartition(".")[2] for name in _runtime.ELASTIC_NAMES if "Client" in name}
    assert methods == {name for name in vars(_runtime.Client) if not name.startswith("_")}
    assert not distributed.is_elastic()
