"""MXNet's side of the benchmarks. Run by MXNet's own Python (3.8); measures on command.

One request a line on standard input, one answer a line on standard output, both JSON:

    {"do": "version"}                                          -> "1.9.1"
    {"do": "kvstore", "shapes": [[256], ...], "devices": 4, "in_a_row": 1}
                                                               -> ["local", "device"], the contenders' names
    {"do": "lenet", "batch": 256, "contexts": [1, 2, 4], "steps": 3} -> ["1", "2", "4", "gluon"]
    {"do": "matrix", "users": 944, "items": 1683, "width": 64, "batch": 64} -> ["MXNet dense", "MXNet row_sparse"]
    {"do": "measure", "name": "device", "repeats": 10}         -> seconds for one repeat

A setup replaces the one before.
"""

import json
import os
import sys
import time


def kvstore(mx, shapes, devices, in_a_row):
    """Push and pull of every key, a few times in a row: one value from each context, pulled onto each context."""
    contexts = [mx.cpu(i) for i in range(devices)]
    keys = list(range(len(shapes)))
    pushed = [[mx.nd.ones(tuple(s), ctx) for ctx in contexts] for s in shapes]
    pulled = [[mx.nd.zeros(tuple(s), ctx) for ctx in contexts] for s in shapes]

    def contender(kind):
        store = mx.kv.create(kind)
        store.init(keys, [mx.nd.zeros(tuple(s)) for s in shapes])

        def once():
            for _ in range(in_a_row):
                store.push(keys, pushed)
                store.pull(keys, out=pulled)
            mx.nd.waitall()

        return once

    contenders = {kind: contender(kind) for kind in ("local", "device")}
    for once in contenders.values():
        once()
        assert pulled[0][-1].reshape((-1,))[0].asscalar() == devices
    return contenders


def lenet(mx, batch, contexts, steps):
    """Some training steps written out by hand, as the article on several devices has it."""
    nd, autograd = mx.nd, mx.autograd
    shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def forward(x, params):
        w1, b1, w2, b2, w3, b3, w4, b4 = params
        h = nd.relu(nd.Convolution(data=x, weight=w1, bias=b1, kernel=(3, 3), num_filter=20))
        h = nd.Pooling(data=h, pool_type="avg", kernel=(2, 2), stride=(2, 2))
        h = nd.relu(nd.Convolution(data=h, weight=w2, bias=b2, kernel=(5, 5), num_filter=50))
        h = nd.Pooling(data=h, pool_type="avg", kernel=(2, 2), stride=(2, 2)).flatten()
        return nd.dot(nd.relu(nd.dot(h, w3) + b3), w4) + b4

    def on(params, ctx):
        copies = [p.copyto(ctx) for p in params]
        for p in copies:
            p.attach_grad()
        return copies

    def allreduce(values):
        for v in values[1:]:
            values[0][:] += v.copyto(values[0].context)
        for v in values[1:]:
            values[0].copyto(v)

    images = nd.random.uniform(shape=(batch, 1, 28, 28))
    labels = nd.floor(nd.random.uniform(0, 10, shape=(batch,)))
    start = [nd.random.normal(scale=0.01, shape=s) if len(s) > 1 else nd.zeros(s) for s in shapes]

    def contender(count):
        places = [mx.cpu(i) for i in range(count)]
        copies = [on(start, ctx) for ctx in places]

        def train_batch():
            xs = mx.gluon.utils.split_and_load(images, places)
            ys = mx.gluon.utils.split_and_load(labels, places)
            with autograd.record():
                losses = [loss(forward(x, p), y) for x, y, p in zip(xs, ys, copies)]  # noqa: B905 (Python 3.8)
            for each in losses:
                each.backward()
            for i in range(len(start)):
                allreduce([p[i].grad for p in copies])
            for params in copies:
                for p in params:
                    p[:] = p - 0.2 * p.grad / batch

        def once():
            for _ in range(steps):
                train_batch()
            mx.nd.waitall()

        return once

    return {**{str(count): contender(count) for count in contexts}, "gluon": gluon_lenet(mx, batch, steps)}


def gluon_lenet(mx, batch, steps):
    """The same network as gluon has it, hybridized, on one context: what MXNet is fastest at."""
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(20, 3, activation="relu"),
        nn.AvgPool2D(2),
        nn.Conv2D(50, 5, activation="relu"),
        nn.AvgPool2D(2),
        nn.Flatten(),
        nn.Dense(128, activation="relu"),
        nn.Dense(10),
    )
    net.initialize(mx.init.Normal(0.01))
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2})
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    images = mx.nd.random.uniform(shape=(batch, 1, 28, 28))
    labels = mx.nd.floor(mx.nd.random.uniform(0, 10, shape=(batch,)))

    def once():
        for _ in range(steps):
            with mx.autograd.record():
                value = loss(net(images), labels)
            value.backward()
            trainer.step(batch)
        mx.nd.waitall()

    return once


def matrix(mx, users, items, width, batch):
    """Matrix factorization by gluon: two embeddings, dense and with row-sparse gradients, plain SGD."""
    nn = mx.gluon.nn
    ids = [mx.nd.floor(mx.nd.random.uniform(0, count, shape=(batch,))) for count in (users, items)]
    scores = mx.nd.floor(mx.nd.random.uniform(1, 6, shape=(batch,)))
    loss = mx.gluon.loss.L2Loss()

    class Net(mx.gluon.HybridBlock):
        def __init__(self, sparse):
            super().__init__()
            with self.name_scope():
                self.user = nn.Embedding(users, width, sparse_grad=sparse)
                self.item = nn.Embedding(items, width, sparse_grad=sparse)

        def hybrid_forward(self, F, user, item):
            return (self.user(user) * self.item(item)).sum(axis=-1)

    def contender(sparse):
        net = Net(sparse)
        net.initialize(mx.init.Normal(0.01))
        net.hybridize()
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=None)

        def once():
            with mx.autograd.record():
                value = loss(net(*ids), scores)
            value.backward()
            trainer.step(batch)
            mx.nd.waitall()

        return once

    return {"MXNet dense": contender(False), "MXNet row_sparse": contender(True)}


def measure(once, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        once()
    return (time.perf_counter() - start) / repeats


def main():
    # MXNet prints to standard output on its own; the answers go where it does not.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        import mxnet as mx
    except ImportError as error:
        mx, missing = None, str(error)

    setups = {"kvstore": kvstore, "lenet": lenet, "matrix": matrix}
    contenders = {}
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if mx is None:
                raise RuntimeError(missing)
            if do == "version":
                result = mx.__version__
            elif do == "measure":
                result = measure(contenders[request["name"]], request["repeats"])
            else:
                contenders.clear()
                contenders.update(setups[do](mx, **request))
                result = list(contenders)
            answer = {"result": result}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
