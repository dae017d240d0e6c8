"""The training step: pure functions of a state and a batch.

A call of a step goes one way:

    train_step   check the options; find or make the program for the state
    programs     one step or several as one compiled program, with the memory of the state donated; the engines `pmap`,
                 `shard_map` and `jit`, which make the step of all devices out of that of one
    step         what one device does: gradient, sum over the devices, update, new state (`GlobalStep`: of all devices,
                 for `jit`; `local_sgd`: rounds of local steps)
    loss         what a loss function takes and gives, and its means over the devices
    lookups      the gradient of a table as the rows that a loss looks up
    modules      whole modules of Flax NNX and Equinox as params, model state and a loss of these
    nonfinite    whether the update is made, and the scale of the loss
    virtual      with `virtual_shards`: the programs of one device, and the step of all out of them

`state` is what a step takes and returns.
"""
