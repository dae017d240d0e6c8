"""`jaxpar train`: a network on images of 28 × 28 pixels, over several devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax

from .. import kv
from .._core.arrays import Device
from .._core.text import say
from .._devices.emulated import can_hang
from . import options, recipes


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = options.new_parser(commands)
    parser.set_defaults(run=lambda args: run(args, parser), parser=parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Train, and print the configuration, each epoch and the result."""
    from .. import data, distributed, train

    recipes.fill(args)
    recipes.check(args, parser)
    recipe = recipes.RECIPES[args.recipe]
    distributed.initialize()  # one of several processes, under `launch` or a cluster's scheduler
    devices = _devices(args, parser)
    if args.compilation_cache and jax.process_count() == 1 and not can_hang(devices):
        train.use_compilation_cache()
    places = {"data_dir": args.data_dir, "verbose": args.progress}
    sets = [data.load(args.dataset, split, **places) for split in ("train", "test")]
    if sets[0].images.shape[1:] != (28, 28, 1):
        raise ValueError(
            f"{recipe.network} takes images of shape (28, 28, 1), {args.dataset} has {sets[0].images.shape[1:]}"
        )
    first = jax.process_index() == 0
    if first and args.progress:
        print(_about(args, devices), flush=True)
    clip = _clip(args)
    store = _store(args, args.epochs * (len(sets[0]) // args.batch_size))
    state, history = train.fit(
        train.create_state(store, args.seed, devices=devices, grad_transform=clip),
        _step(args, clip),
        sets[0],
        test_data=sets[1],
        apply_fn=recipe.apply,
        **_fit_options(args),
    )
    if first:
        _report(args, state, history)
    return 0


def _report(args: argparse.Namespace, state: Any, history: list[dict[str, Any]]) -> None:
    if args.output_dir is not None:
        _plot(history, args.output_dir / "history.png")
    last = history[-1]
    speed = sorted(record["images_per_second"] for record in history)[len(history) // 2]
    print(
        f"trained {len(history)} epochs, {int(state.step)} steps: test accuracy {last['test_accuracy']:.4f}, "
        f"test loss {last['test_loss']:.4f}, {speed:,.0f} images/s (median of the epochs)"
    )


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


def _store(args: argparse.Namespace, steps: int) -> Any:
    params = recipes.RECIPES[args.recipe].init(jax.random.key(args.seed))
    options = {"kind": args.kvstore, "staleness": args.staleness}
    store = kv.from_params(params, optimizer=recipes.optimizer(args, steps), **options)
    threshold = {} if args.threshold is None else {"threshold": args.threshold}
    return kv.set_gradient_compression(store, {"type": args.compression, **threshold})


def _clip(args: argparse.Namespace) -> Any:
    """The transform of all gradients together, or None."""
    import optax

    return None if args.clip_norm is None else optax.clip_by_global_norm(args.clip_norm)


def _step(args: argparse.Namespace, clip: Any) -> Any:
    from .. import train

    recipe = recipes.RECIPES[args.recipe]
    half = args.precision == "float16"
    return train.make_train_step(
        train.classification_loss(recipe.apply, recipe.label_smoothing),
        engine=args.engine,
        grad_transform=clip,
        accumulate=args.accumulate,
        compute_dtype=None if args.precision == "float32" else args.precision,
        loss_scale="dynamic" if args.loss_scale is None and half else args.loss_scale,
        nonfinite=args.nonfinite,
        remat=args.remat,
        local_steps=args.local_steps,
    )


def _fit_options(args: argparse.Namespace) -> dict[str, Any]:
    names = "epochs batch_size progress checkpoint_every keep steps_per_execution".split()
    return {
        **{name: getattr(args, name) for name in names},
        "resume": "auto" if args.resume else False,
        "checkpoint_dir": args.checkpoint_dir or _inside(args, "checkpoints"),
        "metrics_file": args.metrics_file or _inside(args, "metrics.jsonl"),
        "profile": args.profile_dir,
        **_board(args),
    }


def _about(args: argparse.Namespace, devices: list[Device]) -> str:
    kind = f"{devices[0].device_kind}" if devices[0].platform != "cpu" else "emulated CPU devices"
    words = [f"engine {args.engine}", f"kvstore {args.kvstore}", f"compression {args.compression}"]
    words += [f"batch {args.batch_size}", recipes.describe(args)]
    if args.precision != "float32":
        words.append(args.precision)
    network = recipes.RECIPES[args.recipe].network
    return f"{network} on {args.dataset}: {len(devices)} × {kind}, jax {jax.__version__}, {', '.join(words)}"


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
