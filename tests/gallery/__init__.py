"""The networks of docs/gallery.md, as their users write them.

`MODELS` names each one. Its `make()` gives what `viz.plot_network` takes: the function, its arguments (shapes only:
nothing is computed) and the options.
"""

import dataclasses
import importlib
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Model:
    """A network of the gallery.

    Attributes:
        module: the file of this folder that has it.
        params: the number of its trainable parameters, as it was published or as its formula gives it.
    """

    module: str
    params: int

    def make(self, name: str) -> tuple[Callable, tuple, dict]:
        return getattr(importlib.import_module(f"gallery.{self.module}"), name)()


MODELS = {
    "lenet": Model("lenet", 129_068),
    "matrix_factorization": Model("factorization", (943 + 1682) * 64),
    "resnet50_nnx": Model("resnet_nnx", 25_557_032),
    "resnet50_haiku": Model("resnet_haiku", 25_557_032),
    "densenet121": Model("densenet", 7_978_856),
    "efficientnet_b0": Model("efficientnet", 5_288_548),
    "vit": Model("vit", 86_567_656),
    "vit_step": Model("vit", 86_567_656),
    "gpt2_loss": Model("gpt2", 124_439_808),
    "gpt2_decode": Model("gpt2", 124_439_808),
    "llama": Model("llama", 8_030_261_248),
}


def make(name: str) -> tuple[Callable, tuple, dict]:
    """The function, the arguments and the options of one network."""
    return MODELS[name].make(name)
