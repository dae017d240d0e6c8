"""The training step: pure functions of a state and a batch.

A call of a step goes one way:

    train_step   find or make the program for the state
    programs     one step or several as one compiled program, with the memory of the state donated (`pmap_program`: one
                 over several processes)
    engines      from the step of one device to the step of all: `pmap`, `shard_map`
    device_step  what one device does: gradient, push, updater, metrics (`local_sgd`: rounds of local steps)
    gradient     the gradient of one device's share: microbatches, precision, rematerialisation
    batch        the sizes of a batch, and how virtual shards are dealt to devices
    virtual_step, virtual_program
                 with `virtual_shards`: the two programs for one device, and the step of all out of them
    nonfinite    whether the update is made, with `loss_scale`

`make` checks the options, `state` is what a step takes and returns.
"""

from .loss import classification_loss as classification_loss
from .loss_scale import DynamicLossScale as DynamicLossScale
from .make import make_train_step as make_train_step
from .nonfinite import NonFiniteError as NonFiniteError, check_finite as check_finite
from .state import TrainState as TrainState, carries as carries, create_state as create_state
from .train_step import TrainStep as TrainStep
