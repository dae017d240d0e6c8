"""The public names and their arguments, beside those in public_names.txt. After a wanted change:

PYTHONPATH=. python tests/house/test_public_names.py
"""

import importlib
import inspect
import types
from pathlib import Path

import jaxpar

KNOWN = Path(__file__).with_name("public_names.txt")
ROOMS = [
    name for name in dir(jaxpar) if isinstance(getattr(jaxpar, name), types.ModuleType) and not name.startswith("_")
]


def arguments(value):
    """As in a call: `(store, key, *, axis_name=None)`. Nothing for an exception, or what cannot be called."""
    is_class = isinstance(value, type) and not issubclass(value, Exception)
    if not (is_class or inspect.isroutine(value) or hasattr(value, "__wrapped__")):
        return ""
    # A default that is no plain value prints otherwise on other days.
    plain = (type(inspect.Parameter.empty), bool, int, float, str, type(None))
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(value).parameters.values()]
    parameters = [p if type(p.default) in plain or p.default == () else p.replace(default=...) for p in parameters]
    return str(inspect.Signature(parameters))


def lines():
    for room in sorted(ROOMS):
        module = importlib.import_module(f"jaxpar.{room}")
        public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        for name in sorted(public):
            value = getattr(module, name)
            if isinstance(value, types.ModuleType):
                continue
            yield f"{room}.{name}{arguments(value)}"
            if isinstance(value, type) and value.__module__.startswith("jaxpar"):
                for member, of_class in sorted(vars(value).items()):
                    if not member.startswith("_"):
                        yield f"    .{member}{arguments(getattr(of_class, '__func__', of_class))}"


def test_public_names_and_arguments_are_those_that_are_known():
    known, found = KNOWN.read_text().splitlines(), [*lines()]
    assert found == known


if __name__ == "__main__":
    KNOWN.write_text("".join(f"{line}\n" for line in lines()))
