"""The networks of `models.py` in PyTorch, measured on command in a process of its own.

Each is tried eagerly and compiled, and convolutional ones with channels last too. Batch norm uses the statistics of the
batch and keeps none, as the JAX side does. The first argument names the device, "cpu" by default.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from _harness import serve
from _shapes import MATRIX
from torch import nn
from torch.nn import functional

LEARNING_RATE = 0.01
DEVICE = torch.device(sys.argv[1] if sys.argv[1:] else "cpu")


def images(count):
    return torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,))


def cnn():
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 4 * 128, 10)), *images(128)


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1, self.norm1 = convolution(before, after, 3, stride)
        self.conv2, self.norm2 = convolution(after, after, 3, 1)
        self.shortcut = nn.Sequential(*convolution(before, after, 1, stride)) if stride != 1 else nn.Identity()

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def convolution(before, after, size, stride):
    conv = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return conv, nn.BatchNorm2d(after, track_running_stats=False)


def resnet18():
    widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2))
    blocks = [Block(*width) for width in (*widths, (512, 512, 1))]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    return nn.Sequential(*convolution(3, 64, 3, 1), nn.ReLU(), *blocks, *ends), *images(32)


def mlp():
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return net, torch.randn(256, 784), torch.randint(0, 10, (256,))


WIDTH, HEADS, TOKENS, VOCABULARY = 256, 8, 64, 1000


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.layers(self.embedding(tokens) + self.position.weight)
        return self.logits(self.norm(x)).flatten(0, 1)


def transformer():
    tokens = torch.randint(0, VOCABULARY, (16, TOKENS + 1))
    return Transformer(), tokens[:, :-1].contiguous(), tokens[:, 1:].flatten().contiguous()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.dense = nn.LSTM(128, 256, batch_first=True), nn.Linear(256, 10)

    def forward(self, x):
        return self.dense(self.lstm(x)[0][:, -1])


def lstm():
    return Recurrent(), torch.randn(32, 64, 128), torch.randint(0, 10, (32,))


class Matrix(nn.Module):
    def __init__(self, users, items, width, sparse):
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=sparse)
        self.item = nn.Embedding(items, width, sparse=sparse)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, ids):
        return (self.user(ids[0]) * self.item(ids[1])).sum(-1)


def matrix(network, sparse):
    users, items, width, size = MATRIX[network]
    ids = torch.stack([torch.randint(0, users, (size,)), torch.randint(0, items, (size,))])
    return Matrix(users, items, width, sparse), ids, torch.randint(1, 6, (size,)).float()


contenders: dict[str, Any] = {}
NETWORKS = {"cnn": cnn, "resnet18": resnet18, "transformer": transformer, "mlp": mlp, "lstm": lstm}


def contender(network, how):
    model, x, labels = matrix(network, "sparse" in how) if network in MATRIX else NETWORKS[network]()
    model, x, labels = model.to(DEVICE), x.to(DEVICE), labels.to(DEVICE)
    if "channels last" in how:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def loss(x, labels):
        return (
            0.5 * functional.mse_loss(model(x), labels)
            if network in MATRIX
            else functional.cross_entropy(model(x), labels)
        )

    loss = torch.compile(loss) if "compiled" in how else loss

    def once():
        optimizer.zero_grad(set_to_none=True)
        value = loss(x, labels)
        value.backward()
        optimizer.step()
        return value

    return once


def answer(request):
    """Set a contender up, measure it, or say a version."""
    match request["do"]:
        case "version":
            return torch.__version__
        case "start":
            torch.manual_seed(0)
            contenders[request["name"]] = contender(request["network"], request["contender"])
            return [contenders[request["name"]]().item() for _ in range(3)]
        case "measure":
            once, start = contenders[request["name"]], time.perf_counter()
            for _ in range(request["repeats"]):
                once()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - start) / request["repeats"]
        case other:
            raise ValueError(f"no request {other!r}")


if __name__ == "__main__":
    if DEVICE.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as JAX's default on GPUs
    serve(answer)
