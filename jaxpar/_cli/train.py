"""`jaxpar train`: a network on images of 28 × 28 pixels, over several devices.

First what it does, then its recipes: the weights it begins with and the optimizer. Last its options, on the command
line and in a TOML file. Each says what it does, and what it is if it is not given.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from .. import checkpoint, compression, kv, models
from .._core.arrays import Device
from .._core.text import HelpFormatter, did_you_mean, number, plural, say
from .._devices import processes
from .._devices.mesh import can_hang
from .commands import path

if TYPE_CHECKING:
    import optax

    from ..train import History, TrainState, TrainStep


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import optax

    from .. import data, distributed, train

    fill(args, parser)
    recipe = RECIPES[args.recipe]
    distributed.initialize()  # one of several processes, under `launch` or a cluster's scheduler
    devices = _devices(args, parser)
    _check_folders(args)
    if args.compilation_cache and jax.process_count() == 1 and not can_hang(devices):
        train.use_compilation_cache()
    train_data, test_data = (
        data.load(args.dataset, split, data_dir=args.data_dir, verbose=args.progress) for split in ("train", "test")
    )
    if train_data.images.shape[1:] != (28, 28, 1):
        raise ValueError(
            f"{recipe.network} takes images of shape (28, 28, 1), {args.dataset} has {train_data.images.shape[1:]}"
        )
    if args.progress and jax.process_index() == 0:
        print(_about(args, devices), flush=True)

    tx = optimizer(args, args.epochs * (len(train_data) // args.batch_size))
    params = recipe.init(jax.random.key(args.seed))
    store = kv.from_params(params, optimizer=tx, kind=args.kvstore, staleness=args.staleness)
    threshold = {} if args.threshold is None else {"threshold": args.threshold}
    store = kv.set_gradient_compression(store, {"type": args.compression, **threshold})
    clip = None if args.clip_norm is None else optax.clip_by_global_norm(args.clip_norm)
    state, history = train.fit(
        train.create_state(store, args.seed, devices=devices, grad_transform=clip),
        _step(args, clip),
        train_data,
        test_data=test_data,
        apply_fn=recipe.apply,
        **_fit_options(args),
    )
    if jax.process_index() == 0:
        _report(args, state, history)
    return 0


def _devices(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Device]:
    """The devices that were asked for, as many of each process. All there are where no number was given."""
    from .. import distributed

    if args.devices is None:
        return jax.devices()
    if args.batch_size % args.devices:
        parser.error(f"--batch-size {args.batch_size} cannot be divided by --devices {args.devices}")
    per_process, remainder = divmod(args.devices, distributed.known_processes())
    if remainder:
        parser.error(f"--devices {args.devices} cannot be divided by {distributed.known_processes()} processes")
    jax.config.update("jax_num_cpu_devices", per_process)  # does nothing where there are GPUs or TPUs
    devices = jax.devices()
    if len(devices) < args.devices:
        raise ValueError(f"--devices {args.devices}: there are only {len(devices)} ({devices[0].platform})")
    of_processes = [[d for d in devices if d.process_index == i] for i in range(jax.process_count())]
    return [d for of_process in of_processes for d in of_process[:per_process]]


def _check_folders(args: argparse.Namespace) -> None:
    """`OSError` for a folder of results that cannot be written or made, before any work is done for it."""
    with processes.raise_together():
        for name in ("output_dir", "checkpoint_dir", "tensorboard_dir", "profile_dir"):
            folder = getattr(args, name)
            if folder is not None and jax.process_index() == 0:  # which writes
                checkpoint._check_writable(folder, f"--{name.replace('_', '-')}")


def _about(args: argparse.Namespace, devices: list[Device]) -> str:
    is_cpu = devices[0].platform == "cpu"
    count = plural(len(devices), "emulated CPU device") if is_cpu else f"{len(devices)} × {devices[0].device_kind}"
    shown = [f"engine {args.engine}", f"kvstore {args.kvstore}", f"compression {args.compression}"]
    shown += [f"batch {args.batch_size}", f"recipe {args.recipe}", args.optimizer]
    shown += [f"learning rate {args.learning_rate:g}"]
    shown += [f"momentum {args.momentum:g}"] if args.optimizer == "sgd" and args.momentum else []
    shown += [f"weight decay {args.weight_decay:g}"] if args.weight_decay else []
    shown += [f"{args.schedule} schedule"] if args.schedule != "constant" else []
    shown += [args.precision] if args.precision != "float32" else []
    network = RECIPES[args.recipe].network
    return f"{network} on {args.dataset}: {count}, jax {jax.__version__}, {', '.join(shown)}"


def _step(args: argparse.Namespace, clip: optax.GradientTransformation | None) -> TrainStep:
    from .. import train

    recipe = RECIPES[args.recipe]
    is_half = args.precision == "float16"
    names = "engine accumulate nonfinite remat local_steps".split()
    return train.make_train_step(
        train.classification_loss(recipe.apply, recipe.label_smoothing),
        grad_transform=clip,
        compute_dtype=None if args.precision == "float32" else args.precision,
        loss_scale="dynamic" if args.loss_scale is None and is_half else args.loss_scale,
        **{name: getattr(args, name) for name in names},
    )


def _fit_options(args: argparse.Namespace) -> dict[str, Any]:
    from .. import train

    def inside(name: str) -> Path | None:
        return None if args.output_dir is None else args.output_dir / name

    board = None if args.tensorboard_dir is None else train.to_tensorboard(args.tensorboard_dir)
    names = "epochs batch_size progress checkpoint_every keep steps_per_execution".split()
    return {
        **{name: getattr(args, name) for name in names},
        "resume": "auto" if args.resume else False,
        "checkpoint_dir": args.checkpoint_dir or inside("checkpoints"),
        "metrics_file": args.metrics_file or inside("metrics.jsonl"),
        "profile": args.profile_dir,
        **({} if board is None else {"callbacks": board, "on_step": board.on_step}),
    }


def _report(args: argparse.Namespace, state: TrainState, history: History) -> None:
    from ..train import plot_history

    if args.output_dir is not None:
        try:
            plot_history(history, args.output_dir / "history.png")
        except ModuleNotFoundError as error:
            say(f"no history.png: {error}")
    last = history[-1]
    speed = sorted(record["images_per_second"] for record in history)[len(history) // 2]
    print(
        f"trained {len(history)} epochs, {int(state.step)} steps: test accuracy {last['test_accuracy']:.4f}, "
        f"test loss {last['test_loss']:.4f}, {speed:,.0f} images/s (median of the epochs)"
    )


# The recipes.


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
    learning_rate: float  # of SGD; `RATES` has those of other optimizers
    momentum: float  # of SGD
    epochs: int = 5  # how often the training data is seen
    batch_size: int = 256  # examples in a batch, over all devices
    schedule: str = "constant"  # of the learning rate
    label_smoothing: float = 0.0  # of the loss, see `train.classification_loss`
    engine: str = "auto"  # of the step, see `train.make_train_step`


_FAST = "a small network of strided convolutions and Muon, for 90 %% of Fashion-MNIST in seconds"
_LENET = "LeNet, Adam and weights of He's size, which learn from the first step"
_ARTICLE = "MXNet's: LeNet, SGD and weights from N(0, 0.01²), which begin with a plateau"


RECIPES = {
    "fast": Recipe(
        _FAST, "strided network", models.strided.init, models.strided.apply, "muon", 0.1, 0.9, 1, 128, "linear", 0.1
    ),
    "lenet": Recipe(_LENET, "LeNet", scaled_for_relu, models.lenet.apply, "adam", 0.1, 0.9, engine="pmap"),
    "article": Recipe(_ARTICLE, "LeNet", models.lenet.init, models.lenet.apply, "sgd", 0.2, 0, engine="pmap"),
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
    defaults = vars(recipe) | {"learning_rate": RATES.get(name, recipe.learning_rate)}
    if args.kvstore == "sharded":  # there it depends on the optimizer
        defaults["engine"] = "auto"
    for option in ("optimizer", "learning_rate", "momentum", "epochs", "batch_size", "schedule", "engine"):
        if getattr(args, option) is None:
            setattr(args, option, defaults[option])


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


def _schedule(args: argparse.Namespace, steps: int, share: float = 1.0) -> optax.ScalarOrSchedule:
    """A number, or a function of the step that gives one."""
    import optax

    peak = share * args.learning_rate
    if args.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, steps)
    if args.schedule == "linear":
        warm = max(1, round(_WARM * steps))
        rise = optax.linear_schedule(peak / warm, peak, warm - 1)
        fall = optax.linear_schedule(peak, 0, steps - warm + 1)
        return optax.join_schedules([rise, fall], [warm - 1])
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


# The options.

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


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train a network on images",
        usage="jaxpar train [options]",
        description=_ABOUT,
        epilog=_LAST,
        formatter_class=_Formatter,
    )
    parser.add_argument("--config", type=path, metavar="FILE", help=_CONFIG)
    _add_data(parser.add_argument_group("data and length"))
    _add_recipe(parser.add_argument_group("weights and optimizer"))
    _add_store(parser.add_argument_group("devices and store"))
    _add_step(parser.add_argument_group("step"))
    _add_output(parser.add_argument_group("output"))
    parser.set_defaults(run=lambda args: run(args, parser), parser=parser)


def _add_data(group: argparse._ArgumentGroup) -> None:
    add, count = group.add_argument, functools.partial(group.add_argument, type=POSITIVE, metavar="N")
    add("--dataset", default="fashion_mnist", metavar="NAME", help="an image data set of tensorflow-datasets")
    add("--data-dir", type=path, metavar="DIR", help="the folder of tensorflow-datasets (default: its own)")
    count("--epochs", help=f"how often the training data is seen (default: {_by_recipe('epochs')})")
    count("--batch-size", help=f"examples in a batch, over all devices together (default: {_by_recipe('batch_size')})")
    add("--seed", type=int, default=0, metavar="N", help="of the initial weights and of the order of the examples")


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    recipes = "; ".join(f"{name}: {recipe.about}" for name, recipe in RECIPES.items())
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in RATES.items())
    rates += f"; for sgd {_by_recipe('learning_rate')}"
    shapes = "cosine falls to 0 over all epochs, linear rises for a tenth of them first"
    add("--recipe", choices=tuple(RECIPES), default="lenet", help=f"network, weights and optimizer. {recipes}")
    add("--optimizer", choices=OPTIMIZERS, help=f"one of optax (default: {_by_recipe('optimizer')})")
    add("--learning-rate", type=RATE, metavar="R", help=f"the step size (default: {rates})")
    add("--momentum", type=NOT_NEGATIVE, metavar="M", help=f"of sgd (default: {_by_recipe('momentum')})")
    add("--weight-decay", type=NOT_NEGATIVE, default=0.0, metavar="W", help=f"for {', '.join(DECAYS)}")
    add("--schedule", choices=SCHEDULES, help=f"{shapes} (default: {_by_recipe('schedule')})")
    add("--clip-norm", type=RATE, metavar="N", help="a limit to the norm of all gradients (default: none)")


def _add_store(group: argparse._ArgumentGroup) -> None:
    add, count = group.add_argument, functools.partial(group.add_argument, type=POSITIVE, metavar="N")
    kinds = f"how gradients are summed, and where parameters are: {', '.join(kv.KINDS)}, or MXNet's name of one"
    engine = f"{_by_recipe('engine')}, auto for --kvstore sharded"
    late = "of --kvstore dist_async: how many steps later a gradient is applied (default: 1)"
    count("--devices", help="how many over all processes. CPU devices are emulated (default: all there are)")
    engines = ("auto", "pmap", "shard_map", "jit")
    add("--engine", choices=engines, help=f"how the step of one device becomes that of all (default: {engine})")
    add("--kvstore", choices=kv._KIND_NAMES, default="device", metavar="KIND", help=kinds)
    add("--staleness", type=number(int, 0), metavar="N", help=late)
    add("--compression", choices=compression.TYPES, default="none", help="of the gradients that devices send")
    add("--threshold", type=RATE, metavar="T", help="of the compressions 2bit and 1bit (default: 0.5)")


def _add_step(group: argparse._ArgumentGroup) -> None:
    add, count = group.add_argument, functools.partial(group.add_argument, type=POSITIVE, metavar="N")
    passes = "of the forward and backward pass. The parameters stay float32. float16 scales the loss dynamically"
    bad = "what a NaN or infinite gradient does: nothing, leaves that update out, or ends the training"
    again = "compute activations again in the backward pass, which saves memory"
    local = "updates that each device makes by itself before all average (default: none, all agree at every step)"
    scale = "a number or dynamic (default: none, dynamic for float16)"
    count("--accumulate", default=1, help="microbatches that a device's share is cut in")
    add("--precision", choices=PRECISIONS, default="float32", help=passes)
    add("--loss-scale", type=_or_word("dynamic", RATE), metavar="S", help=scale)
    add("--nonfinite", choices=("ignore", "skip", "stop"), default="ignore", help=bad)
    add("--remat", action=argparse.BooleanOptionalAction, default=False, help=again)
    add("--local-steps", type=POSITIVE, metavar="H", help=local)
    program = "steps in one compiled program, a number or auto"
    add("--steps-per-execution", type=_or_word("auto", POSITIVE), default="auto", metavar="N", help=program)


def _add_output(group: argparse._ArgumentGroup) -> None:
    add, count = group.add_argument, functools.partial(group.add_argument, type=POSITIVE, metavar="N")
    folder = functools.partial(add, type=path, metavar="DIR")
    switch = functools.partial(add, action=argparse.BooleanOptionalAction, default=True)
    saved = "where to keep checkpoints and resume from them (default: checkpoints in --output-dir, else none)"
    lines = "a JSON line for each epoch (default: metrics.jsonl in --output-dir, else none)"
    switch("--progress", help="a bar, and a line for each epoch. Without it only the result is printed")
    switch("--compilation-cache", help="keep compiled programs for later runs")
    folder("--output-dir", help="a folder for checkpoints, metrics.jsonl and history.png (default: none)")
    folder("--checkpoint-dir", help=saved)
    count("--checkpoint-every", help="also save after this many steps (default: after each epoch)")
    count("--keep", default=3, help="how many of the latest checkpoints stay")
    switch("--resume", help="resume from the latest checkpoint, if there is one")
    add("--metrics-file", type=metrics_path, metavar="FILE", help=lines)
    folder("--tensorboard-dir", help="event files for TensorBoard, by its package (default: none)")
    folder("--profile-dir", help="a trace of five steps, for XProf (default: none)")


def _by_recipe(option: str) -> str:
    """What an option is in each recipe, for the help."""
    return ", ".join(f"{getattr(recipe, option)} in recipe {name}" for name, recipe in RECIPES.items())


def _or_word(word: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of a number that also takes a word in its place."""
    return lambda text: text if text == word else parse(text)


def metrics_path(text: str) -> Path:
    """A path for JSON lines, whose ending is not that of a table."""
    if Path(text).suffix.lower() in (".csv", ".tsv"):
        hint = "pandas.read_json(path, lines=True) makes a table"
        raise argparse.ArgumentTypeError(f"{text} must end in .jsonl, because it gets JSON lines; {hint}")
    return path(text)


def words_of_file(file: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The options of a file as words of the command line. What it says wrongly ends with status 2."""
    # A key is the name of an option without the two dashes, with `-` or `_` in it. A switch is true or false.
    try:
        with file.open("rb") as opened:
            options = tomllib.load(opened)
    except OSError as error:
        parser.error(f"--config {file} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:  # of an int of 5,000 digits too
        parser.error(f"--config {file} is not TOML: {error}")
    arguments: list[str] = []
    actions = {
        name[2:]: action
        for name, action in parser._option_string_actions.items()
        if name[:2] == "--" and action.dest not in ("help", "config")
    }
    for name, value in options.items():
        option = name.replace("_", "-")
        if option not in actions:
            near = did_you_mean(option, [name for name in actions if not name.startswith("no-")])
            parser.error(f"{file}: unknown option {name!r}{near}")
        action = actions[option]
        is_switch = isinstance(action, argparse.BooleanOptionalAction)
        if is_switch != isinstance(value, bool) or not isinstance(value, (str, int, float)):
            expected = "true or false" if is_switch else "a string or a number"
            parser.error(f"{file}: {name} must be {expected}, got {value!r}")
        if is_switch:
            yes, no = action.option_strings
            arguments.append(yes if value == (f"--{option}" == yes) else no)  # `no-remat = true` is `remat = false`
            continue
        try:
            parser._check_value(action, parser._get_value(action, str(value)))  # here the file can be named
        except (argparse.ArgumentError, ValueError) as error:  # the latter: an int of 5,000 digits
            parser.error(f"{file}: {error}")
        arguments.append(f"--{option}={value}")
    return arguments
