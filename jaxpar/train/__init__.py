"""Training: a data-parallel step, the state that it changes, and the loop around it.

    state = train.create_state(kv.from_params(params, optimizer=optax.sgd(0.1)), 0)
    step = train.make_train_step(loss_fn)
    state, metrics = step(state, batch)                       # one step
    state, history = train.fit(state, step, data, epochs=5, batch_size=256)  # all of them

`_step` is pure: a step takes a state and returns the next one. `_fit` is the loop with its input and output. It calls
`_evaluate`, which goes once over every example, and `_callbacks`, which shows and keeps what was measured. `_elastic`
makes its steps where processes may be lost and may join.
Each of them imports only those before it: `_step`, `_callbacks`, `_evaluate`, `_elastic`, `_fit`.

A call of `fit` goes one way:

    fit         check, resume, loop, finish
    run         the arguments, checked: they stay the same
    role        whether this process trains, or follows one that does (`_elastic`)
    resume      the checkpoint to go on from, and when to save
    loop        start steps, evaluate, call the callbacks
    epoch       the metrics, read late, and their sums
    interrupt   Ctrl-C and SIGTERM, obeyed between two steps
    certificate hashes of the state; verify computes them again
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from ._callbacks.early_stopping import EarlyStopping as EarlyStopping, KeepBest as KeepBest
from ._callbacks.history import History as History, plot_history as plot_history, to_pandas as to_pandas
from ._callbacks.learning_rate import LearningRate as LearningRate
from ._callbacks.live_plot import LivePlot as LivePlot
from ._callbacks.loggers import (
    to_jsonl as to_jsonl,
    to_mlflow as to_mlflow,
    to_tensorboard as to_tensorboard,
    to_wandb as to_wandb,
)
from ._callbacks.ray_train import to_ray as to_ray
from ._evaluate.evaluate import evaluate as evaluate
from ._evaluate.metrics import (
    Mean as Mean,
    accuracy as accuracy,
    cross_entropy as cross_entropy,
    mean_squared_error as mean_squared_error,
    per_class_accuracy as per_class_accuracy,
    perplexity as perplexity,
    top_k as top_k,
)
from ._evaluate.plot_predictions import plot_confusion_matrix as plot_confusion_matrix, plot_mistakes as plot_mistakes
from ._evaluate.predictions import (
    Mistakes as Mistakes,
    confusion_matrix as confusion_matrix,
    mistakes as mistakes,
    predict as predict,
)
from ._fit.compile_cache import use_compilation_cache as use_compilation_cache
from ._fit.fit import fit as fit
from ._fit.interrupt import Interruptible as Interruptible, interruptible as interruptible
from ._fit.lr_find import RateTest as RateTest, lr_find as lr_find
from ._fit.progress import StepProgress as StepProgress, progress as progress
from ._fit.verify import NotComparableError as _NotComparableError, verify as _verify  # noqa: F401
from ._step.loss import classification_loss as classification_loss
from ._step.make import make_train_step as make_train_step, start as start
from ._step.nonfinite import (
    DynamicLossScale as DynamicLossScale,
    NonFiniteError as NonFiniteError,
    check_finite as check_finite,
)
from ._step.state import TrainState as TrainState, create_state as create_state
from ._step.train_step import TrainStep as TrainStep
