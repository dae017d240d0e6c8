"""`jaxpar train`: a network on images of 28 × 28 pixels, over several devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax

from .. import checkpoint, kv
from .._core.arrays import Device
from .._core.text import plural, say
from .._devices import processes
from .._devices.emulated import can_hang
from . import options, recipes


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = options.new_parser(commands)
    parser.set_defaults(run=lambda args: run(args, parser), parser=parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Train, and print the configuration, each epoch and the result."""
    import optax

    from .. import data, distributed, train

    recipes.fill(args, parser)
    recipe = recipes.RECIPES[args.recipe]
    distributed.initialize()  # one of several processes, under `launch` or a cluster's scheduler
    devices = _devices(args, parser)
    _check_folders(args)
    if args.compilation_cache and jax.process_count() == 1 and not can_hang(devices):
        train.use_compilation_cache()
    places = {"data_dir": args.data_dir, "verbose": args.progress}
    train_data, test_data = (data.load(args.dataset, split, **places) for split in ("train", "test"))
    if train_data.images.shape[1:] != (28, 28, 1):
        raise ValueError(
            f"{recipe.network} takes images of shape (28, 28, 1), {args.dataset} has {train_data.images.shape[1:]}"
        )
    if args.progress and jax.process_index() == 0:
        print(_about(args, devices), flush=True)

    store = _store(args, args.epochs * (len(train_data) // args.batch_size))
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
    each, rest = divmod(args.devices, distributed.known_processes())
    if rest:
        parser.error(f"--devices {args.devices} cannot be divided by {distributed.known_processes()} processes")
    jax.config.update("jax_num_cpu_devices", each)  # does nothing where there are GPUs or TPUs
    devices = jax.devices()
    if len(devices) < args.devices:
        raise ValueError(f"--devices {args.devices}: there are only {len(devices)} ({devices[0].platform})")
    return [d for i in range(jax.process_count()) for d in [d for d in devices if d.process_index == i][:each]]


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
    words = [f"engine {args.engine}", f"kvstore {args.kvstore}", f"compression {args.compression}"]
    words += [f"batch {args.batch_size}", recipes.describe(args)]
    if args.precision != "float32":
        words.append(args.precision)
    network = recipes.RECIPES[args.recipe].network
    return f"{network} on {args.dataset}: {count}, jax {jax.__version__}, {', '.join(words)}"


def _store(args: argparse.Namespace, steps: int) -> Any:
    params = recipes.RECIPES[args.recipe].init(jax.random.key(args.seed))
    optimizer = recipes.optimizer(args, steps)
    store = kv.from_params(params, optimizer=optimizer, kind=args.kvstore, staleness=args.staleness)
    threshold = {} if args.threshold is None else {"threshold": args.threshold}
    return kv.set_gradient_compression(store, {"type": args.compression, **threshold})


def _step(args: argparse.Namespace, clip: Any) -> Any:
    from .. import train

    recipe = recipes.RECIPES[args.recipe]
    is_half = args.precision == "float16"
    return train.make_train_step(
        train.classification_loss(recipe.apply, recipe.label_smoothing),
        engine=args.engine,
        grad_transform=clip,
        accumulate=args.accumulate,
        compute_dtype=None if args.precision == "float32" else args.precision,
        loss_scale="dynamic" if args.loss_scale is None and is_half else args.loss_scale,
        nonfinite=args.nonfinite,
        remat=args.remat,
        local_steps=args.local_steps,
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


def _report(args: argparse.Namespace, state: Any, history: list[dict[str, Any]]) -> None:
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
