"""How MXNet 1.9.1 trains, for tests/mxnet/test_mxnet_training.py and test_mxnet_operators.py.

It runs where tools/record_mxnet_symbols.py runs, and after it:

    mxnet38/bin/python tools/record_mxnet_training.py tests/reference

Weights and inputs follow that tool's `rule`. mxnet_training.npz has, for ten networks of Gluon's model zoo, the
gradients (norms and a few entries), the logits of six steps of SGD with momentum, and those of evaluation at the end;
for a ResNet-18 and a narrow one the losses of 20 more steps on 1 and on 4 devices; and the files of the narrow one as
MXNet saved it in the middle of its training. mxnet_float16.npz has what operators give in float16,
and mxnet_float64.npz the steps of five of the ten networks in float64.
"""

import gzip
import json
import pathlib
import pickle
import sys
import tempfile
import zlib

import mxnet as mx
import numpy as np
from mxnet import sym
from mxnet.gluon.model_zoo import vision
from mxnet_states import write_states
from record_mxnet_symbols import kind_of, rule

FOLDER = pathlib.Path(sys.argv[1])
CASES, ARRAYS = {}, {}
# name: (size of the images, examples, learning rate)
NETWORKS = {
    "alexnet": (64, 4, 1e-5),
    "densenet121": (224, 2, 1e-5),
    "inception_v3": (299, 2, 2e-7),
    "mobilenet0_25": (128, 8, 1e-6),
    "mobilenet_v2_0_25": (128, 8, 1e-6),
    "resnet18_v1": (64, 8, 1e-5),
    "resnet18_v2": (64, 8, 1e-5),
    "resnet50_v1": (64, 8, 5e-8),
    "squeezenet1_1": (224, 2, 1e-4),
    "vgg11_bn": (32, 8, 1e-5),
}
MORE_STEPS = 20
DIE = ("leaky rrelu",)  # cases that end the process in float16


def keep(name, what, value):
    ARRAYS[f"{name}/{what}"] = value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value)


def without_dropout(block):
    """Dropout draws from MXNet's own generator."""
    for child in block._children.values():
        without_dropout(child)
    if isinstance(block, mx.gluon.nn.Dropout):
        block._rate = 0


def with_loss(net):
    """Its predictions, whose gradient is that of the loss, and its logits."""
    without_dropout(net)
    logits = net(sym.var("data"))
    return sym.Group([sym.SoftmaxOutput(logits, name="softmax"), sym.BlockGrad(logits, name="logits")])


def describe(name, symbol, **shapes):
    """The arrays of a network by the rule: those that are trained, and the running statistics."""
    arguments, _, states = symbol.infer_shape(**shapes)
    args, aux = (
        {n: s for n, s in zip(names, found) if n not in ("data", "softmax_label")}  # noqa: B905, Python 3.8
        for names, found in ((symbol.list_arguments(), arguments), (symbol.list_auxiliary_states(), states))
    )
    CASES[name] = {
        "symbol": symbol.tojson(),
        "arrays": {n: [list(s), kind_of(n, s)] for n, s in {**args, **aux}.items()},
    }
    CASES[name]["aux"] = list(aux)
    return tuple(
        {n: mx.nd.array(rule(f"{name}/{n}", s, kind_of(n, s))) for n, s in part.items()} for part in (args, aux)
    )


def module_of(symbol, args, aux, data, rate, devices=1, momentum=None, dtype=np.float32, **options):
    """A Module that has these arrays, and the momentum of each name."""
    module = mx.mod.Module(symbol, context=[mx.cpu(i) for i in range(devices)])
    labels = mx.io.DataDesc("softmax_label", data[:1], dtype)
    module.bind([mx.io.DataDesc("data", data, dtype)], [labels])
    module.init_params(arg_params=args, aux_params=aux)
    options = {"learning_rate": rate, "momentum": 0.9, "wd": 1e-3, **options}
    module.init_optimizer(kvstore="device" if devices > 1 else None, optimizer="sgd", optimizer_params=options)
    if momentum:
        updater = module._kvstore._updater if devices > 1 else module._updater
        keys = {n: n if devices > 1 else i for i, n in enumerate(module._param_names)}
        updater.set_states(pickle.dumps({keys[n]: m for n, m in momentum.items()}))
    return module


def batch_of(name, step, data, patterns=False):
    """Noise, or for the runs that go on a pattern of each class and noise, so that there is something to learn."""
    images = rule(f"{name}/data{step}", data, "n")
    labels = rule(f"{name}/label{step}", data[:1], "i10")
    if patterns:
        images = rule("patterns", (10, *data[1:]), "n")[labels.astype(int)] + images / 2
    return mx.io.DataBatch([mx.nd.array(images)], [mx.nd.array(labels)]), labels.astype(int)


def step(module, batch):
    module.forward(batch, is_train=True)
    outputs = [out.asnumpy() for out in module.get_outputs()]
    module.backward()
    return outputs


def zoo():
    for name, (size, examples, rate) in NETWORKS.items():
        net = getattr(vision, name)(classes=10, prefix="net_")
        symbol, data = with_loss(net), (examples, 3, size, size)
        args, aux = describe(name, symbol, data=data)
        CASES[name].update(data=data, rate=rate)
        module = module_of(symbol, args, aux, data, rate)
        batch, _ = batch_of(name, 0, data)
        for number in range(6):
            keep(name, f"logits{number}", step(module, batch)[1])
            if number == 0:
                for n, found in module._exec_group.execs[0].grad_dict.items():
                    if found is None or n not in args:
                        continue
                    grad = found.asnumpy().reshape(-1)
                    at = np.random.RandomState(zlib.crc32(n.encode())).randint(0, grad.size, 16)
                    keep(name, "grad " + n, grad[at])
                    keep(name, "norm " + n, np.float32(np.linalg.norm(np.float64(grad))))
            if number < 5:
                module.update()
        module.forward(batch, is_train=False)
        keep(name, "eval", module.get_outputs()[1])
        print(name, [float(np.abs(ARRAYS[f"{name}/logits{i}"]).max()) for i in range(6)], flush=True)


def float64():
    """The same steps in float64, of the networks in which float32 rounds most. Gradients are rows of entries."""
    found = {}
    for name in ("mobilenet0_25", "mobilenet_v2_0_25", "resnet50_v1", "inception_v3", "vgg11_bn"):
        size, examples, rate = NETWORKS[name]
        data, net = (examples, 3, size, size), getattr(vision, name)(classes=10, prefix="net_")
        net.cast("float64")
        symbol = with_loss(net)
        args, aux = ({n: a.astype("float64") for n, a in part.items()} for part in describe(name, symbol, data=data))
        module = module_of(symbol, args, aux, data, rate, dtype=np.float64)
        batch, _ = batch_of(name, 0, data)
        batch = mx.io.DataBatch([a.astype("float64") for a in batch.data], [a.astype("float64") for a in batch.label])
        logits, rows = [], []
        for number in range(6):
            logits.append(step(module, batch)[1])
            for n in sorted(args) if number == 0 else ():
                grad = module._exec_group.execs[0].grad_dict[n].asnumpy().reshape(-1)
                rows.append(grad[np.random.RandomState(zlib.crc32(n.encode())).randint(0, grad.size, 16)])
            if number < 5:
                module.update()
        module.forward(batch, is_train=False)
        found[f"{name}/grads"], found[f"{name}/logits"] = np.array(rows), np.array(logits)
        found[f"{name}/eval"] = module.get_outputs()[1].asnumpy()
        print("float64", name, found[f"{name}/eval"].dtype, flush=True)
    np.savez_compressed(str(FOLDER / "mxnet_float64.npz"), **found)


def losses(name, module, data, first):
    found = []
    for number in range(first, first + MORE_STEPS):
        batch, labels = batch_of(name, number, data, patterns=True)
        found.append(-np.log(step(module, batch)[0][np.arange(len(labels)), labels]).mean())
        module.update()
    print(name, np.round(found, 4), flush=True)
    return np.float32(found)


def goes_on(name, symbol, args, aux, momentum, data, rate, first):
    CASES[name].update(data=data, rate=rate, first=first)
    for devices in (1, 4):
        module = module_of(symbol, args, aux, data, rate, devices, momentum)
        keep(name, f"losses{devices}", losses(name, module, data, first))


def whole():
    name, data = "resnet18 goes on", (16, 3, 64, 64)
    symbol = with_loss(vision.resnet18_v1(classes=10, prefix="net_"))
    args, aux = describe(name, symbol, data=data)
    momentum = {n: mx.nd.array(rule(f"{name}/momentum/{n}", a.shape, "n") * 1e-4) for n, a in args.items()}
    goes_on(name, symbol, args, aux, momentum, data, 5e-5, 0)


def narrow():
    name, data, rate = "narrow", (32, 3, 64, 64), 1e-4
    net = vision.ResNetV1(vision.BasicBlockV1, [2, 2, 2, 2], [8, 8, 12, 16, 32], classes=10, prefix="net_")
    symbol = with_loss(net)
    args, aux = describe(name, symbol, data=data)
    args.update({n: mx.nd.ones(a.shape) for n, a in args.items() if n.endswith("gamma")})
    module = module_of(symbol, args, aux, data, rate)
    for number in range(10):
        step(module, batch_of(name, number, data, patterns=True)[0])
        module.update()
    with tempfile.TemporaryDirectory() as folder:
        prefix = folder + "/narrow"
        module.save_checkpoint(prefix, 10, save_optimizer_states=True)
        write_states(prefix, 10)
        for path in sorted(pathlib.Path(folder).iterdir()):
            if path.suffix != ".states":
                keep(name, "file " + path.name, np.frombuffer(path.read_bytes(), np.uint8))
        symbol, args, aux = mx.model.load_checkpoint(prefix, 10)
        momentum = mx.nd.load(prefix + "-0010-momentum.params")
    goes_on(name, symbol, args, aux, momentum, data, rate, 10)


def multipliers():
    """A network whose variables have factors of rate and decay of their own."""
    name, data = "multipliers", (8, 6)
    with mx.AttrScope(lr_mult="0.5", __wd_mult__="3"):
        x = sym.FullyConnected(sym.var("data"), num_hidden=5, name="fc1")
    x = sym.BatchNorm(sym.Activation(x, act_type="tanh"), fix_gamma=False, name="bn")
    x = sym.FullyConnected(x, sym.var("shared", lr_mult=2, wd_mult=0.25), num_hidden=5, name="fc2")
    x = sym.FullyConnected(x, num_hidden=5, name="fc3", attr={"__lr_mult__": "0"})
    x = sym.FullyConnected(x, sym.var("own_weight"), sym.var("own_bias", wd_mult=1), num_hidden=10, name="fc4")
    symbol = sym.SoftmaxOutput(x, name="softmax")
    args, aux = describe(name, symbol, data=data)
    module = module_of(symbol, args, aux, data, 0.1, wd=0.1)
    for number in range(5):
        step(module, batch_of(name, number, data)[0])
        module.update()
    CASES[name].update(data=data, rate=0.1, lr_mult=module._optimizer.lr_mult, wd_mult=module._optimizer.wd_mult)
    for n, value in {**module.get_params()[0], **module.get_params()[1]}.items():
        keep(name, n, value)


def float16():
    """What operators give in float16, and their gradients. MXNet cannot compute all of them."""
    cases = json.loads(gzip.decompress((FOLDER / "mxnet_symbols.json.gz").read_bytes()))["cases"]
    found, refused = {}, []
    for name, case in cases.items():
        if name.startswith("zoo") or len(case["arrays"]) > 8:
            continue
        if name in DIE:
            refused.append(name)
            continue
        print("float16", name, flush=True)
        symbol = sym.load_json(case["symbol"])
        try:
            types, _, states = symbol.infer_type(**dict.fromkeys(case["inputs"], np.float16))
            everything = symbol.list_arguments() + symbol.list_auxiliary_states()
            of = dict(zip(everything, types + states))  # noqa: B905
            made = {
                n: mx.nd.array(rule(f"{name}/{n}", tuple(s), k), dtype=of[n]) for n, (s, k) in case["arrays"].items()
            }
            names = symbol.list_arguments()
            wanted = {n: "null" if case["arrays"][n][1][0] == "i" else "write" for n in names}
            grads = {n: mx.nd.zeros(made[n].shape, dtype=of[n]) for n in names if wanted[n] == "write"}
            aux = {n: made[n] for n in case["aux"]}
            executor = symbol.bind(mx.cpu(), {n: made[n] for n in names}, grads, wanted, aux)
            outs = executor.forward(is_train=True)
            own = {f"out{i}": out.asnumpy() for i, out in enumerate(outs)}
            executor.backward(
                [mx.nd.array(rule(f"{name}/head{i}", o.shape, "n"), dtype=o.dtype) for i, o in enumerate(outs)]
            )
            own.update({"grad " + n: g.asnumpy() for n, g in grads.items()})
        except (mx.base.MXNetError, TypeError) as error:
            refused.append(name)
            print("no", name, str(error).strip().splitlines()[-1][:160], flush=True)
            continue
        found.update({f"{name}/{what}": value for what, value in own.items()})
    found["refused"] = np.array(refused)
    np.savez_compressed(str(FOLDER / "mxnet_float16.npz"), **found)


def main():
    multipliers()
    narrow()
    whole()
    zoo()
    content = json.dumps({"version": mx.__version__, "cases": CASES}, sort_keys=True).encode()
    (FOLDER / "mxnet_training.json.gz").write_bytes(gzip.compress(content, 9, mtime=0))
    np.savez_compressed(str(FOLDER / "mxnet_training.npz"), **ARRAYS)
    float16()
    float64()


if __name__ == "__main__":
    main()
