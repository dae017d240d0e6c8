"""Training: a data-parallel step out of a loss function, the state it changes, evaluation, and the loop."""

from ._fit.compile_cache import use_compilation_cache as use_compilation_cache
from ._fit.evaluate import evaluate as evaluate
from ._fit.fit import fit as fit
from ._fit.history import History as History, plot_history as plot_history, to_pandas as to_pandas
from ._fit.metrics_files import to_csv as to_csv, to_jsonl as to_jsonl
from ._fit.plot_predictions import plot_confusion_matrix as plot_confusion_matrix, plot_mistakes as plot_mistakes
from ._fit.predictions import Mistakes as Mistakes, confusion_matrix as confusion_matrix, mistakes as mistakes
from ._fit.tensorboard import to_tensorboard as to_tensorboard
from ._step.loss import classification_loss as classification_loss
from ._step.loss_scale import DynamicLossScale as DynamicLossScale
from ._step.make import make_train_step as make_train_step
from ._step.nonfinite import NonFiniteError as NonFiniteError, check_finite as check_finite
from ._step.state import TrainState as TrainState, create_state as create_state
from ._step.train_step import TrainStep as TrainStep
