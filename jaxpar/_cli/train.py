"""`jaxpar train`: a network on images of 28 × 28 pixels, over several devices.

First what it does, then its recipes: the weights it begins with and the optimizer. Last its options, on the command
line and in a TOML file. Each says what it does, and what it is if it is not given.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax

from .. import checkpoint, compression, kv, models
from .._core.arrays import Device, PyTree
from .._core.text import HelpFormatter, did_you_mean, number, plural, say
from .._devices import processes
from .._devices.mesh import can_hang
from .options import add_options, option, path, read

if TYPE_CHECKING:
    import optax

    from ..train import History, TrainState


def run(options: TrainOptions, parser: argparse.ArgumentParser) -> int:
    """Train as the options say, and print what came of it. `parser` reports options that the devices do not allow."""
    import optax

    from .. import data, distributed, train

    recipe = RECIPES[options.recipe]
    distributed.initialize()  # one of several processes, under `launch` or a cluster's scheduler
    devices = _devices(options, parser)

    # A folder that cannot be written or made is an error now, not after an hour of work for it. Process 0 writes.
    with processes.raise_together():
        for name in ("output_dir", "checkpoint_dir", "tensorboard_dir", "profile_dir"):
            folder = getattr(options, name)
            if folder is not None and jax.process_index() == 0:
                checkpoint._check_writable(folder, f"--{name.replace('_', '-')}")

    # A program that hangs where it is read from the cache, with older jax and emulated devices, is not kept there.
    if options.compilation_cache and jax.process_count() == 1 and not can_hang(devices):
        train.use_compilation_cache()
        # XLA cannot write a program whose memory is in blocks (`_cpu/replace.py`). It is compiled in each run.
        warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    train_data, test_data = (
        data.load(options.dataset, split, data_dir=options.data_dir, verbose=options.progress)
        for split in ("train", "test")
    )
    if train_data.images.shape[1:] != (28, 28, 1):
        shape = train_data.images.shape[1:]
        raise ValueError(f"{recipe.network} takes images of shape (28, 28, 1), {options.dataset} has {shape}")
    if options.progress and jax.process_index() == 0:
        print(_about(options, devices), flush=True)

    # The state: the recipe's params in a store, with the optimizer and what gradients meet on their way.
    tx = optimizer(options, options.epochs * (len(train_data) // options.batch_size))
    clip = None if options.clip_norm is None else optax.clip_by_global_norm(options.clip_norm)
    threshold = {} if options.threshold is None else {"threshold": options.threshold}
    store = kv.from_params(
        recipe.init(jax.random.key(options.seed)), optimizer=tx, kind=options.kvstore, staleness=options.staleness
    )
    store = kv.set_gradient_compression(store, {"type": options.compression, **threshold})
    state = train.create_state(store, options.seed, devices=devices, grad_transform=clip)

    # The step. Small gradients underflow in float16 alone, so that its loss is scaled.
    is_half = options.precision == "float16"
    step = train.make_train_step(
        train.classification_loss(recipe.apply, recipe.label_smoothing),
        engine=options.engine,
        grad_transform=clip,
        accumulate=options.accumulate,
        compute_dtype=None if options.precision == "float32" else options.precision,
        remat=options.remat,
        nonfinite=options.nonfinite,
        loss_scale="dynamic" if options.loss_scale is None and is_half else options.loss_scale,
        local_steps=options.local_steps,
    )

    # The run, and what came of it.
    board = None if options.tensorboard_dir is None else train.to_tensorboard(options.tensorboard_dir)
    output = options.output_dir
    state, history = train.fit(
        state,
        step,
        train_data,
        test_data=test_data,
        apply_fn=recipe.apply,
        epochs=options.epochs,
        batch_size=options.batch_size,
        progress=options.progress,
        checkpoint_dir=options.checkpoint_dir or (output and output / "checkpoints"),
        resume="auto" if options.resume else False,
        checkpoint_every=options.checkpoint_every,
        keep=options.keep,
        metrics_file=options.metrics_file or (output and output / "metrics.jsonl"),
        callbacks=() if board is None else board,
        on_step=None if board is None else board.on_step,
        profile=options.profile_dir,
        steps_per_execution=options.steps_per_execution,
    )
    if jax.process_index() == 0:
        _report(options, state, history)
    return 0


def _devices(options: TrainOptions, parser: argparse.ArgumentParser) -> list[Device]:
    """The devices that were asked for, as many of each process. All there are where no number was given."""
    from .. import distributed

    # The number of CPU devices is set before jax starts them, in the first call of `jax.devices`.
    if options.devices is None:
        return jax.devices()
    if options.batch_size % options.devices:
        parser.error(f"--batch-size {options.batch_size} cannot be divided by --devices {options.devices}")
    per_process, remainder = divmod(options.devices, distributed.known_processes())
    if remainder:
        parser.error(f"--devices {options.devices} cannot be divided by {distributed.known_processes()} processes")
    jax.config.update("jax_num_cpu_devices", per_process)  # does nothing where there are GPUs or TPUs
    devices = jax.devices()
    if len(devices) < options.devices:
        raise ValueError(f"--devices {options.devices}: there are only {len(devices)} ({devices[0].platform})")
    of_processes = [[d for d in devices if d.process_index == i] for i in range(jax.process_count())]
    return [d for of_process in of_processes for d in of_process[:per_process]]


def _about(options: TrainOptions, devices: list[Device]) -> str:
    is_cpu = devices[0].platform == "cpu"
    count = plural(len(devices), "emulated CPU device") if is_cpu else f"{len(devices)} × {devices[0].device_kind}"
    shown = [f"engine {options.engine}", f"kvstore {options.kvstore}", f"compression {options.compression}"]
    shown += [f"batch {options.batch_size}", f"recipe {options.recipe}", options.optimizer]
    shown += [f"learning rate {options.learning_rate:g}"]
    shown += [f"momentum {options.momentum:g}"] if options.optimizer == "sgd" and options.momentum else []
    shown += [f"weight decay {options.weight_decay:g}"] if options.weight_decay else []
    shown += [f"{options.schedule} schedule"] if options.schedule != "constant" else []
    shown += [options.precision] if options.precision != "float32" else []
    network = RECIPES[options.recipe].network
    return f"{network} on {options.dataset}: {count}, jax {jax.__version__}, {', '.join(shown)}"


def _report(options: TrainOptions, state: TrainState, history: History) -> None:
    from ..train import plot_history

    if options.output_dir is not None:
        try:
            plot_history(history, options.output_dir / "history.png")
        except ModuleNotFoundError as error:  # of matplotlib, an extra. A run without its picture has not failed
            say(f"no history.png: {error}")
    last = history[-1]
    speed = sorted(record["images_per_second"] for record in history)[len(history) // 2]
    print(
        f"trained {len(history)} epochs, {int(state.step)} steps: test accuracy {last['test_accuracy']:.4f}, "
        f"test loss {last['test_loss']:.4f}, {speed:,.0f} images/s (median of the epochs)"
    )


# The recipes.


def scaled_for_relu(rng: jax.Array) -> PyTree:
    """LeNet's params with weights of variance 2/fan-in (He et al. 2015), so that no layer begins near zero."""

    def scale(x: jax.Array) -> jax.Array:
        if x.ndim < 2:
            return x
        return x * (math.sqrt(2 / math.prod(x.shape[:-1])) / models.lenet._WEIGHT_STDDEV)

    return jax.tree.map(scale, models.lenet.init(rng))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the options begin with."""

    about: str  # one line for the help
    network: str  # its name, for people
    init: Callable[[jax.Array], PyTree]  # the params for a random key
    apply: Callable[[PyTree, jax.Array], jax.Array]  # the logits of images
    optimizer: str  # its name in optax
    learning_rate: float  # of SGD; `RATES` has those of other optimizers
    momentum: float  # of SGD
    epochs: int = 5  # how often the training data is seen
    batch_size: int = 256  # examples in a batch, over all devices
    schedule: str = "constant"  # of the learning rate
    label_smoothing: float = 0.0  # of the loss, see `train.classification_loss`
    engine: str = "auto"  # of the step, see `train.make_train_step`


# What each was chosen by: benchmarks/NOTES.md for "fast". For the others docs/command_line.md has the accuracies
# after each epoch.
RECIPES = {
    "fast": Recipe(
        about="a small network of strided convolutions and Muon, for 90 %% of Fashion-MNIST in seconds",
        network="strided network",
        init=models.strided.init,
        apply=models.strided.apply,
        optimizer="muon",
        learning_rate=0.1,
        momentum=0.9,
        epochs=1,
        batch_size=128,
        schedule="linear",
        label_smoothing=0.1,
    ),
    "lenet": Recipe(
        about="LeNet, Adam and weights of He's size, which learn from the first step",
        network="LeNet",
        init=scaled_for_relu,
        apply=models.lenet.apply,
        optimizer="adam",
        learning_rate=0.1,
        momentum=0.9,
        engine="pmap",
    ),
    "article": Recipe(
        about="MXNet's: LeNet, SGD and weights from N(0, 0.01²), which begin with a plateau",
        network="LeNet",
        init=models.lenet.init,
        apply=models.lenet.apply,
        optimizer="sgd",
        learning_rate=0.2,
        momentum=0,
        engine="pmap",
    ),
}
RATES = {"adam": 2e-3, "adamw": 2e-3, "lamb": 1e-2, "lion": 3e-4, "muon": 4e-2}
OPTIMIZERS = ("sgd", *RATES)
DECAYS = ("sgd", "adamw", "lamb", "lion", "muon")  # adam's own form of decay is adamw
_WARM = 0.1  # the part of all steps in which schedule linear rises
_ADAM_SHARE = 0.06  # of Muon's rate, for the biases, which Adam updates


def optimizer(options: TrainOptions, steps: int) -> optax.GradientTransformation:
    """The optimizer of all params, for a schedule over so many steps."""
    import optax
    from optax import contrib

    rate = _schedule(options, steps)
    name, decay = options.optimizer, options.weight_decay
    if name == "sgd":
        sgd = optax.sgd(rate, options.momentum or None)
        return optax.chain(optax.add_decayed_weights(decay), sgd) if decay else sgd
    if name != "muon":
        return optax.adam(rate) if name == "adam" else getattr(optax, name)(rate, weight_decay=decay)

    # Muon (Jordan et al. 2024) for weights, as matrices of inputs by outputs, and Adam for biases. benchmarks/NOTES.md
    # has what other numbers gave, among them beta 0.9 and five iterations of Newton and Schulz. Muon takes a quarter of
    # a step of recipe "fast".
    def matrix(x: jax.Array) -> contrib.MuonDimensionNumbers | None:
        return contrib.MuonDimensionNumbers(tuple(range(x.ndim - 1)), x.ndim - 1) if x.ndim > 1 else None

    return contrib.muon(
        rate,
        ns_steps=2,
        beta=0.8,
        weight_decay=decay,
        adam_b2=0.99,
        adam_learning_rate=_schedule(options, steps, _ADAM_SHARE),
        muon_weight_dimension_numbers=lambda params: jax.tree.map(matrix, params),
    )


def _schedule(options: TrainOptions, steps: int, share: float = 1.0) -> optax.ScalarOrSchedule:
    """The learning rate, or a share of it: a number, or a function of the step that gives one."""
    import optax

    peak = share * options.learning_rate
    if options.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, steps)
    if options.schedule == "linear":
        warm = max(1, round(_WARM * steps))
        rise = optax.linear_schedule(peak / warm, peak, warm - 1)  # from above 0: at rate 0 a step would be lost
        fall = optax.linear_schedule(peak, 0, steps - warm + 1)
        return optax.join_schedules([rise, fall], [warm - 1])
    return peak


# The options.


def _folder_or_bucket(text: str) -> checkpoint._AnyPath:
    """The path of checkpoints."""
    try:
        return checkpoint._place(text, "it")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


POSITIVE, RATE, NOT_NEGATIVE = number(int, 1), number(float, 0, above=True), number(float, 0)

_ABOUT = """\
Train a network on images of 28 x 28 pixels over several devices. Each device gets its share of every batch.
The options can be in a TOML file too, see --config."""
_LAST = """\
examples:
  jaxpar train --devices 4
  jaxpar train --recipe article --epochs 10 --output-dir runs/article
  jaxpar train --config run.toml --seed 1      where run.toml has lines such as: batch-size = 512"""


class _Formatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the examples."""


def _by_recipe(option: str) -> str:
    """What an option is in each recipe, for the help."""
    return ", ".join(f"{getattr(recipe, option)} in recipe {name}" for name, recipe in RECIPES.items())


def _or_word(word: str, parse: Callable[[str], float]) -> Callable[[str], float | str]:
    """A parser of a number that also takes a word in its place."""
    return lambda text: text if text == word else parse(text)


def metrics_path(text: str) -> Path:
    """A path for JSON lines, whose ending is not that of a table."""
    if Path(text).suffix.lower() in (".csv", ".tsv"):
        hint = "pandas.read_json(path, lines=True) makes a table"
        raise argparse.ArgumentTypeError(f"{text} must end in .jsonl, because it gets JSON lines; {hint}")
    return path(text)


BY_RECIPE: Any = None  # the default of an option that `fill` gives the recipe's value
_RECIPE_HELP = "; ".join(f"{name}: {recipe.about}" for name, recipe in RECIPES.items())
_RATES_HELP = ", ".join(f"{rate:g} for {name}" for name, rate in RATES.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `jaxpar train` is told."""

    config: Path | None = option(
        None,
        "a TOML file with these options, without the dashes at their beginning. The command line wins over it "
        "(default: none)",
        metavar="FILE",
    )

    dataset: str = option(
        "fashion_mnist", "an image data set of tensorflow-datasets", metavar="NAME", group="data and length"
    )
    data_dir: Path | None = option(None, "the folder of tensorflow-datasets (default: its own)", metavar="DIR")
    epochs: int = option(
        BY_RECIPE, f"how often the training data is seen (default: {_by_recipe('epochs')})", type=POSITIVE, metavar="N"
    )
    batch_size: int = option(
        BY_RECIPE,
        f"examples in a batch, over all devices together (default: {_by_recipe('batch_size')})",
        type=POSITIVE,
        metavar="N",
    )
    seed: int = option(0, "of the initial weights and of the order of the examples", metavar="N")

    recipe: str = option(
        "lenet",
        f"network, weights and optimizer. {_RECIPE_HELP}",
        choices=tuple(RECIPES),
        group="weights and optimizer",
    )
    optimizer: str = option(BY_RECIPE, f"one of optax (default: {_by_recipe('optimizer')})", choices=OPTIMIZERS)
    learning_rate: float = option(
        BY_RECIPE,
        f"the step size (default: {_RATES_HELP}; for sgd {_by_recipe('learning_rate')})",
        type=RATE,
        metavar="R",
    )
    momentum: float = option(BY_RECIPE, f"of sgd (default: {_by_recipe('momentum')})", type=NOT_NEGATIVE, metavar="M")
    weight_decay: float = option(0.0, f"for {', '.join(DECAYS)}", type=NOT_NEGATIVE, metavar="W")
    schedule: Literal["constant", "cosine", "linear"] = option(
        BY_RECIPE,
        "cosine falls to 0 over all epochs, linear rises for a tenth of them first "
        f"(default: {_by_recipe('schedule')})",
    )
    clip_norm: float | None = option(
        None, "a limit to the norm of all gradients (default: none)", type=RATE, metavar="N"
    )

    devices: int | None = option(
        None,
        "how many over all processes. CPU devices are emulated (default: all there are)",
        type=POSITIVE,
        metavar="N",
        group="devices and store",
    )
    engine: Literal["auto", "pmap", "shard_map", "jit"] = option(
        BY_RECIPE,
        f"how the step of one device becomes that of all (default: {_by_recipe('engine')}, auto for --kvstore sharded)",
    )
    kvstore: str = option(
        "device",
        f"how gradients are summed, and where parameters are: {', '.join(kv.KINDS)}, or MXNet's name of one",
        choices=kv._KIND_NAMES,
        metavar="KIND",
    )
    staleness: int | None = option(
        None,
        "of --kvstore dist_async: how many steps later a gradient is applied (default: 1)",
        type=number(int, 0),
        metavar="N",
    )
    compression: str = option("none", "of the gradients that devices send", choices=compression.TYPES)
    threshold: float | None = option(None, "of the compressions 2bit and 1bit (default: 0.5)", type=RATE, metavar="T")

    accumulate: int = option(
        1, "microbatches that a device's share is cut in", type=POSITIVE, metavar="N", group="step"
    )
    precision: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "of the forward and backward pass. The parameters stay float32. float16 scales the loss dynamically"
    )
    loss_scale: float | Literal["dynamic"] | None = option(
        None, "a number or dynamic (default: none, dynamic for float16)", type=_or_word("dynamic", RATE), metavar="S"
    )
    nonfinite: Literal["ignore", "skip", "stop"] = option(
        "ignore", "what a NaN or infinite gradient does: nothing, leaves that update out, or ends the training"
    )
    remat: bool = option(False, "compute activations again in the backward pass, which saves memory")
    local_steps: int | None = option(
        None,
        "updates that each device makes by itself before all average (default: none, all agree at every step)",
        type=POSITIVE,
        metavar="H",
    )
    steps_per_execution: int | Literal["auto"] = option(
        "auto", "steps in one compiled program, a number or auto", type=_or_word("auto", POSITIVE), metavar="N"
    )

    progress: bool = option(
        True, "a bar, and a line for each epoch. Without it only the result is printed", group="output"
    )
    compilation_cache: bool = option(True, "keep compiled programs for later runs")
    output_dir: Path | None = option(
        None, "a folder for checkpoints, metrics.jsonl and history.png (default: none)", metavar="DIR"
    )
    checkpoint_dir: checkpoint._AnyPath | None = option(
        None,
        "where to keep checkpoints and resume from them, also gs://bucket/folder and s3://bucket/folder (default: "
        "checkpoints in --output-dir, else none)",
        type=_folder_or_bucket,
        metavar="DIR",
    )
    checkpoint_every: int | None = option(
        None, "also save after this many steps (default: after each epoch)", type=POSITIVE, metavar="N"
    )
    keep: int = option(3, "how many of the latest checkpoints stay", type=POSITIVE, metavar="N")
    resume: bool = option(True, "resume from the latest checkpoint, if there is one")
    metrics_file: Path | None = option(
        None,
        "a JSON line for each epoch (default: metrics.jsonl in --output-dir, else none)",
        type=metrics_path,
        metavar="FILE",
    )
    tensorboard_dir: Path | None = option(
        None, "event files for TensorBoard, by its package (default: none)", metavar="DIR"
    )
    profile_dir: Path | None = option(None, "a trace of five steps, for XProf (default: none)", metavar="DIR")


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train a network on images",
        usage="jaxpar train [options]",
        description=_ABOUT,
        epilog=_LAST,
        formatter_class=_Formatter,
    )
    add_options(parser, TrainOptions)
    parser.set_defaults(run=lambda args: run(fill(args, parser), parser), parser=parser)


def fill(args: argparse.Namespace, parser: argparse.ArgumentParser) -> TrainOptions:
    """The options, with the recipe's values for those that were not given.

    One that is not for the optimizer ends with status 2.
    """
    recipe = RECIPES[args.recipe]
    name = args.optimizer or recipe.optimizer
    if args.momentum is not None and name != "sgd":
        parser.error(f"--momentum is for --optimizer sgd, and this is {name}")
    if args.weight_decay and name not in DECAYS:
        parser.error(f"--weight-decay is for {', '.join(DECAYS)}, and this is {name}; use --optimizer adamw")
    defaults = vars(recipe) | {"learning_rate": RATES.get(name, recipe.learning_rate)}
    if args.kvstore == "sharded":  # there it depends on the optimizer
        defaults["engine"] = "auto"
    by_recipe = [field.name for field in dataclasses.fields(TrainOptions) if field.name in defaults]
    values = {option: defaults[option] for option in by_recipe if getattr(args, option) is None}
    return read(argparse.Namespace(**{**vars(args), **values}), TrainOptions)


def words_of_file(file: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The options of a file as words of the command line. What it says wrongly ends with status 2."""
    # A key is the name of an option without the two dashes, with `-` or `_` in it. A switch is true or false.
    try:
        with file.open("rb") as opened:
            values = tomllib.load(opened)
    except OSError as error:
        parser.error(f"--config {file} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:  # of an int of 5,000 digits too
        parser.error(f"--config {file} is not TOML: {error}")
    actions = {
        flag[2:]: action
        for flag, action in parser._option_string_actions.items()
        if flag[:2] == "--" and action.dest not in ("help", "config")
    }

    # What is wrong is said here, where the file can be named. The parser would speak of a command line that nobody
    # wrote.
    arguments: list[str] = []
    for name, value in values.items():
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
            parser._check_value(action, parser._get_value(action, str(value)))
        except (argparse.ArgumentError, ValueError) as error:  # the latter: an int of 5,000 digits
            parser.error(f"{file}: {error}")
        arguments.append(f"--{option}={value}")
    return arguments
