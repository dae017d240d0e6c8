"""The Python call stack of an equation, from JAX's public traceback objects.

The frames tell one call from another: a function at a place is a layer, and a place that comes again is a repeat.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import jax

_JAX = os.path.dirname(os.path.abspath(str(jax.__file__))) + os.sep
_VIZ = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAXPAR = os.path.dirname(os.path.dirname(_VIZ)) + os.sep
# Of JAX's own frames only those of its public functions say what is computed. The others are how it traces.
_JAX_PUBLIC = tuple(
    os.path.join(_JAX, "_src", part)
    for part in ("numpy/", "nn/", "scipy/", "lax/", "image/", "ops/", "random/core.py", "random.py", "initializers")
)
_MODELS = os.path.join(_JAXPAR, "models") + os.sep
_KERAS = os.sep + os.path.join("keras", "src") + os.sep
_WRAPPERS = ("wrapper", "wrapped")  # functions of libraries that only call another
ANONYMOUS = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<module>")  # functions without a name


_SCOPE = re.compile(r"[\w.~/\[\]()<>:+ -]+")
_JUNK_SCOPES = frozenset(("checkpoint", "closed_call", "remat", "core_call", "~"))
_KINDS = "eqx.nn."  # how scopes begin that Equinox names after a class, not after what its author called it


@dataclass(frozen=True, slots=True)
class Frame:
    """A call on the stack."""

    origin: str  # "user", "library" or "jax"
    package: str  # of a library: "flax", "optax", ...
    name: str  # qualified: "LayerNorm.__call__"
    file: str  # the last two parts of its path
    line: int
    function: int  # the same number for every call in a function
    call: int  # another number for every place in it


class _Traceback(Protocol):
    """That of JAX, of an equation."""

    def raw_frames(self) -> tuple[list[CodeType], list[int]]: ...
    def code_addr2line(self, code: CodeType, offset: int, /) -> int: ...


class Sources:
    """Reads stacks, and numbers functions and places so that stacks compare fast.

    The instruction offset of a frame (`raw_frames`) tells two calls on one line apart.
    """

    def __init__(self) -> None:
        self._frames: dict[Any, Frame | None] = {}
        self._stacks: dict[int, tuple[Any, tuple[Frame, ...]]] = {}
        self._functions: dict[Any, int] = {}

    def stack(self, source_info: object) -> tuple[Frame, ...]:
        """The calls from the outside in, without those of `jaxpar.viz`. Empty where JAX kept none."""
        traceback = getattr(source_info, "traceback", None)
        if traceback is None:
            return ()
        entry = self._stacks.get(id(traceback))
        if entry is None:
            entry = (traceback, self._read(traceback))  # kept alive, or another would get its id
            self._stacks[id(traceback)] = entry
        return entry[1]

    def _read(self, traceback: _Traceback) -> tuple[Frame, ...]:
        codes, offsets = traceback.raw_frames()
        frames = [self._by_code(traceback, code, at) for code, at in zip(codes, offsets, strict=True)]
        return tuple(frame for frame in reversed(frames) if frame is not None)

    def _by_code(self, traceback: _Traceback, code: CodeType, offset: int) -> Frame | None:
        key = (code.co_filename, code.co_firstlineno, code.co_qualname, offset)
        if key not in self._frames:
            line = traceback.code_addr2line(code, offset)
            self._frames[key] = self._frame(code.co_filename, code.co_qualname, line, key[:3])
        return self._frames[key]

    def _frame(self, file: str, name: str, line: int, function: tuple[str, int, str]) -> Frame | None:
        origin, package = _origin(file)
        if origin == "" and file.startswith(_JAX) and name.startswith("associative_scan"):
            origin = package = "jax"  # other loops are regions of the jaxpr
        if origin == "" or (origin == "library" and name.endswith(_WRAPPERS)):
            return None
        if package == "keras" and name.endswith("Normalization.call"):
            name = name.replace("Normalization.call", "Norm.__call__")  # as other libraries call it
        number = self._functions.setdefault(function, len(self._functions))
        return Frame(origin, package, name, short_path(file), line, number, len(self._frames))


def _origin(file: str) -> tuple[str, str]:
    """The origin and the package of a file. Both are empty for frames that say nothing."""
    if file.startswith(_JAX):
        public = file.startswith(_JAX_PUBLIC) and "control_flow" not in file
        return ("jax", "jax") if public else ("", "")
    if file.startswith(_VIZ):
        return "", ""
    if file.startswith(_JAXPAR) and not file.startswith(_MODELS):
        return "library", "jaxpar"
    for root in ("site-packages", "dist-packages"):
        _, separator, inside = file.partition(f"{os.sep}{root}{os.sep}")
        if separator:
            return "library", inside.split(os.sep)[0].removesuffix(".py")
    if _KERAS in file:  # installed elsewhere
        return "library", "keras"
    return "user", ""


def is_users(file: str) -> bool:
    """Whether a file is the user's own, not one of a library."""
    return _origin(file)[0] == "user"


def short_path(file: str) -> str:
    """The last two parts of a path."""
    return "/".join(file.replace("\\", "/").split("/")[-2:])


def function_of(jaxpr: object) -> str:
    """The function that a jaxpr was traced from: "relu at /path/to/activation.py:90". Empty where JAX kept none."""
    return str(getattr(getattr(jaxpr, "debug_info", None), "func_src_info", "") or "")


def is_jax_function(jaxpr: object) -> bool:
    """Whether a jaxpr is of a JAX function, such as `jax.nn.relu`."""
    return _JAX in function_of(jaxpr)


def describe(stack: tuple[Frame, ...]) -> str:
    """The innermost frame of the user or a library: "file.py:12 in function"."""
    for origin in ("user", "library"):
        for frame in reversed(stack):
            if frame.origin == origin:
                return f"{frame.file}:{frame.line} in {frame.name.replace('<locals>.', '')}"
    return ""


def name_stack(info: object) -> tuple[tuple[str, ...], bool, bool, bool]:
    """The user's scopes, and whether an equation is of a gradient, was differentiated, or is computed again."""
    entries = getattr(getattr(info, "name_stack", None), "stack", ())
    names, backward, tangent, again = [], False, False, False
    for entry in entries:
        name = str(getattr(entry, "name", ""))
        if type(entry).__name__ == "Transform":
            backward |= name == "transpose"
            tangent |= name == "jvp"
        elif name == "rematted_computation":
            again = True
        elif _is_scope(name):
            names.append(name)
    return tuple(names), backward, tangent, again


@functools.lru_cache(maxsize=4096)
def _is_scope(name: str) -> bool:
    """Whether a name is the user's, not one that JAX or a library gives."""
    is_plain = bool(_SCOPE.fullmatch(name)) and "->" not in name
    return is_plain and name not in _JUNK_SCOPES and not name.startswith(_KINDS)
