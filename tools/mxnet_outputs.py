"""Every output inside of a network, as MXNet computes it, for `model.compare` of jaxpar.

It runs where MXNet does, and needs nothing of jaxpar:

    python3.8 mxnet_outputs.py lenet-symbol.json lenet-0010.params inputs.npz lenet-outputs.params

inputs.npz has an array for each input: `numpy.savez("inputs.npz", data=images)`. A label may be left out. The outputs
are those of evaluation (`is_train=False`).
"""

import os
import sys

os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"  # else several layers are computed as one

import mxnet as mx
import numpy as np

symbol_file, params_file, inputs_file, outputs_file = sys.argv[1:]
symbol = mx.sym.load(symbol_file)
given = {name: mx.nd.array(value, dtype=value.dtype) for name, value in np.load(inputs_file).items()}
known = {name.split(":")[-1]: array for name, array in mx.nd.load(params_file).items()}
known.update(given)
names, running = symbol.list_arguments(), symbol.list_auxiliary_states()
missing = [name for name in names + running if name not in known and not name.endswith("label")]
if missing:
    sys.exit("no array is given for " + ", ".join(missing))
inside = symbol.get_internals()
layers = mx.sym.Group([inside[name] for name in inside.list_outputs() if name not in names + running])
shapes, _, _ = layers.infer_shape(**{name: value.shape for name, value in given.items()})
arrays = {name: known[name] if name in known else mx.nd.zeros(shape) for name, shape in zip(names, shapes)}  # noqa: B905
executor = layers.bind(mx.cpu(), arrays, grad_req="null", aux_states={name: known[name] for name in running})
outputs = dict(zip(layers.list_outputs(), executor.forward(is_train=False)))  # noqa: B905
outputs.update(given)
mx.nd.save(outputs_file, outputs)
