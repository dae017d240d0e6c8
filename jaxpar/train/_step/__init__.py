"""The training step: pure functions of a state and a batch.

A call of a step goes one way:

    train_step   find or make the program for the state
    programs     one step or several as one compiled program, with the memory of the state donated; the engines `pmap`,
                 `shard_map` and `jit`, which make the step of all devices out of that of one
    device_step  what one device does: gradient, push, updater, metrics (`local_sgd`: rounds of local steps,
                 `global_step`: of all devices, for `jit`)
    gradient     the gradient of one device's share: microbatches, precision, rematerialisation
    nonfinite    whether the update is made, and the scale of the loss
    virtual      with `virtual_shards`: the programs of one device, and the step of all out of them

`make` checks the options, `loss` is that of a classifier, `state` is what a step takes and returns.
"""

from .loss import classification_loss as classification_loss
from .make import make_train_step as make_train_step
from .nonfinite import (
    DynamicLossScale as DynamicLossScale,
    NonFiniteError as NonFiniteError,
    check_finite as check_finite,
)
from .state import TrainState as TrainState, carries as carries, create_state as create_state
from .train_step import TrainStep as TrainStep
