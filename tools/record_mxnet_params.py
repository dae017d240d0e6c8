"""Saves LeNets by MXNet 1.9.1 with what they give, for tests/mxnet/test_mxnet_params.py.

It runs in an environment of its own, since MXNet's last release needs Python 3.8 and an old NumPy:

    python3.8 -m venv mxnet38
    mxnet38/bin/pip install -r benchmarks/requirements-mxnet.txt
    mxnet38/bin/python tools/record_mxnet_params.py tests/reference

The weights follow a pattern, so the files are small when compressed. `gluon` is `save_parameters` of a Gluon network.
`article` is `mx.nd.save` of the list of the article, whose dense layers multiply from the right. `dtypes` has an array
of each dtype that MXNet saves, `numpy` has arrays of `mx.np`, one of them without axes.
"""

import gzip
import json
import pathlib
import sys

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.gluon import nn

FOLDER = pathlib.Path(sys.argv[1])


def pattern(shape, seed):
    """Multiples of 1/1024 that are exact in every dtype, none of them symmetric."""
    size = int(np.prod(shape))
    return ((np.arange(size) * (seed * 2 + 3) + np.arange(size) ** 2 // 7) % 61 - 29).reshape(shape) / 1024


def compress(name):
    path = FOLDER / (name + ".params")
    (FOLDER / (name + ".params.gz")).write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
    path.unlink()


def gluon():
    net = nn.Sequential()
    net.add(nn.Conv2D(20, 3, activation="relu", in_channels=1), nn.AvgPool2D(2, 2))
    net.add(nn.Conv2D(50, 5, activation="relu", in_channels=20), nn.AvgPool2D(2, 2))
    net.add(nn.Dense(128, activation="relu", in_units=800), nn.Dense(10, in_units=128))
    net.initialize()
    for i, param in enumerate(net.collect_params().values()):
        param.set_data(nd.array(pattern(param.shape, i)))
    net.save_parameters(str(FOLDER / "lenet_gluon.params"))
    return net


def article(net):
    arrays = [p.data() for p in net.collect_params().values()]
    for i in (4, 6):
        arrays[i] = arrays[i].T
    nd.save(str(FOLDER / "lenet_article.params"), arrays)


net = gluon()
article(net)
dtypes = {
    t: nd.array(np.arange(6).reshape(2, 3), dtype=t)
    for t in ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
}
sparse = {"rows": nd.sparse.row_sparse_array((np.ones((1, 2)), [1]), shape=(3, 2))}
nd.save(str(FOLDER / "dtypes.params"), {**dtypes, "scalar": nd.array([7.0])})
nd.save(str(FOLDER / "sparse.params"), sparse)
images = pattern((3, 1, 28, 28), 5) * 16 + 0.5
logits = net(nd.array(images)).asnumpy()
(FOLDER / "mxnet_params.json").write_text(json.dumps({"version": mx.__version__, "logits": logits.tolist()}) + "\n")
mx.npx.set_np()
mx.npx.save(str(FOLDER / "numpy.params"), {"scalar": mx.np.array(7.0), "row": mx.np.arange(3)})
for name in ("lenet_gluon", "lenet_article", "dtypes", "sparse", "numpy"):
    compress(name)
