"""The momentum that MXNet saved in a `.states` file, as a `.params` file, which holds no code.

A `.states` file is a pickle, and reading one runs the code in it. So jaxpar reads none. This script does, where MXNet
is installed, for files that you trust:

    python tools/mxnet_states.py resnet18 10

reads resnet18-symbol.json, resnet18-0010.params and resnet18-0010.states of `Module.save_checkpoint(prefix, epoch,
save_optimizer_states=True)`, and writes resnet18-0010-momentum.params, an array for each name. It is for SGD and NAG,
whose state is one array.
"""

import pickle
import sys

import mxnet as mx


def write_states(prefix, epoch):
    symbol, args, _ = mx.model.load_checkpoint(prefix, epoch)
    with open(f"{prefix}-{epoch:04d}.states", "rb") as file:
        states = pickle.load(file)
    names = [n for n in symbol.list_arguments() if n in args]
    if len(states) % len(names):
        raise ValueError(f"{len(states)} states do not fit {len(names)} params")
    # A Module without a store has states of each device for each param; with one, a state for each name.
    copies = len(states) // len(names)
    named = {n: states[n] if n in states else states[i * copies] for i, n in enumerate(names)}
    for n, state in named.items():
        if not isinstance(state, mx.nd.NDArray) or state.shape != args[n].shape:
            raise ValueError(f"the state of {n} is no array of shape {args[n].shape}; it is that of another optimizer")
    mx.nd.save(f"{prefix}-{epoch:04d}-momentum.params", named)


if __name__ == "__main__":
    write_states(sys.argv[1], int(sys.argv[2]))
