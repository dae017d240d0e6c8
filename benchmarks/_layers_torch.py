"""The layers of `layers.py` in PyTorch, eagerly and with channels last, on command in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _models_torch
import numpy as np
import torch
from _harness import serve
from _layers import BOTH, FORWARD, HEADS, LEARNING_RATE, LIMITS, NETWORKS, Part, Work, answers, numbers
from torch import nn
from torch.nn import functional

OF_IMAGES = ("batch norm", "batch norm, ReLU", "ReLU, max pool", "mean over pixels", "residual, ReLU")


def batch_norm(x, scale, bias):
    return functional.batch_norm(x, None, None, scale, bias, training=True)


def attention(qkv):
    heads = qkv.reshape(*qkv.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    y = functional.scaled_dot_product_attention(*heads, is_causal=True)
    return y.transpose(1, 2).reshape(*qkv.shape[:2], -1)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "call": lambda x: x + 1,
    "gemm": torch.matmul,
    "product": functional.linear,
    "batch norm": batch_norm,
    "batch norm, ReLU": lambda *args: functional.relu(batch_norm(*args)),
    "ReLU, max pool": lambda x: functional.max_pool2d(functional.relu(x), 2),
    "mean over pixels": lambda x: functional.adaptive_avg_pool2d(x, 1).flatten(1),
    "residual, ReLU": lambda x, y: functional.relu(x + y),
    "sum": torch.add,
    "ReLU": functional.relu,
    "GELU": lambda x: functional.gelu(x, approximate="tanh"),
    "layer norm": lambda x, scale, bias: functional.layer_norm(x, x.shape[-1:], scale, bias),
    "attention": attention,
    "embedding": lambda table, position, tokens: functional.embedding(tokens, table) + position,
    "cross-entropy": lambda logits, labels: functional.cross_entropy(logits.flatten(0, -2), labels.flatten()),
}


def start(network: str, index: int, direction: str) -> Callable[[], Any]:
    """A layer in one direction; the whole step where the index is -1."""
    if index < 0:
        convolutional = network in ("cnn", "resnet18")
        return _models_torch.contender(network, "eager, channels last" if convolutional else "eager")
    part = {**NETWORKS, "limits": LIMITS}[network][index]
    if part.kind == "SGD":
        return update(network)
    work, (arrays, cotangent) = part.work(), numbers(part)
    args = [_tensor(part, x, i) for i, x in enumerate(arrays)]
    cotangent = _tensor(part, cotangent, 0)
    if part.kind == "LSTM":
        return lstm(args, cotangent, direction)
    if part.kind == "convolution":
        return convolution(part, *args, cotangent, direction)
    return in_direction(FUNCTIONS[part.kind], work, args, cotangent, direction)


def _tensor(part: Part, array: np.ndarray, place: int) -> torch.Tensor:
    """Channels last where they are images or filters; outputs x inputs where it is a weight."""
    if array.dtype == np.int32:
        return torch.from_numpy(array).long()
    if part.kind == "convolution" and place == 1:
        return torch.from_numpy(array.transpose(3, 2, 0, 1).copy()).contiguous(memory_format=torch.channels_last)
    if part.kind in ("product", "LSTM") and array.ndim == 2 and place > 0:
        return torch.from_numpy(array.T.copy())
    if array.ndim == 4 and part.kind in ("convolution", *OF_IMAGES):
        return torch.from_numpy(array).permute(0, 3, 1, 2)
    return torch.from_numpy(array)


def in_direction(function, work: Work, args, cotangent, direction: str) -> Callable[[], Any]:
    """The way back alone is that of a graph that is kept; both ways build one each time."""
    trained = [args[i].requires_grad_() for i in work.with_gradient()]
    if direction == FORWARD:
        return lambda: [function(*args)]  # with the graph, as in a step
    if direction == BOTH:

        def both():
            result = function(*args)
            return [result.detach(), *torch.autograd.grad(result, trained, cotangent)]

        return both
    chosen, result = trained[:1] if direction == "inputs" else trained[1:], function(*args)
    return lambda: torch.autograd.grad(result, chosen, cotangent, retain_graph=True)


def convolution(part: Part, x, w, cotangent, direction: str) -> Callable[[], Any]:
    stride, padding = (*part.sizes[5:], 1)[0], part.sizes[4] // 2
    if direction == FORWARD:
        return lambda: [functional.conv2d(x, w, None, stride, padding)]
    mask = [direction == "inputs", direction == "weights", False]
    geometry = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1

    def backward():
        results = torch.ops.aten.convolution_backward(cotangent, x, w, None, *geometry, mask)
        return [y for y, is_wanted in zip(results, mask, strict=True) if is_wanted]

    return backward


def lstm(args, cotangent, direction: str) -> Callable[[], Any]:
    """With the two biases that PyTorch's has; the second one's gradient is computed and not given."""
    x, input_weight, state_weight, bias = args
    layer = nn.LSTM(x.shape[-1], state_weight.shape[-1], batch_first=True)
    values = input_weight, state_weight, bias, torch.zeros_like(bias)
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), values, strict=True):
            parameter.copy_(value)
    if direction == FORWARD:
        return lambda: [layer(x)[0][:, -1]]

    def both():
        result = layer(x)[0][:, -1]
        return [result.detach(), *torch.autograd.grad(result, list(layer.parameters()), cotangent)[:3]]

    return both


def update(network: str) -> Callable[[], Any]:
    """The weights of a network, from zero on, with gradients of ones."""
    model = _models_torch.NETWORKS[network]()[0]
    if network in ("cnn", "resnet18"):
        model = model.to(memory_format=torch.channels_last)
    weights = list(model.parameters())
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
            weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE)

    def once():
        optimizer.step()
        return weights

    return once


def norms(results: Any) -> list[float]:
    results = results if isinstance(results, (list, tuple)) else [results]
    return [float(np.linalg.norm(x.detach().double().numpy())) for x in results]


if __name__ == "__main__":
    serve(answers(torch.__version__, start, norms))
