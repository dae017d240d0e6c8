"""MXNet's own run of examples/mxnet_bucketing.py and examples/mxnet_recommender.py, for docs/from_mxnet.md.

It runs where MXNet does, see tools/record_mxnet_symbols.py. It writes the symbol files of the first script, and prints
what MXNet scores after each epoch. Data and first params are those of the examples, whose lines it runs.
"""

import json
import pathlib

import mxnet as mx
import numpy as np

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def lines(script, first, last):
    """What the lines of a script define, from one that begins so to one that begins so."""
    text = (EXAMPLES / script).read_text()
    found = {"np": np, "BUCKETS": (4, 6), "WORDS": 30, "BATCH": 16, "USERS": 2000, "ITEMS": 1000, "FACTORS": 8}
    exec(text[text.index(first) : text.index(last)], found)
    return found


def symbol_of(length):
    """The network of example/rnn/bucketing/lstm_bucketing.py."""
    data, label = mx.sym.Variable("data"), mx.sym.Variable("softmax_label")
    embed = mx.sym.Embedding(data, input_dim=30, output_dim=16, name="embed")
    stack = mx.rnn.SequentialRNNCell()
    stack.add(mx.rnn.LSTMCell(num_hidden=16, prefix="lstm_l0_"))
    outputs, _ = stack.unroll(length, inputs=embed, merge_outputs=True)
    pred = mx.sym.FullyConnected(mx.sym.Reshape(outputs, shape=(-1, 16)), num_hidden=30, name="pred")
    return mx.sym.SoftmaxOutput(pred, mx.sym.Reshape(label, shape=(-1,)), name="softmax"), ("data",), ("softmax_label",)


def bucketing():
    for length in (4, 6):
        text = json.dumps(json.loads(symbol_of(length)[0].tojson()), separators=(",", ":"))
        (EXAMPLES / "mxnet" / f"lstm-{length}-symbol.json").write_text(text + "\n")

    # The data and the first params.
    found = lines("mxnet_bucketing.py", "draw =", "# The params of all")
    symbol = symbol_of(4)[0]
    arguments, _, _ = symbol.infer_shape(data=(16, 4), softmax_label=(16, 4))
    shapes = {n: s for n, s in zip(symbol.list_arguments(), arguments) if n not in ("data", "softmax_label")}  # noqa: B905
    text = (EXAMPLES / "mxnet_bucketing.py").read_text()
    found["shapes"] = shapes
    exec(text[text.index("bound =") : text.index("def losses")], found)

    def batch_of(batch):
        shapes = {n: batch[n].shape for n in ("data", "softmax_label")}
        given = [[("data", shapes["data"])], [("softmax_label", shapes["softmax_label"])]]
        arrays = [[mx.nd.array(batch["data"])], [mx.nd.array(batch["softmax_label"])]]
        return mx.io.DataBatch(
            *arrays, bucket_key=batch["data"].shape[1], provide_data=given[0], provide_label=given[1]
        )

    module = mx.mod.BucketingModule(symbol_of, default_bucket_key=6, context=mx.cpu())
    module.bind([("data", (16, 6))], [("softmax_label", (16, 6))])
    module.set_params({n: mx.nd.array(a) for n, a in found["params"].items()}, {})
    options = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-5, "rescale_grad": 1 / 16}
    module.init_optimizer(kvstore="device", optimizer="sgd", optimizer_params=options)
    for epoch in range(1, 5):
        for batch in map(batch_of, found["train"]):
            module.forward_backward(batch)
            module.update()
        metric = mx.metric.Perplexity(0)
        for batch in map(batch_of, found["validation"]):
            module.forward(batch, is_train=False)
            module.update_metric(metric, batch.label)
        print(f"epoch {epoch} perplexity {metric.get()[1]:.4f}")


def recommender():
    found = lines("mxnet_recommender.py", "draw =", "keys =")
    store = mx.kv.create("device")
    names = ("user_weight", "item_weight")
    for name, table in zip(names, found["tables"]):  # noqa: B905
        store.init(name, mx.nd.array(table).tostype("row_sparse"))
    optimizer = mx.optimizer.SGD(learning_rate=0.2, momentum=0.9, wd=1e-4, rescale_grad=1 / 64)
    store.set_optimizer(optimizer)
    user, item = mx.sym.Variable("user"), mx.sym.Variable("item")
    weights = [mx.sym.Variable(n, stype="row_sparse", shape=t.shape) for n, t in zip(names, found["tables"])]  # noqa: B905
    parts = [
        mx.sym.contrib.SparseEmbedding(ids, weight, input_dim=table.shape[0], output_dim=8)
        for ids, weight, table in zip((user, item), weights, found["tables"])  # noqa: B905
    ]
    pred = mx.sym.sum(parts[0] * parts[1], axis=1)
    net = mx.sym.LinearRegressionOutput(pred, mx.sym.Variable("score"), name="out")
    grad_req = {n: "write" if n in names else "null" for n in net.list_arguments()}
    executor = net.simple_bind(mx.cpu(), grad_req=grad_req, user=(64,), item=(64,), score=(64,))
    for epoch in range(1, 5):
        squares = 0.0
        for start in range(0, 6400, 64):
            batch = {
                n: found[key][start : start + 64]
                for n, key in (("user", "users"), ("item", "items"), ("score", "ratings"))
            }
            for name, array in batch.items():
                executor.arg_dict[name][:] = array
            for name, ids in zip(names, ("user", "item")):  # noqa: B905
                store.row_sparse_pull(name, out=executor.arg_dict[name], row_ids=mx.nd.array(batch[ids]))
            (out,) = executor.forward(is_train=True)
            squares += float(((out.asnumpy() - batch["score"]) ** 2).sum())
            executor.backward()
            for name in names:
                store.push(name, executor.grad_dict[name])
        print(f"epoch {epoch} RMSE {(squares / 6400) ** 0.5:.5f}")


if __name__ == "__main__":
    bucketing()
    recommender()
