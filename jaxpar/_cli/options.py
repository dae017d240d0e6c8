"""The options of `jaxpar train`, on the command line and in a TOML file.

Each says what it does, and what it is if it is not given.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import compression, kv
from .._core.text import HelpFormatter, did_you_mean, number
from .recipes import DECAYS, OPTIMIZERS, RATES, RECIPES, SCHEDULES, Recipe

POSITIVE, RATE, NOT_NEGATIVE = number(int, 1), number(float, 0, above=True), number(float, 0)
PRECISIONS = ("float32", "bfloat16", "float16")

_ABOUT = """\
Train a network on images of 28 x 28 pixels over several devices. Each device gets its share of every batch.
The options can be in a TOML file too, see --config."""
_CONFIG = (
    "a TOML file with these options, without the dashes at their beginning. The command line wins over it "
    "(default: none)"
)
_LAST = """\
examples:
  jaxpar train --devices 4
  jaxpar train --recipe article --epochs 10 --output-dir runs/article
  jaxpar train --config run.toml --seed 1      where run.toml has lines such as: batch-size = 512"""


class _Formatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the examples."""


def new_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `train` to the commands, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train a network on images",
        usage="jaxpar train [options]",
        description=_ABOUT,
        epilog=_LAST,
        formatter_class=_Formatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG)
    _add_data(parser.add_argument_group("data and length"))
    _add_recipe(parser.add_argument_group("weights and optimizer"))
    _add_store(parser.add_argument_group("devices and store"))
    _add_step(parser.add_argument_group("step"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_data(group: Any) -> None:
    add = group.add_argument
    add("--dataset", default="fashion_mnist", metavar="NAME", help="an image data set of tensorflow-datasets")
    add("--data-dir", metavar="DIR", help="the folder of tensorflow-datasets (default: its own)")
    epochs, size = _by_recipe(lambda recipe: recipe.epochs), _by_recipe(lambda recipe: recipe.batch_size)
    add("--epochs", type=POSITIVE, metavar="N", help=f"how often the training data is seen (default: {epochs})")
    batch = f"examples in a batch, over all devices together (default: {size})"
    add("--batch-size", type=POSITIVE, metavar="N", help=batch)
    add("--seed", type=int, default=0, metavar="N", help="of the initial weights and of the order of the examples")


def _add_recipe(group: Any) -> None:
    add = group.add_argument
    recipes = "; ".join(f"{name}: {recipe.about}" for name, recipe in RECIPES.items())
    own = _by_recipe(lambda recipe: recipe.optimizer)
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in RATES.items())
    of_sgd = _by_recipe(lambda recipe: f"{recipe.sgd[0]:g}")
    momenta = _by_recipe(lambda recipe: f"{recipe.sgd[1]:g}")
    schedules = _by_recipe(lambda recipe: recipe.schedule)
    add("--recipe", choices=tuple(RECIPES), default="lenet", help=f"network, weights and optimizer. {recipes}")
    add("--optimizer", choices=OPTIMIZERS, help=f"one of optax (default: {own})")
    add("--learning-rate", type=RATE, metavar="R", help=f"the step size (default: {rates}; for sgd {of_sgd})")
    add("--momentum", type=NOT_NEGATIVE, metavar="M", help=f"of sgd (default: {momenta})")
    add("--weight-decay", type=NOT_NEGATIVE, default=0.0, metavar="W", help=f"for {', '.join(DECAYS)}")
    shapes = f"cosine falls to 0 over all epochs, linear rises for a tenth of them first (default: {schedules})"
    add("--schedule", choices=SCHEDULES, help=shapes)
    add("--clip-norm", type=RATE, metavar="N", help="a limit to the norm of all gradients (default: none)")


def _add_store(group: Any) -> None:
    add = group.add_argument
    count = "how many over all processes. CPU devices are emulated (default: all there are)"
    kinds = f"how gradients are summed, and where parameters are: {', '.join(kv.KINDS)}, or MXNet's name of one"
    late = "of --kvstore dist_async: how many steps later a gradient is applied (default: 1)"
    engines = ("auto", "pmap", "shard_map", "jit")
    add("--devices", type=POSITIVE, metavar="N", help=count)
    own = _by_recipe(lambda recipe: recipe.engine)
    step = f"how the step of one device becomes that of all (default: {own}, auto for --kvstore sharded)"
    add("--engine", choices=engines, help=step)
    add("--kvstore", choices=kv._KIND_NAMES, default="device", metavar="KIND", help=kinds)
    add("--staleness", type=number(int, 0), metavar="N", help=late)
    add("--compression", choices=compression.TYPES, default="none", help="of the gradients that devices send")
    add("--threshold", type=RATE, metavar="T", help="of the compressions 2bit and 1bit (default: 0.5)")


def _add_step(group: Any) -> None:
    add = group.add_argument
    passes = "of the forward and backward pass. The parameters stay float32. float16 scales the loss dynamically"
    bad = "what a NaN or infinite gradient does: nothing, leaves that update out, or ends the training"
    local = "updates that each device makes by itself before all average (default: none, all agree at every step)"
    program = "steps in one compiled program, a number or auto"
    add("--accumulate", type=POSITIVE, default=1, metavar="N", help="microbatches that a device's share is cut in")
    add("--precision", choices=PRECISIONS, default="float32", help=passes)
    add("--loss-scale", type=loss_scale, metavar="S", help="a number or dynamic (default: none, dynamic for float16)")
    add("--nonfinite", choices=("ignore", "skip", "stop"), default="ignore", help=bad)
    _switch(add, "remat", False, "compute activations again in the backward pass, which saves memory")
    add("--local-steps", type=POSITIVE, metavar="H", help=local)
    add("--steps-per-execution", type=steps_per_execution, default="auto", metavar="N", help=program)


def _add_output(group: Any) -> None:
    add = group.add_argument
    _switch(add, "progress", True, "a bar, and a line for each epoch. Without it only the result is printed")
    _switch(add, "compilation-cache", True, "keep compiled programs for later runs")
    folder = "a folder for checkpoints, metrics.jsonl and history.png (default: none)"
    saved = "where to keep checkpoints and resume from them (default: checkpoints in --output-dir, else none)"
    lines = "a JSON line for each epoch (default: metrics.jsonl in --output-dir, else none)"
    board = "event files for TensorBoard, by its package (default: none)"
    add("--output-dir", type=Path, metavar="DIR", help=folder)
    add("--checkpoint-dir", type=Path, metavar="DIR", help=saved)
    every = "also save after this many steps (default: after each epoch)"
    add("--checkpoint-every", type=POSITIVE, metavar="N", help=every)
    add("--keep", type=POSITIVE, default=3, metavar="N", help="how many of the latest checkpoints stay")
    _switch(add, "resume", True, "resume from the latest checkpoint, if there is one")
    add("--metrics-file", type=metrics_path, metavar="FILE", help=lines)
    add("--tensorboard-dir", type=Path, metavar="DIR", help=board)
    add("--profile-dir", type=Path, metavar="DIR", help="a trace of five steps, for XProf (default: none)")


def _by_recipe(value: Callable[[Recipe], Any]) -> str:
    """What an option is in each recipe, for the help."""
    return ", ".join(f"{value(recipe)} in recipe {name}" for name, recipe in RECIPES.items())


def _switch(add: Any, name: str, default: bool, text: str) -> None:
    """An option that is on or off. Some versions of argparse write its default themselves, so it is set afterwards."""
    action = add(
        f"--{name}", action=argparse.BooleanOptionalAction, help=f"{text} (default: {'yes' if default else 'no'})"
    )
    action.default = default


def loss_scale(text: str) -> float | str:
    """A number above 0, or the word dynamic."""
    return text if text == "dynamic" else RATE(text)


def steps_per_execution(text: str) -> int | str:
    """A number of at least 1, or the word auto."""
    return text if text == "auto" else POSITIVE(text)


def metrics_path(text: str) -> Path:
    """A path for JSON lines, whose ending is not that of a table."""
    if Path(text).suffix.lower() in (".csv", ".tsv"):
        raise argparse.ArgumentTypeError(
            f"{text} must end in .jsonl, because it gets JSON lines; pandas.read_json(path, lines=True) makes a table"
        )
    return Path(text)


def words_of_file(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The options of a file as words of the command line."""
    # A key is the name of an option without the two dashes, with `-` or `_` in it. A switch is true or false. What the
    # file says wrongly ends with status 2.
    try:
        with path.open("rb") as file:
            options = tomllib.load(file)
    except OSError as error:
        parser.error(f"--config {path} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:  # of an int of 5,000 digits too
        parser.error(f"--config {path} is not TOML: {error}")
    return [_word_of_entry(path, parser, name, value) for name, value in options.items()]


def _word_of_entry(path: Path, parser: argparse.ArgumentParser, name: str, value: Any) -> str:
    known = {n[2:]: a for n, a in parser._option_string_actions.items() if n.startswith("--") and a.dest != "help"}
    option = name.replace("_", "-")
    if option not in known or option == "config":
        shown = [n for n in known if n != "config" and not n.startswith("no-")]
        parser.error(f"{path}: unknown option {name!r}{did_you_mean(option, shown)}")
    action = known[option]
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            parser.error(f"{path}: {name} must be true or false, got {value!r}")
        yes, no = action.option_strings
        return yes if value == (f"--{option}" == yes) else no  # `no-remat = true` is `remat = false`
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        parser.error(f"{path}: {name} must be a string or a number, got {value!r}")
    if isinstance(value, int) and value.bit_length() > 64:  # hexadecimal digits may be many
        parser.error(f"{path}: {name} must be a number of 64 bits")
    try:
        parser._check_value(action, parser._get_value(action, str(value)))  # here the file can be named
    except argparse.ArgumentError as error:
        parser.error(f"{path}: {error}")
    return f"--{option}={value}"
