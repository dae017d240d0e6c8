"""The house: imports go down, importing costs nothing, the examples in the docstrings run."""

import ast
import doctest
import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import jaxpar

ROOT = Path(jaxpar.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "jaxpar.") if not m.name.endswith("__main__"))

# Floor 0: types and checks; 1: pure parts, and the way to other processes; 2: the store and the step; 3: the edge.
FLOORS = {
    0: "_check _donated _formula _pmapped _processes _put _recent _settle _types",
    1: "_cluster _compressed _compressor _event_file _hub _lowrank _meeting _monitor _mxnet_rules _quantize _relay "
    "_elementwise _messages _rowsparse _shares _sharing _wire buckets collectives compression distributed models mxnet_optimizers sparse updaters viz",
    2: "_across _apart _delay _display _eager _finite _gradient _local_steps _loss _one_device _params _pmap_across "
    "_program _pull _push _push_rows _scaling _state _state_display _step _store kv parallel",
}


def floor(module):
    name = module.removeprefix("jaxpar.").split(".")[0]
    return next((level for level, names in FLOORS.items() if name in names.split()), 3)


def imported(module):
    """The modules of the package that a module imports when it is imported."""
    path = ROOT.joinpath(*module.split(".")[1:])
    package = module if path.is_dir() else module.rpartition(".")[0]
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            base = f"{base}.{node.module}" if node.module else base
            for name in node.names:
                yield f"{base}.{name.name}" if f"{base}.{name.name}" in MODULES else base
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ([node.module] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names])


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    for other in imported(module):
        assert not other.startswith("jax._src"), f"{module} imports {other}"
        assert not other.startswith("jaxpar.") or floor(other) <= floor(module), f"{module} imports {other}, above it"


def test_no_import_goes_round():
    graph = {m: [o for o in imported(m) if o in MODULES] for m in MODULES}
    done, under_way = set(), []

    def visit(module):
        assert module not in under_way, f"{' -> '.join([*under_way, module])}"
        if module not in done:
            under_way.append(module)
            for other in graph[module]:
                if other != module:
                    visit(other)
            under_way.pop()
            done.add(module)

    for module in MODULES:
        visit(module)


def python(program):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_starts_no_backend_and_loads_nothing_heavy():
    python("""
        import sys, jaxpar as jp
        for name in ("kv", "updaters", "compression", "sparse", "parallel", "train", "models", "data", "viz",
                     "checkpoint", "distributed"):
            assert name in dir(jp) and getattr(jp, name).__name__ == "jaxpar." + name
        heavy = ("optax", "tensorflow_datasets", "orbax", "graphviz", "matplotlib", "tqdm", "flax")
        assert not [name for name in heavy if name in sys.modules], sorted(set(heavy) & set(sys.modules))
        jp.parallel.use_cpu_devices(3)
        import jax
        assert len(jax.devices()) == 3
    """)


def test_the_package_alone_does_not_even_load_jax():
    assert python("import sys, jaxpar; print('jax' in sys.modules, jaxpar.__version__)").startswith("False 0.")


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'kvstore'"):
        jaxpar.kvstore  # noqa: B018


@pytest.mark.parametrize(
    "module", [m for m in MODULES if ">>> " in Path(importlib.util.find_spec(m).origin).read_text()]
)
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed
