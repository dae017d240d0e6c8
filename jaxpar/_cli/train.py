"""`python -m jaxpar train`: LeNet on images of 28 × 28 pixels, over several devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax

from .. import compression, kv
from .._core.arrays import Device
from .._core.parsers import number
from .._core.text import say
from .._devices.emulated import can_hang


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "train",
        help="train LeNet",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive, rate = number(int, 1), number(float, 0, above=True)
    parser.add_argument("--dataset", default="fashion_mnist", help="a name of tensorflow-datasets")
    parser.add_argument("--data-dir", help="the folder of tensorflow-datasets (default: its own)")
    parser.add_argument(
        "--devices", type=positive, help="how many over all processes (default: all). CPU devices are emulated"
    )
    parser.add_argument("--epochs", type=positive, default=5)
    parser.add_argument("--batch-size", type=positive, default=256, help="over all devices together")
    parser.add_argument("--learning-rate", type=rate, default=0.2)
    parser.add_argument("--kvstore", choices=kv._KIND_NAMES, default="device")
    parser.add_argument("--engine", choices=("pmap", "shard_map"), default="pmap")
    parser.add_argument("--compression", choices=compression.TYPES, default="none")
    parser.add_argument("--threshold", type=rate, help="of the compressions 2bit and 1bit (default: 0.5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-compilation-cache", action="store_true", help="compile again what an earlier run compiled"
    )
    parser.add_argument("--no-progress", action="store_true", help="print nothing but the result")
    parser.add_argument("--checkpoint-dir", type=Path, help="where to keep checkpoints, and to resume from")
    parser.add_argument("--metrics-file", type=metrics_path, help="a JSON line for each epoch")
    parser.add_argument("--tensorboard-dir", type=Path, help="event files for TensorBoard, by its package")
    parser.add_argument("--profile-dir", type=Path, help="a trace of five steps, for XProf")
    parser.add_argument("--output-dir", type=Path, help="checkpoints, metrics.jsonl and history.png in one folder")
    parser.set_defaults(run=lambda args: run(args, parser))


def metrics_path(text: str) -> Path:
    """A path for JSON lines.

    Raises:
        argparse.ArgumentTypeError: its ending is that of a table.
    """
    if Path(text).suffix.lower() in (".csv", ".tsv"):
        raise argparse.ArgumentTypeError(
            f"{text} gets JSON lines; name it .jsonl, and make a table of it by pandas.read_json({text!r}, lines=True) "
            "or, of the history that train.fit returns, by train.to_pandas(history).to_csv()"
        )
    return Path(text)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Train, and print the configuration, each epoch and the result."""
    from .. import data, distributed, models, train

    distributed.initialize()  # one of several processes, under `launch` or a cluster's scheduler
    devices = _devices(args, parser)
    if not (args.no_compilation_cache or jax.process_count() > 1 or can_hang(devices)):
        train.use_compilation_cache()
    sets = [data.load(args.dataset, split, data_dir=args.data_dir) for split in ("train", "test")]
    if sets[0].images.shape[1:] != (28, 28, 1):
        raise ValueError(f"LeNet takes images of shape (28, 28, 1), {args.dataset} has {sets[0].images.shape[1:]}")
    first = jax.process_index() == 0
    if first and not args.no_progress:
        print(_about(args, devices), flush=True)
    loss_fn = train.classification_loss(models.lenet.apply)
    state, history = train.fit(
        train.create_state(_store(args), args.seed, devices=devices),
        train.make_train_step(loss_fn, engine=args.engine),
        sets[0],
        test_data=sets[1],
        apply_fn=models.lenet.apply,
        epochs=args.epochs,
        batch_size=args.batch_size,
        progress=not args.no_progress,
        checkpoint_dir=args.checkpoint_dir or _inside(args, "checkpoints"),
        metrics_file=args.metrics_file or _inside(args, "metrics.jsonl"),
        profile=args.profile_dir,
        **_board(args),
    )
    if not first:
        return 0
    if args.output_dir is not None:
        _plot(history, args.output_dir / "history.png")
    last = history[-1]
    speed = sorted(record["images_per_second"] for record in history)[len(history) // 2]
    print(
        f"trained {len(history)} epochs, {int(state.step)} steps: test accuracy {last['test_accuracy']:.4f}, "
        f"test loss {last['test_loss']:.4f}, {speed:,.0f} images/s (median of the epochs)"
    )
    return 0


def _devices(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Device]:
    from .. import distributed

    each = 0
    if args.devices is not None:
        if args.batch_size % args.devices:
            parser.error(f"--batch-size {args.batch_size} cannot be divided by --devices {args.devices}")
        each, rest = divmod(args.devices, distributed.known_processes())
        if rest:
            parser.error(f"--devices {args.devices} cannot be divided by {distributed.known_processes()} processes")
        jax.config.update("jax_num_cpu_devices", each)  # does nothing where there are GPUs or TPUs
    devices = jax.devices()
    if args.devices is None:
        return devices
    if len(devices) < args.devices:
        raise ValueError(f"--devices {args.devices}: there are only {len(devices)} ({devices[0].platform})")
    return [d for i in range(jax.process_count()) for d in [d for d in devices if d.process_index == i][:each]]


def _store(args: argparse.Namespace) -> Any:
    import optax

    from .. import models

    params = models.lenet.init(jax.random.key(args.seed))
    store = kv.from_params(params, kind=args.kvstore, optimizer=optax.sgd(args.learning_rate))
    threshold = {} if args.threshold is None else {"threshold": args.threshold}
    return kv.set_gradient_compression(store, {"type": args.compression, **threshold})


def _about(args: argparse.Namespace, devices: list[Device]) -> str:
    kind = f"{devices[0].device_kind}" if devices[0].platform != "cpu" else "emulated CPU devices"
    return (
        f"LeNet on {args.dataset}: {len(devices)} × {kind}, jax {jax.__version__}, engine {args.engine}, kvstore "
        f"{args.kvstore}, compression {args.compression}, batch {args.batch_size}, learning rate {args.learning_rate}"
    )


def _board(args: argparse.Namespace) -> dict[str, Any]:
    from .. import train

    if args.tensorboard_dir is None:
        return {}
    board = train.to_tensorboard(args.tensorboard_dir)
    return {"callbacks": board, "on_step": board.on_step}


def _inside(args: argparse.Namespace, name: str) -> Path | None:
    return None if args.output_dir is None else args.output_dir / name


def _plot(history: list[dict[str, Any]], path: Path) -> None:
    from ..train import plot_history

    try:
        plot_history(history, path)
    except ModuleNotFoundError as error:
        say(f"no {path.name}: {error}")
