"""Training: a data-parallel step out of a loss function, the state it changes, evaluation, and the loop."""

from ._evaluate import evaluate as evaluate
from ._fit import fit as fit
from ._history import plot_history as plot_history
from ._loss import classification_loss as classification_loss
from ._step import (
    TrainState as TrainState,
    TrainStep as TrainStep,
    create_state as create_state,
    make_train_step as make_train_step,
)
