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
    """What the options begin with."""

    about: str  # one line for the help
    network: str  # its name, for people
    init: Callable[[jax.Array], Any]  # the parameters for a random key
    apply: Callable[[Any, jax.Array], jax.Array]  # the logits of images
    optimizer: str  # its name in optax
    sgd: tuple[float, float]  # the learning rate and the momentum of SGD
    epochs: int = 5  # how often the training data is seen
    batch_size: int = 256  # examples in a batch, over all devices
    schedule: str = "constant"  # of the learning rate
    label_smoothing: float = 0.0  # of the loss, see `train.classification_loss`
    engine: str = "auto"  # of the step, see `train.make_train_step`


_FAST = "a small network of strided convolutions and Muon, for 90 %% of Fashion-MNIST in seconds"
_LENET = "LeNet, Adam and weights of He's size, which learn from the first step"
_ARTICLE = "MXNet's: LeNet, SGD and weights from N(0, 0.01²), which begin with a plateau"


def _apply_lenet(params: Any, images: jax.Array) -> jax.Array:
    return models.lenet.apply(params, images)


RECIPES = {
    "fast": Recipe(
        _FAST, "strided network", models.strided.init, models.strided.apply, "muon", (0.1, 0.9), 1, 128, "linear", 0.1
    ),
    "lenet": Recipe(_LENET, "LeNet", scaled_for_relu, _apply_lenet, "adam", (0.1, 0.9), engine="pmap"),
    "article": Recipe(_ARTICLE, "LeNet", models.lenet.init, _apply_lenet, "sgd", (0.2, 0.0), engine="pmap"),
}
RATES = {"adam": 2e-3, "adamw": 2e-3, "lamb": 1e-2, "lion": 3e-4, "muon": 4e-2}
OPTIMIZERS = ("sgd", *RATES)
DECAYS = ("sgd", "adamw", "lamb", "lion", "muon")  # adam's own form of decay is adamw
SCHEDULES = ("constant", "cosine", "linear")
_WARM = 0.1  # the part of all steps in which schedule linear rises
_ADAM_SHARE = 0.06  # of Muon's rate, for the biases, which Adam updates


def fill(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Give the options that were not given the recipe's values."""
    # An option that is not for the optimizer ends with status 2.
    recipe = RECIPES[args.recipe]
    name = args.optimizer or recipe.optimizer
    if args.momentum is not None and name != "sgd":
        parser.error(f"--momentum is for --optimizer sgd, and this is {name}")
    if args.weight_decay and name not in DECAYS:
        parser.error(f"--weight-decay is for {', '.join(DECAYS)}, and this is {name}; use --optimizer adamw")
    rate, momentum = recipe.sgd
    defaults = {
        "optimizer": name,
        "learning_rate": RATES.get(name, rate),
        "momentum": momentum,
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "schedule": recipe.schedule,
        "engine": "auto" if args.kvstore == "sharded" else recipe.engine,  # there it depends on the optimizer
    }
    for option, value in defaults.items():
        if getattr(args, option) is None:
            setattr(args, option, value)


def optimizer(args: argparse.Namespace, steps: int) -> optax.GradientTransformation:
    """The optimizer of all parameters, for a schedule over so many steps."""
    import optax

    rate = _schedule(args, steps)
    name, decay = args.optimizer, args.weight_decay
    if name == "sgd":
        sgd = optax.sgd(rate, args.momentum or None)
        return optax.chain(optax.add_decayed_weights(decay), sgd) if decay else sgd
    if name == "muon":
        return _muon(args, steps)
    return optax.adam(rate) if name == "adam" else getattr(optax, name)(rate, weight_decay=decay)


def _schedule(args: argparse.Namespace, steps: int, share: float = 1.0) -> Any:
    """A number, or a function of the step that gives one."""
    import optax

    peak = share * args.learning_rate
    if args.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, steps)
    if args.schedule == "linear":
        warm = max(1, round(_WARM * steps))
        parts = [optax.linear_schedule(peak / warm, peak, warm - 1), optax.linear_schedule(peak, 0, steps - warm + 1)]
        return optax.join_schedules(parts, [warm - 1])
    return peak


def _muon(args: argparse.Namespace, steps: int) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for weights, as matrices of inputs by outputs, and Adam for biases."""
    from optax import contrib

    def matrix(x: jax.Array) -> Any:
        return contrib.MuonDimensionNumbers(tuple(range(x.ndim - 1)), x.ndim - 1) if x.ndim > 1 else None

    return contrib.muon(
        _schedule(args, steps),
        ns_steps=2,
        beta=0.8,
        weight_decay=args.weight_decay,
        adam_b2=0.99,
        adam_learning_rate=_schedule(args, steps, _ADAM_SHARE),
        muon_weight_dimension_numbers=lambda params: jax.tree.map(matrix, params),
    )


def describe(args: argparse.Namespace) -> str:
    """The recipe and the optimizer in a few words."""
    words = [f"recipe {args.recipe}", args.optimizer, f"learning rate {args.learning_rate:g}"]
    if args.optimizer == "sgd" and args.momentum:
        words.append(f"momentum {args.momentum:g}")
    if args.weight_decay:
        words.append(f"weight decay {args.weight_decay:g}")
    if args.schedule != "constant":
        words.append(f"{args.schedule} schedule")
    return ", ".join(words)
