"""The house: rooms with doors, imports that go down, a pure core, importing that costs nothing, examples that run.

A rule is one test, which lists all that break it.
"""

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
    "compression sparse updaters models viz checkpoint distributed _launch",
    "_store",
    "kv",
    "parallel free_running train._step",
    "train._callbacks train._plan",
    "train._evaluate",
    "train._elastic",
    "train._fit",
    "train._runs",
    "train",
    "mxnet",
    "_cli",
    "__main__",
)
PRIVATE = ("_core", "_cpu", "_devices", "_heartbeat", "_launch", "_store", "_cli")
WITHOUT_JAX = ("_heartbeat", "_launch", *(f"_core.{m}" for m in ("text", "files", "options", "process")))
# Rooms and modules that may touch the world.
EDGE = """
    _core.files _core.process _core.text _heartbeat _launch _cli __main__ data checkpoint
    mxnet._records mxnet._symbol distributed viz._draw viz._step.profile viz._step.step train._callbacks train._evaluate
    train._elastic train._fit train._plan train._runs free_running
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


def test_imports_go_down_and_through_doors():
    wrong = []
    for module in FILES:
        for other in imports(module):
            if other not in FILES:
                wrong.append(f"{module} imports {other}, which is the package itself")
            elif room(other) != room(module):
                if layer(other) >= layer(module):
                    wrong.append(f"{module} imports {other}, which is not below it")
                own = room(module).split(".")[0] == room(other).split(".")[0]  # train is the door of its rooms
                if not (own or is_door(other) or room(other) in PRIVATE):
                    wrong.append(f"{module} imports {other}, past the door of its room")
    assert not wrong
    # Doors are left out of the graph: what they import is what they show.
    graph = {m: {o for o in imports(m) if o in FILES} - {m} for m in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names a circle


def foreign(module):
    """The modules of others that a module imports."""
    for node in import_nodes(module):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif not node.level:
            yield node.module


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
    "_core.recent": {"sys"},  # sys.modules
    "kv._params": {"sys"},  # sys.modules
    "train._step.modules": {"sys"},  # sys.modules
    "mxnet._port": {"sys"},  # the names of Python's own modules
    "kv._push": {"sys"},  # the frames between a warning and the user
}


def is_in(module, rooms):
    return any(f"{module}.".startswith(f"{room}.") for room in rooms)


def test_the_core_is_pure_and_uses_what_is_public():
    """I/O is in the rooms that are named for it; some rooms start without jax; nothing is jax's own secret."""
    wrong = []
    for module in FILES:
        others = set(foreign(module))
        if not is_in(module, EDGE) and (found := set(touches(module)) - HARMLESS.get(module, set())):
            wrong.append(f"{module} touches the world: {found}")
        if is_in(module, WITHOUT_JAX) and "jax" in {name.split(".")[0] for name in others}:
            wrong.append(f"{module} imports jax")
        if found := {name for name in others if name.startswith("jax._src")}:
            wrong.append(f"{module} imports {found}, which is private to jax")
    assert not wrong


def test_a_door_has_no_code():
    wrong = []
    for module in [m for m, path in FILES.items() if path.name == "__init__.py"]:
        for node in ast.parse(FILES[module].read_text()).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)]
            if not (docstring or names == ["__all__"] or isinstance(node, ast.ImportFrom)):
                wrong.append(f"{module}: line {node.lineno}")
    assert not wrong


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
    checked, wrong = 0, []
    for cls in own_classes():
        bases = [c for c in cls.__mro__[1:] if not c.__module__.startswith("jaxpar")]
        if threading.Thread in bases:
            wrong.append(f"{cls} is a thread; let it have one, see _core.process.daemon")
        ours = {name for name in private_names(cls) if not re.fullmatch("__.*__", name)}
        for base in set(bases) - {object, typing.Generic, typing.Protocol}:
            checked += 1
            if shared := (ours & private_names(base)) - MEANT:
                wrong.append(f"{cls} and {base}: {shared}")
    assert not wrong
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


@pytest.mark.slow
def test_who_needs_no_mxnet_pictures_or_launcher_loads_none():
    for room, absent in (
        ("kv", "mxnet viz data train"),
        ("train", "mxnet viz _launch _cli free_running train._elastic"),
    ):
        loaded = printed_by(f"import sys, jaxpar.{room}; print(*(name for name in sys.modules if 'jaxpar.' in name))")
        assert not {f"jaxpar.{name}" for name in absent.split()} & {*loaded.split()}


@pytest.mark.slow
def test_who_reads_and_writes_no_files_needs_no_libraries_of_files():
    """No room loads one at import, and the store, a picture and `fit` without files run where there is none."""
    printed_by("""
        import sys
        for name in ("tensorflow_datasets", "orbax", "tensorstore", "PIL", "pyarrow", "tqdm", "matplotlib"):
            sys.modules[name] = None  # `import` raises
        import jax, jax.numpy as jnp, numpy as np, optax
        import jaxpar as jp
        for room in jp._MODULES:
            getattr(jp, room)
        store = jp.kv.push(jp.kv.init(jp.kv.create(), 3, jnp.ones(2)), 3, jnp.ones(2))
        assert jp.kv.pull(store, 3).tolist() == [1.0, 1.0]
        loss_fn = lambda params, batch: ((batch["x"] @ params["w"]) ** 2).mean()
        assert "tanh" in jp.viz.plot_network(jnp.tanh, jnp.ones(2)).source
        state, step = jp.train.start({"w": jnp.ones(2)}, optax.sgd(0.1), loss_fn)
        state, history = jp.train.fit(state, step, {"x": np.ones((8, 2), np.float32)}, epochs=1, batch_size=8)
        assert history[0]["loss"] == 4.0
    """)


class Finder(doctest.DocTestFinder):
    """Finds the examples of decorated functions too."""

    def _from_module(self, module, object):
        return super()._from_module(module, inspect.unwrap(object) if inspect.isfunction(object) else object)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("module", [m for m, path in FILES.items() if re.search(r">>> (?!.*\+SKIP)", path.read_text())])
def test_examples_in_docstrings(module):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    found = importlib.import_module(f"jaxpar.{module}")
    for test in Finder().find(found, found.__name__):
        runner.run(test)
    assert runner.summarize(verbose=False).attempted
    assert not runner.summarize(verbose=False).failed
