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
    "t5": Model("t5", 60_506_624),
    "mixtral": Model("mixtral", 46_702_792_704),
    "mamba": Model("mamba", 129_135_360),
    "mlp_mixer": Model("mixer", 59_880_472),
    "unet": Model("unet", 35_746_307),
    "diffusion_sampler": Model("unet", 35_746_307),
    "lstm": Model("lstm", 19_775_200),
    "lstm_haiku": Model("lstm", 19_775_200),
    "lstm_flax": Model("lstm", 19_775_200),
    "neural_ode": Model("neural_ode", 640 + 36_928 + 2 * 37_504 + 650),
    "gnn": Model("gnn", (119 + 8) * 128 + 3 * (49_280 + 32_896) + 16_512 + 129),
    "gan_generator": Model("gan", 3_576_704 + 2_765_568),
    "gan_discriminator": Model("gan", 3_576_704 + 2_765_568),
    "sharded_jit": Model("sharded", 133_448_704),
    "sharded_shard_map": Model("sharded", 133_448_704),
}


def make(name: str) -> tuple[Callable, tuple, dict]:
    """The function, the arguments and the options of one network."""
    return MODELS[name].make(name)
