"""The house: rooms with doors, imports that go down, small modules, importing that costs nothing, examples that run."""

import ast
import doctest
import functools
import graphlib
import importlib
import importlib.util
import inspect
import re
import runpy
import textwrap
import threading
import typing
from pathlib import Path

import pytest
from launched import python

import jaxpar

ROOT = Path(jaxpar.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"
}

# A module may import its own room and any line above, whichever way the import is written.
LAYERS = (
    "_core",
    "_cpu _devices _heartbeat",
    "data",
    "mxnet",
    "compression sparse updaters models viz checkpoint distributed _launch",
    "_store",
    "kv",
    "parallel free_running train._step",
    "train._callbacks train._plan",
    "train._evaluate",
    "train._elastic",
    "train._fit",
    "train",
    "_cli",
    "__main__",
)
PRIVATE = ("_core", "_cpu", "_devices", "_heartbeat", "_launch", "_store", "_cli")
WITHOUT_JAX = ("_heartbeat", "_launch", *(f"_core.{m}" for m in ("text", "files", "process")))
# Rooms and modules that may touch the world.
EDGE = """
    _core.files _core.process _core.text _heartbeat _launch _cli __main__ data checkpoint mxnet._params
    mxnet._records mxnet._symbol distributed viz._draw viz._step.step train._callbacks train._evaluate
    train._elastic train._fit train._plan free_running
""".split()
WORLD = {"os", "sys", "socket", "threading", "signal", "time", "subprocess", "select", "io", "tempfile", "shutil"}


def room(module):
    parts = module.split(".")
    return ".".join(parts[:2]) if module.startswith("train._") else parts[0]


def layer(module):
    return next(i for i, rooms in enumerate(LAYERS) if room(module) in rooms.split())


def is_door(module):
    return FILES[module].name == "__init__.py" or "." not in module


@functools.cache
def import_nodes(module):
    tree = ast.walk(ast.parse(FILES[module].read_text()))
    return [node for node in tree if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(module):
    """The modules of the package that a module imports, inside functions and under TYPE_CHECKING too."""
    package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
    for node in import_nodes(module):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "jaxpar"):
            start = package[: len(package) - node.level + 1] if node.level else []
            inner = (node.module or "") if node.level else (node.module or "").removeprefix("jaxpar").strip(".")
            base = [*start, *filter(None, inner.split("."))]
            for name in node.names:
                full = ".".join([*base, name.name])
                yield full if full in FILES else ".".join(base)


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down_and_through_doors(module):
    for other in imports(module):
        assert other in FILES, f"{module} imports {other}, which is the package itself"
        if room(other) == room(module):
            continue
        assert layer(other) < layer(module), f"{module} imports {other}, which is not below it"
        own = room(module).split(".")[0] == room(other).split(".")[0]  # train is the door of its rooms
        assert own or is_door(other) or room(other) in PRIVATE, f"{module} imports {other}, past the door of its room"


def test_no_import_goes_round():
    """Doors are left out: what they import is what they show."""
    graph = {m: {o for o in imports(m) if o in FILES} - {m} for m in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names a circle


def foreign(module):
    """The modules of others that a module imports."""
    for node in import_nodes(module):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif not node.level:
            yield node.module


@pytest.mark.parametrize("module", FILES)
def test_nothing_private_of_jax(module):
    assert not any(name.startswith("jax._src") for name in foreign(module))


def touches(module):
    """The words of the world that a module uses: modules of I/O, `open`, `print`."""
    yield from {name.split(".")[0] for name in foreign(module)} & WORLD
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print"):
            yield node.func.id


# What is not I/O all the same, or is the user's own wish.
HARMLESS = {
    "viz._trace": {"print", "sys"},  # print_summary prints
    "viz._read.source": {"os", "sys"},  # where Python's own files are
    "_core.arrays": {"sys"},  # sys.modules
    "_core.calls": {"sys"},  # the names of Python's own modules
    "kv._params": {"sys"},  # sys.modules
}


@pytest.mark.parametrize("module", [m for m in FILES if not any(f"{m}.".startswith(f"{e}.") for e in EDGE)])
def test_the_core_is_pure(module):
    assert set(touches(module)) <= HARMLESS.get(module, set())


@pytest.mark.parametrize("module", [m for m in FILES if any(f"{m}.".startswith(f"{w}.") for w in WITHOUT_JAX)])
def test_rooms_without_jax(module):
    assert "jax" not in {name.split(".")[0] for name in foreign(module)}


def bodies(path):
    """(lines of the body without its docstring, name) of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield (body[-1].end_lineno - body[0].lineno + 1 if body else 0), node.name


def test_everything_is_small():
    assert not {m: n for m, p in FILES.items() if (n := len(p.read_text().splitlines())) > 500}
    assert not [(m, name, n) for m, p in FILES.items() for n, name in bodies(p) if n > 60]
    assert len([p for p in ROOT.iterdir() if p.name != "__pycache__"]) <= 24
    for folder in [p for p in ROOT.rglob("*") if p.is_dir() and p.name != "__pycache__"]:
        assert len(folder.relative_to(ROOT).parts) <= 2
        assert len(list(folder.glob("*.py"))) <= 20, folder


@pytest.mark.parametrize("module", [m for m, p in FILES.items() if p.name == "__init__.py"])
def test_a_door_has_no_code(module):
    for node in ast.parse(FILES[module].read_text()).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        words = isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == ["__all__"]
        assert docstring or words or isinstance(node, ast.ImportFrom), f"{module}: line {node.lineno}"


def test_the_picture_of_the_rooms_is_that_of_the_source():
    drawing = runpy.run_path(str(ROOT.parent / "tools" / "draw_rooms.py"))
    assert set(drawing["arrows"]()) <= drawing["drawn"](), "python tools/draw_rooms.py draws it again"
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    assert not [room for room in drawing["ROOMS"] if f"`{room}`" not in page]
    named = [path for path in re.findall(r"`([a-z_/]+\.py)`", page) if "/" in path]
    assert not [path for path in named if not ((ROOT / path).exists() or (ROOT.parent / path).exists())]


def own_classes():
    for module in FILES:
        found = importlib.import_module(f"jaxpar.{module}")
        yield from (c for c in vars(found).values() if inspect.isclass(c) and c.__module__ == found.__name__)


def private_names(cls):
    """The private names of a class and of its instances, as its source assigns them."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # of C
        return {name for name in vars(cls) if name.startswith("_")}
    return {name for name in map(assigned, ast.walk(ast.parse(source))) if name.startswith("_")}


def assigned(node):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


# Hooks that the base's own subclasses replace, and the word of notebooks.
MEANT = {"_get_help_string", "_repr_mimebundle_"}


def test_no_class_shares_a_private_name_with_a_foreign_base():
    """A new release of Python or a library may give one of its names to something else, as Python 3.13 did."""
    checked = 0
    for cls in own_classes():
        foreign = [c for c in cls.__mro__[1:] if not c.__module__.startswith("jaxpar")]
        assert threading.Thread not in foreign, f"{cls} is a thread; let it have one, see _core.process.daemon"
        ours = {name for name in private_names(cls) if not re.fullmatch("__.*__", name)}
        for base in set(foreign) - {object, typing.Generic, typing.Protocol}:
            checked += 1
            assert not (ours & private_names(base)) - MEANT, f"{cls} and {base}"
    assert checked > 30


def printed_by(program):
    return python("-W", "error", "-c", textwrap.dedent(program)).stdout


def test_importing_starts_no_backend():
    printed_by("""
        import jaxpar as jp
        for name in ("kv", "updaters", "compression", "sparse", "parallel", "train", "models", "data", "viz",
                     "checkpoint", "distributed", "mxnet"):
            assert name in dir(jp) and getattr(jp, name).__name__ == "jaxpar." + name
        jp.parallel.use_cpu_devices(3)
        import jax
        assert len(jax.devices()) == 3
    """)


def test_the_package_alone_does_not_even_load_jax():
    assert printed_by("import sys, jaxpar; print('jax' in sys.modules, jaxpar.__version__)").startswith("False 0.")


class Finder(doctest.DocTestFinder):
    """Finds the examples of decorated functions too."""

    def _from_module(self, module, object):
        return super()._from_module(module, inspect.unwrap(object) if inspect.isfunction(object) else object)


@pytest.mark.parametrize("module", [m for m, path in FILES.items() if ">>> " in path.read_text()])
def test_examples_in_docstrings(module):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    found = importlib.import_module(f"jaxpar.{module}")
    for test in Finder().find(found, found.__name__):
        runner.run(test)
    assert runner.summarize(verbose=False).attempted
    assert not runner.summarize(verbose=False).failed
