"""Training: a data-parallel step out of a loss function, the state it changes, evaluation, and the loop."""

from ._compile_cache import use_compilation_cache as use_compilation_cache
from ._evaluate import evaluate as evaluate
from ._finite import NonFiniteError as NonFiniteError, check_finite as check_finite
from ._fit import fit as fit
from ._history import History as History, plot_history as plot_history, to_pandas as to_pandas
from ._loss import classification_loss as classification_loss
from ._plot_predictions import plot_confusion_matrix as plot_confusion_matrix, plot_mistakes as plot_mistakes
from ._predictions import Mistakes as Mistakes, confusion_matrix as confusion_matrix, mistakes as mistakes
from ._scaling import DynamicLossScale as DynamicLossScale
from ._state import TrainState as TrainState, create_state as create_state
from ._step import TrainStep as TrainStep, make_train_step as make_train_step
from ._tensorboard import to_tensorboard as to_tensorboard
from ._text_sinks import to_csv as to_csv, to_jsonl as to_jsonl
