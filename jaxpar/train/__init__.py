"""Training: the data-parallel step, its state, and the loop `fit`.

    state = train.create_state(kv.from_params(params, optimizer=optax.sgd(0.1)), 0)
    step = train.make_train_step(loss_fn)
    state, metrics = step(state, batch)                       # one step
    state, history = train.fit(state, step, data, epochs=5, batch_size=256)  # all of them

`_step` is pure: a step takes a state and returns the next state. `_fit` is the loop, with all input and output. It
calls `_evaluate`, which computes scores over all examples, and `_callbacks`, which show and store the records.
`_elastic` runs the steps of an elastic run, in which processes may be lost and may join. `_plan` compiles a step for
devices that do not exist. `_runs` opens what `_fit` saved, as a value. Each package imports only packages before it in
this order: `_step`, `_plan`, `_callbacks`, `_evaluate`, `_elastic`, `_fit`, `_runs`.

A call of `fit` goes through `_fit.run`, its checked arguments, `_fit.saved`, the checkpoint to resume from, and
`_fit.loop`, whose `train_loop` is the loop from top to bottom.
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from ._callbacks.callback import Callback as Callback
from ._callbacks.figures import LivePlot as LivePlot, plot_history as plot_history
from ._callbacks.history import History as History, to_pandas as to_pandas
from ._callbacks.loggers import (
    to_jsonl as to_jsonl,
    to_mlflow as to_mlflow,
    to_tensorboard as to_tensorboard,
    to_wandb as to_wandb,
)
from ._callbacks.media import Image as Image, Text as Text
from ._callbacks.monitors import EarlyStopping as EarlyStopping, KeepBest as KeepBest, LearningRate as LearningRate
from ._callbacks.ray import to_ray as to_ray
from ._callbacks.undo import Undo as Undo
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
from ._evaluate.predictions import (
    Mistakes as Mistakes,
    confusion_matrix as confusion_matrix,
    mistakes as mistakes,
    plot_confusion_matrix as plot_confusion_matrix,
    plot_mistakes as plot_mistakes,
    predict as predict,
)
from ._fit.certificate import read as _read_certificate  # noqa: F401
from ._fit.compile_cache import use_compilation_cache as use_compilation_cache
from ._fit.fault import Fault as Fault
from ._fit.fit import fit as fit
from ._fit.interrupt import Interruptible as Interruptible, interruptible as interruptible
from ._fit.lr_find import RateTest as RateTest, lr_find as lr_find
from ._fit.progress import StepProgress as StepProgress, progress as progress
from ._fit.verify import (
    Verified as Verified,
    compute_again as _verify,  # noqa: F401
    verify as verify,
)
from ._plan.compiled import PlannedCollective as PlannedCollective
from ._plan.largest import largest_batch as largest_batch
from ._plan.meshes import MeshComparison as MeshComparison, compare_meshes as compare_meshes
from ._plan.plan import Plan as Plan, PlanComparison as PlanComparison, compare_plans as compare_plans, plan as plan
from ._runs.compare import Comparison as Comparison, compare as compare
from ._runs.saved_run import SavedRun as SavedRun, open as open
from ._step.loss import classification_loss as classification_loss
from ._step.nonfinite import (
    DynamicLossScale as DynamicLossScale,
    NonFiniteError as NonFiniteError,
    check_finite as check_finite,
)
from ._step.state import TrainState as TrainState, create_state as create_state
from ._step.train_step import TrainStep as TrainStep, make_train_step as make_train_step, start as start
