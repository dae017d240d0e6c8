"""Names of MXNet that are elsewhere here, and what to write in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

_ELSEWHERE = {
    **dict.fromkeys(
        ("Module", "BucketingModule", "mod", "module"),
        "mxnet.load_symbol(path) gives a model, and train.start and train.fit train it: docs/from_mxnet.md",
    ),
    **dict.fromkeys(("ImageRecordIter", "io"), "write mxnet.image_record_source(rec, batch_size)"),
    "lr_scheduler": "give a schedule of optax as learning_rate",
    "metric": "write train.accuracy, train.top_k and others of jp.train",
    **dict.fromkeys(("viz", "visualization"), "write jp.viz.plot_network"),
}

if TYPE_CHECKING:  # a type checker knows the names, and finds others wrong
    __all__: list[str] = []
else:
    __all__ = ["__getattr__"]

    def __getattr__(name: str) -> object:
        hint = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'jaxpar.mxnet' has no attribute {name!r}{hint}")
