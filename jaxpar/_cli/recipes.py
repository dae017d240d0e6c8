"""How `jaxpar train` trains: the weights it begins with and the optimizer."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from .. import models

if TYPE_CHECKING:
    import optax


def scaled_for_relu(rng: jax.Array) -> Any:
    """LeNet's parameters with weights of variance 2/fan-in (He et al. 2015), so that no layer begins near zero."""

    def scale(x: jax.Array) -> jax.Array:
        if x.ndim < 2:
            return x
        return x * (math.sqrt(2 / math.prod(x.shape[:-1])) / models.lenet._WEIGHT_STDDEV)

    return jax.tree.map(scale, models.lenet.init(rng))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the options begin with.

    Attributes:
        about: one line for the help.
        init: the parameters for a random key.
        optimizer: its name in optax.
        sgd: the learning rate and the momentum of SGD.
    """

    about: str
    init: Callable[[jax.Array], Any]
    optimizer: str
    sgd: tuple[float, float]


_FAST = "Adam and weights of He's size, which learn from the first step"
_ARTICLE = "MXNet's: SGD and weights from N(0, 0.01²), which begin with a plateau"
RECIPES = {
    "fast": Recipe(_FAST, scaled_for_relu, "adam", (0.1, 0.9)),
    "article": Recipe(_ARTICLE, models.lenet.init, "sgd", (0.2, 0.0)),
}
RATES = {"adam": 2e-3, "adamw": 2e-3, "lamb": 1e-2, "lion": 3e-4}
OPTIMIZERS = ("sgd", *RATES)
DECAYS = ("sgd", "adamw", "lamb", "lion")  # adam's own form of decay is adamw


def optimizer_name(args: argparse.Namespace) -> str:
    """The optimizer that was asked for, or else the recipe's."""
    return args.optimizer or RECIPES[args.recipe].optimizer


def learning_rate(args: argparse.Namespace) -> float:
    """The rate that was given, or else that of the optimizer."""
    if args.learning_rate is not None:
        return args.learning_rate
    return RATES.get(optimizer_name(args), RECIPES[args.recipe].sgd[0])


def momentum(args: argparse.Namespace) -> float:
    """The momentum of SGD: the one given, or else the recipe's."""
    return RECIPES[args.recipe].sgd[1] if args.momentum is None else args.momentum


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with status 2 where an option is not for the optimizer."""
    name = optimizer_name(args)
    if args.momentum is not None and name != "sgd":
        parser.error(f"--momentum is for --optimizer sgd, and this is {name}")
    if args.weight_decay and name not in DECAYS:
        parser.error(f"--weight-decay is for {', '.join(DECAYS)}, and this is {name}; use --optimizer adamw")


def optimizer(args: argparse.Namespace, steps: int) -> optax.GradientTransformation:
    """The optimizer of all parameters.

    Args:
        args: of the command line.
        steps: of the whole training, for the schedule.
    """
    import optax

    rate: Any = learning_rate(args)
    if args.schedule == "cosine":
        rate = optax.cosine_decay_schedule(rate, steps)
    name, decay = optimizer_name(args), args.weight_decay
    if name == "sgd":
        sgd = optax.sgd(rate, momentum(args) or None)
        return optax.chain(optax.add_decayed_weights(decay), sgd) if decay else sgd
    return optax.adam(rate) if name == "adam" else getattr(optax, name)(rate, weight_decay=decay)


def describe(args: argparse.Namespace) -> str:
    """The recipe and the optimizer in a few words."""
    name = optimizer_name(args)
    words = [f"recipe {args.recipe}", name, f"learning rate {learning_rate(args):g}"]
    if name == "sgd" and momentum(args):
        words.append(f"momentum {momentum(args):g}")
    if args.weight_decay:
        words.append(f"weight decay {args.weight_decay:g}")
    if args.schedule != "constant":
        words.append(f"{args.schedule} schedule")
    return ", ".join(words)
