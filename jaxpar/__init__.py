"""MXNet's KVStore, multi-device trainer and network plots for JAX, as pure functions over immutable pytrees.

Each name below is a module. It is imported at first use:

- `jp.kv`: the store: `init`, `push`, `pull`, ...
- `jp.updaters`: how a push changes the stored value. Optax transforms are updaters.
- `jp.compression`, `jp.sparse`: compressed gradients, and row-sparse gradients of tables.
- `jp.parallel`: meshes, sharding, `split_and_load`, `allreduce`, `spmd`.
- `jp.train`, `jp.models`, `jp.data`: the training step and loop, models such as LeNet, data such as Fashion-MNIST.
- `jp.viz`: a picture and a table of any JAX function.
- `jp.checkpoint`, `jp.distributed`: saving and restoring a state, several processes.
- `jp.free_running`: asynchronous parameter servers on Ray.
- `jp.mxnet`: MXNet's optimizers bit for bit, its files and its names.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import (
        checkpoint as checkpoint,
        compression as compression,
        data as data,
        distributed as distributed,
        free_running as free_running,
        kv as kv,
        models as models,
        mxnet as mxnet,
        parallel as parallel,
        sparse as sparse,
        train as train,
        updaters as updaters,
        viz as viz,
    )

__version__ = "0.3.0"

# The folders without an underscore.
_MODULES = tuple(each.name for each in pkgutil.iter_modules(__path__) if not each.name.startswith("_"))


if not TYPE_CHECKING:  # a type checker knows the names, and finds others wrong

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")

    def _hint(name: str) -> str:
        """Where a name is, of the modules that are loaded, or the nearest module."""
        loaded = {room: sys.modules.get(f"{__name__}.{room}") for room in _MODULES}
        if found := [room for room, module in loaded.items() if module is not None and hasattr(module, name)]:
            return f"; write jp.{found[0]}.{name}"
        from ._core.text import did_you_mean

        return did_you_mean(name, _MODULES) or f"; it has {', '.join(_MODULES)}"


def __dir__() -> list[str]:
    return sorted((*_MODULES, "__version__"))
