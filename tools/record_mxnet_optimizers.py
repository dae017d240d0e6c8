"""Records what MXNet 1.9.1's optimizers do, option by option, for tests/mxnet/test_mxnet_reference.py.

It runs in an environment of its own, since MXNet's last release needs Python 3.8 and an old NumPy:

    python3.8 -m venv mxnet38
    mxnet38/bin/pip install -r benchmarks/requirements-mxnet.txt
    mxnet38/bin/python tools/record_mxnet_optimizers.py tests/reference/mxnet_optimizers.json

Every case is a real KVStore of type local with two keys. Key 1 has multipliers of rate and decay. Each gets the same
four pushes. What is recorded are the values of both keys after the second and the last push, or the error. The options
of an optimizer are switches, and all their combinations are cases.

A case is the optimizer, its options, the third push if it is another, and the values by form and dtype:

    dense    the gradient is a whole array
    rows     it is row-sparse, the stored value is not
    sparse   both are row-sparse; recorded where the result is not that of rows
    master   dtype float16 with multi_precision
"""

import itertools
import json
import logging
import sys
import warnings

import mxnet as mx
import numpy as np

DIGITS = {"float16": 5, "float32": 7, "float64": 9}  # that are recorded
WEIGHTS = [[[1.0, -2.0], [0.5, 1.5], [-0.75, 0.25]], [[-1.25, 0.5], [2.0, -0.5], [1.0, 3.0]]]
# For each push the rows that it names and their gradients. The last row is never named.
PUSHES = [
    ([1], [[0.25, -1.5]]),
    ([0, 1], [[1.0, -0.5], [0.75, 2.0]]),
    ([1], [[-0.5, 0.125]]),
    ([0], [[-2.0, 0.375]]),
]
MULTIPLIERS = {"lr_mult": {1: 0.5}, "wd_mult": {1: 2.0}}
COMMON = [{"wd": 0.1}, {"clip_gradient": 0.6}, {"rescale_grad": 0.5}]
SWITCHES = {
    "sgd": [{"momentum": 0.9}, *COMMON],
    "nag": [{"momentum": 0.9}, *COMMON],
    "adam": [{"beta1": 0.8, "beta2": 0.9, "epsilon": 0.01}, *COMMON],
    "rmsprop": [
        {"centered": True},
        {"gamma1": 0.8, "gamma2": 0.7, "epsilon": 0.01},
        {"clip_weights": 1.2},
        *COMMON,
    ],
    "adagrad": [{"eps": 0.01}, *COMMON],
}
LAZY = ("sgd", "adam")  # those with the option lazy_update
NOTHING = ([], [])  # a push of no rows
# Cases beside the combinations: the optimizer, its options, and a push that takes the place of the third one.
EDGES = [
    *((name, {}, None) for name in SWITCHES),
    *((name, {"clip_gradient": 0.0, "learning_rate": 0.1, "wd": 0.1}, None) for name in SWITCHES if name != "adagrad"),
    ("rmsprop", {"clip_weights": 0.0, "learning_rate": 0.1}, None),
    ("adam", {"learning_rate": None}, None),
    ("rmsprop", {"learning_rate": None}, None),
    ("adam", {"learning_rate": 0.1, "begin_num_update": 7}, None),
    ("adam", {"learning_rate": 0.1, "beta1": 0.0, "beta2": 1.0}, None),
    ("sgd", {"learning_rate": 0.1, "momentum": 1.0}, None),
    ("sgd", {"learning_rate": 0.1, "rescale_grad": -0.5, "clip_gradient": 0.6}, None),
    ("adagrad", {"learning_rate": 0.1}, NOTHING),
    *(
        (name, {"learning_rate": 0.1, "wd": 0.1, **more}, NOTHING)
        for name, more in (
            ("sgd", {"momentum": 0.9}),
            ("sgd", {"momentum": 0.9, "lazy_update": False}),
            ("sgd", {"lazy_update": False}),
            ("nag", {"momentum": 0.9}),
            ("nag", {}),
            ("adam", {}),
            ("adam", {"lazy_update": False}),
            ("rmsprop", {}),
            ("rmsprop", {"centered": True}),
        )
    ),
]
ATTRIBUTES = {"learning_rate": "lr", "eps": "float_stable_eps"}


def combinations(name):
    """Every subset of the switches of an optimizer."""
    switches = SWITCHES[name]
    for on in itertools.product([False, True], repeat=len(switches)):
        options = {"learning_rate": 0.1}
        for chosen, switch in enumerate(switches):
            options.update(switch if on[chosen] else {})
        yield options


def whole(rows, gradients):
    table = np.zeros((3, 2))
    for place, row in enumerate(rows):
        table[row] = gradients[place]
    return table


def as_pushed(form, rows, gradients, dtype):
    """The gradient as MXNet's array."""
    if form == "dense":
        return mx.nd.array(whole(rows, gradients), dtype=dtype)
    if not rows:
        return mx.nd.sparse.zeros("row_sparse", (3, 2), dtype=dtype)
    return mx.nd.sparse.row_sparse_array((np.array(gradients), rows), shape=(3, 2), dtype=dtype)


def pulled(store, form, dtype):
    """The values of both keys, flat."""
    found = []
    for key in (0, 1):
        if form == "sparse":
            out = mx.nd.sparse.zeros("row_sparse", (3, 2), dtype=dtype)
            store.row_sparse_pull(key, out=out, row_ids=mx.nd.array([0, 1, 2], dtype="int64"))
        else:
            out = mx.nd.zeros((3, 2), dtype=dtype)
            store.pull(key, out=out)
        found.extend(out.asnumpy().astype("float64").reshape(-1))
    return [float(f"{value:.{DIGITS[dtype]}g}") if np.isfinite(value) else None for value in found]


def run(name, options, form, dtype="float32", third=None):
    """The values after the second and the last push, or the line of the error.

    form: dense, rows (pushed into a dense value) or sparse (rows pushed into a row-sparse value).
    """
    store = mx.kv.create("local")
    for key in (0, 1):
        value = mx.nd.array(WEIGHTS[key], dtype=dtype)
        store.init(key, value.tostype("row_sparse") if form == "sparse" else value)
    try:
        optimizer = mx.optimizer.create(name, **options)
        optimizer.set_lr_mult(MULTIPLIERS["lr_mult"])
        optimizer.set_wd_mult(MULTIPLIERS["wd_mult"])
        updater = mx.optimizer.get_updater(optimizer)
        raised = []

        def update(key, pushed, stored):
            # The store swallows what an updater raises.
            try:
                updater(key, pushed, stored)
                stored.wait_to_read()
            except Exception as error:
                raised.append(error)

        store._set_updater(update)
        values = []
        for place, push in enumerate(PUSHES):
            rows, gradients = third if third is not None and place == 2 else push
            for key in (0, 1):
                store.push(key, as_pushed(form, rows, gradients, dtype))
                if raised:
                    raise raised[0]
            if place in (1, len(PUSHES) - 1):
                values.append(pulled(store, form, dtype))
    except Exception as error:
        return next(line.strip()[:120] for line in str(error).splitlines() if "Error:" in line)
    return values


def record(name, options, third, forms):
    """A case: what comes of each form and dtype."""
    found = {}
    for form in forms:
        how, dtype = form.split()
        more = {"multi_precision": True} if how.endswith("master") else {}
        found[form] = run(name, {**options, **more}, how.split("-")[0], dtype, third)
    for form, values in list(found.items()):
        if form.startswith("sparse") and values == found[form.replace("sparse", "rows")]:
            del found[form]
    return name, options, third, found


def cases():
    """Everything that is recorded."""
    whole_forms = ["dense float32", "dense-master float16", "dense float16", "dense float64"]
    row_forms = [f"{how}{dtype}" for how in ("rows", "sparse") for dtype in (" float32", "-master float16", " float16")]
    for name in SWITCHES:
        for options in combinations(name):
            yield record(name, options, None, whole_forms + row_forms)
            if name in LAZY:
                yield record(name, {**options, "lazy_update": False}, None, row_forms)
    for name, options, third in EDGES:
        yield record(name, options, third, ["dense float32", "rows float32", "sparse float32"])


def defaults(name):
    """The options of an optimizer that is made without any."""
    made = mx.optimizer.create(name)
    names = {"learning_rate", "wd", "rescale_grad", "clip_gradient", "begin_num_update", "multi_precision"}
    names = names.union(*SWITCHES[name]) | ({"lazy_update"} if name in LAZY else set())
    return {option: getattr(made, ATTRIBUTES.get(option, option)) for option in sorted(names)}


def main(path):
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    head = {
        "mxnet": mx.__version__,
        "weights": WEIGHTS,
        "pushes": PUSHES,
        "multipliers": MULTIPLIERS,
        "defaults": {name: defaults(name) for name in SWITCHES},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    recorded = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases())
    with open(path, "w") as out:
        out.write("{\n" + ",\n".join(lines) + ',\n"cases": [\n' + recorded + "\n]\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
