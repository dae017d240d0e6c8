"""`fit`: epochs of steps, with progress, metrics, callbacks and checkpoints. Its options and what they do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax

from ... import data, distributed
from ..._core.arguments import no_such_arguments
from ..._core.transfers import allows_transfers
from ..._store.mxnet_names import TRAINING_ARGUMENTS
from .._callbacks.callback import CallbackFunction, OnStep, WithMemory
from .._callbacks.history import History
from .._step.state import IN_STORE, TrainState
from .._step.train_step import TrainStep
from .interrupt import Interrupts, delayed, describe_stop, finish_interrupted
from .loop import train
from .progress import Profile
from .run import FitOptions, Run

_VALIDATION = (
    "for a classifier write test_data=data.Dataset(x, y), apply_fn=apply_fn; for other models eval_data=, "
    "and eval_fn= for other scores than the loss"
)
_CALLBACK = "write callbacks=train.EarlyStopping(patience=3)"
_WEIGHTS = 'in loss_fn write w = weights[batch["label"]] and return ((w * losses).sum(), w.sum()), {}'
_IN_ONE = "give images and labels in one argument, fit(state, step, data.Dataset(x, y), epochs=5, batch_size=64)"
_HINTS = {
    **TRAINING_ARGUMENTS,
    "callback": "write callbacks=, with a function or a list of functions",
    **dict.fromkeys(("early_stopping", "patience"), _CALLBACK),
    **dict.fromkeys(("validation_data", "val_data", "valid_data"), _VALIDATION),
    "validation_split": "write train_data, test_data = data.split(data.Dataset(x, y), 0.9), and give test_data=",
    **dict.fromkeys(("class_weight", "sample_weight"), _WEIGHTS),
    **dict.fromkeys(("optimizer", "learning_rate", "lr", "tx"), IN_STORE),
    **dict.fromkeys(("loss", "loss_fn", "grad_transform"), "give it to train.start or train.make_train_step"),
    **dict.fromkeys(
        ("metrics", "metric"),
        "return them beside the loss: return loss, {'accuracy': accuracy}; for test data eval_fn=",
    ),
    **dict.fromkeys(("num_epochs", "n_epochs", "max_epochs"), "write epochs="),
    "shuffle": "fit shuffles by state.rng; data.from_iterable(batches) keeps the order of the batches",
    "verbose": "write progress=True or progress=False",
    **dict.fromkeys(("x", "y"), _IN_ONE),
    "steps_per_epoch": "an epoch has the batches of the data; write data.from_iterable(loader, steps_per_epoch=5), and "
    "max_steps= ends the run",
    "devices": "give them to train.start or train.create_state",
    **dict.fromkeys(("seed", "rng"), "give rng= to train.start or train.create_state"),
}


@no_such_arguments(_HINTS, too_many=_IN_ONE)
@allows_transfers
def fit(
    state: TrainState,
    step: TrainStep,
    train_data: data.Dataset | data.Source | Iterable[Any],
    *,
    test_data: data.Dataset | None = None,
    apply_fn: Callable[..., jax.Array] | None = None,
    eval_data: Any = None,
    eval_fn: Callable[..., Any] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    max_steps: int | None = None,
    eval_every: int | None = None,
    progress: bool | int | Literal["bar"] = True,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    resume: bool | Literal["auto"] = "auto",
    checkpoint_every: int | None = None,
    keep: int = 3,
    keep_every: int | None = None,
    certificate: str | os.PathLike[str] | None = None,
    certificate_every: int = 100,
    metrics_file: str | os.PathLike[str] | None = None,
    callbacks: CallbackFunction | WithMemory | Sequence[CallbackFunction | WithMemory] = (),
    on_step: OnStep | None = None,
    profile: Profile | None = None,
    steps_per_execution: int | Literal["auto"] = "auto",
    on_interrupt: Literal["auto", "return", "raise"] = "auto",
) -> tuple[TrainState, History]:
    """Train for some epochs.

    The order of the examples depends only on `state.rng` and the number of the step. So a resumed run gives the same
    results as an uninterrupted run, and the order does not depend on the number of devices.

    After Ctrl-C, a notebook's interrupt or SIGTERM, the running steps finish. With `checkpoint_dir`, the state is
    saved, and the same call resumes from it, up to the same last epoch. A second signal stops at once.

    Args:
        state: from `start` or `create_state`. It is donated, so use the returned state afterwards.
        step: from `start` or `make_train_step`.
        train_data: what `data.as_source` takes: a `data.Dataset`, a dict of arrays, a loader. An incomplete batch at
            the end of an epoch is dropped.
        test_data: a `data.Dataset` with integer labels, evaluated with `apply_fn` after each epoch. The record has
            `test_loss` and `test_accuracy`.
        apply_fn: `apply_fn(params, images) -> logits`, as in `evaluate`.
        eval_data: any data for `evaluate` except iterators, evaluated with `eval_fn` after each epoch. Without
            `eval_fn` the record has `eval_loss` and what else the `loss_fn` of the step returns: means over all
            examples, in batches of `batch_size`. Such a `loss_fn` takes (params, batch) and no more.
        eval_fn: `eval_fn(params, batch) -> {name: values}`, as in `evaluate`. The record has the scores as
            `eval_<name>`, or `eval_<name>/0`, `eval_<name>/1`, ... for columns.
        epochs: the number of epochs, counted from the step of `state`. None: as many as `max_steps` needs.
        batch_size: examples in a batch, over all devices. It must be a multiple of the number of devices, or under
            engine `jit`, of the size of the mesh axes that split a batch. None: the size of the batches of a list or a
            `DataLoader`, or else 32.
        max_steps: the training ends after this many steps, counted from the step of `state`, also within an epoch. The
            same call with more steps resumes from the checkpoint and gives the numbers of an uninterrupted run.
        eval_every: also evaluate after every `eval_every` steps. Such a record has `under_way` True and the means over
            the steps of its epoch so far. Callbacks get it, and the history keeps it.
        progress: show a tqdm bar for each epoch in a terminal or notebook, and print a line for each epoch. For
            thousands of epochs: 100 prints a line for each 100th epoch and the last one, and "bar" shows one bar for
            the whole run and no lines.
        checkpoint_dir: the directory for checkpoints, one after each epoch. It may be in a bucket: "gs://bucket/run" or
            "s3://bucket/run".
        resume: "auto" resumes from the latest checkpoint in `checkpoint_dir` if its step is after the step of `state`,
            or if the run was interrupted at that step. False ignores checkpoints. True requires one.
        checkpoint_every: also save a checkpoint after every `checkpoint_every` steps.
        keep: the number of latest checkpoints that are kept.
        keep_every: also save a checkpoint of the first state and after every `keep_every` steps, and keep these for
            good. `train.open` computes any step of the run again from them.
        certificate: a file for hashes of the state, which `jaxpar verify` recomputes, see docs/same_bits.md. A resumed
            run continues the file and replaces the lines of repeated steps. The file of another run is refused.
        certificate_every: the number of steps between two hashes.
        metrics_file: a file for the history as JSON lines, as from `to_jsonl`: all epochs of this run, after
            what other runs have written there.
        callbacks: a callback or several, called after each epoch and its evaluation: a function `callback(state,
            record)`, or a `train.Callback`, such as `EarlyStopping`, whose memory is saved with the checkpoints. The
            training ends if a function returns True, or if `stop` of `on_epoch` is True. Do not keep the state: the
            next step donates it.
        on_step: `on_step(step, metrics)`, called for each step in order, with its metrics as floats. `step` counts from
            1. Calls come up to sixteen steps late, so that the devices do not wait. With several processes each calls
            it, and the callbacks too; in an elastic run only process 0.
        profile: a directory for a trace by jax's profiler, of steps 11 to 15 of this call; or (directory, first_step,
            num_steps).
        steps_per_execution: the number of steps in one compiled program, see `TrainStep.many`. More than 1 needs a
            `data.Dataset` that fits on the devices, and a single process. Programs end at epochs, checkpoints and
            profiles, so results do not change. "auto" is up to eight steps, or 0.2 s. It is 1 on TPUs, on CPUs for a
            step with XLA's convolutions, and if more is impossible.
        on_interrupt: after Ctrl-C, "return" the state and the history so far, or "raise" a KeyboardInterrupt with the
            attributes `state` and `history`. "auto": "return" in a notebook or interactive session, else "raise".

    Returns:
        (the trained state, the history). The history is a list with a dict for each epoch, those before a resume too:
        `epoch` from 1; `step`, at the end of the epoch; the mean `loss` and other metrics of the step; the scores;
        `seconds` of training; `images_per_second`, or `examples_per_second` for data other than a `data.Dataset`. If
        the step may skip updates, `skipped` counts them, and the means are over the other steps. An incomplete epoch
        comes last, with `interrupted` True.

    Raises:
        TypeError, ValueError: an argument has the wrong type, is out of range or lacks its other half; the data have
            less than one batch; the state was donated; the records lack the metric of a callback; the checkpoint
            belongs to another model, optimizer, batch size or size of data set; a label is not a class of the model.
            Shapes are checked before the first step, those of an iterable's batches as they arrive.
        FileNotFoundError: `resume=True`, but there is no checkpoint.
        NonFiniteError: a step with `nonfinite="stop"` had a NaN or infinite loss or gradient. Its `state`, which is
            saved too, is the state before that step.
        OSError: a checkpoint, certificate or metrics file cannot be written. Earlier files stay.
        KeyboardInterrupt: after Ctrl-C, see `on_interrupt`. SystemExit(143): after SIGTERM.
        An exception during the run has the attributes `state` and `history` up to the last step, unless the failed step
        has donated the state.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from jaxpar import data, kv, train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["image"] @ params["w"] - batch["label"]) ** 2).mean(), {}
        >>> lines = data.Dataset(np.ones((8, 2), np.float32), np.ones(8, np.float32))
        >>> state = train.create_state(kv.from_params({"w": jnp.zeros(2)}, optimizer=optax.sgd(0.1)), 0)
        >>> state, history = train.fit(
        ...     state, train.make_train_step(loss_fn), lines, epochs=2, batch_size=8, progress=False)
        >>> [round(record["loss"], 2) for record in history]
        [1.0, 0.36]
    """
    options = FitOptions(
        test_data=test_data,
        apply_fn=apply_fn,
        eval_data=eval_data,
        eval_fn=eval_fn,
        epochs=epochs,
        batch_size=batch_size,
        max_steps=max_steps,
        eval_every=eval_every,
        progress=progress,
        checkpoint_dir=checkpoint_dir,
        resume=resume,
        checkpoint_every=checkpoint_every,
        keep=keep,
        keep_every=keep_every,
        certificate=certificate,
        certificate_every=certificate_every,
        metrics_file=metrics_file,
        callbacks=callbacks,
        on_step=on_step,
        profile=profile,
        steps_per_execution=steps_per_execution,
        on_interrupt=on_interrupt,
    )
    with delayed():
        run = Run(state, step, train_data, options)
    if not distributed.is_elastic():
        return train(run, state)

    # In an elastic run process 0 alone trains, and the others make its steps.
    from .._elastic.member import Member  # other runs do not need it

    member = Member(run, state)
    if member.leads:
        return train(run, state, member.lead)
    signals = Interrupts()
    state, history, last_step = member.follow(run.check(state), signals)
    if signals.asked is None:
        return state, history
    epoch = -(-(last_step - member.first) // (run.steps or 1))
    place = describe_stop(last_step, epoch, run.epochs, saved=None)
    return finish_interrupted(signals.asked, state, history, place, run.on_interrupt)
