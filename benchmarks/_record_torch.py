"""The recipe `fast` in PyTorch: `_record_torch.py FOLDER EPOCHS SEED`, where the folder has the arrays of `record.py`.

The same network, first weights, Muon, rates and label smoothing as `jaxpar train --recipe fast`. It runs eagerly,
channels last.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

BATCH, PEAK, ADAM_SHARE, WARM, MOMENTUM, SMOOTHING = 128, 0.04, 0.06, 0.1, 0.8, 0.1


def network() -> nn.Module:
    layers: list[nn.Module] = [nn.ConstantPad2d(1, -1.0), nn.Conv2d(1, 32, 4, 2), nn.ReLU()]
    layers += [nn.Conv2d(32, 64, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 32), nn.ReLU(), nn.Linear(32, 10)]
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    layers[1].weight.data.copy_(cosines())  # pyright: ignore
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def cosines() -> torch.Tensor:
    """The cosine transform's 16 patterns times their frequency, with both signs."""
    n = torch.arange(4.0)
    basis = torch.cos(torch.pi * (2 * n + 1) * n[:, None] / 8) * torch.where(n[:, None] > 0, 2, 1).div(4).sqrt()
    frequency = torch.hypot(n[:, None], n).clamp(min=0.5)
    weight = torch.einsum("uv,uh,vw->uvhw", frequency, basis, basis).reshape(16, 1, 4, 4)
    return torch.cat([weight, -weight])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Two iterations of Newton and Schulz."""
    x = matrix / (matrix.norm() + 1e-8)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(2):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


class Muon:
    def __init__(self, params: list[torch.Tensor]):
        self.params, self.momenta = params, [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for param, momentum in zip(self.params, self.momenta, strict=True):
            assert param.grad is not None
            momentum.lerp_(param.grad, 1 - MOMENTUM)
            ahead = param.grad.lerp(momentum, MOMENTUM).flatten(1)
            factor = max(1, ahead.shape[0] / ahead.shape[1]) ** 0.5
            param.sub_((rate * factor * orthogonal(ahead)).view_as(param))


def rate_of(step: int, steps: int) -> float:
    warm = max(1, round(WARM * steps))
    return (step + 1) / warm if step < warm else 1 - (step - warm + 1) / (steps - warm + 1)


def load(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(np.load(folder / f"{split}_images.npy")).permute(0, 3, 1, 2)
    return images, torch.from_numpy(np.load(folder / f"{split}_labels.npy")).long()


def pixels(images: torch.Tensor) -> torch.Tensor:
    return (images.float().div_(255) - 0.25) * 4


def main() -> None:
    folder, epochs, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(seed)
    images, labels = load(folder, "train")
    model = network()
    muon = Muon([p for p in model.parameters() if p.ndim > 1])
    adam = torch.optim.NAdam([p for p in model.parameters() if p.ndim == 1], betas=(0.9, 0.99))
    per_epoch = len(images) // BATCH
    for epoch in range(epochs):
        for number, rows in enumerate(torch.randperm(len(images))[: per_epoch * BATCH].split(BATCH)):
            rate = PEAK * rate_of(epoch * per_epoch + number, epochs * per_epoch)
            functional.cross_entropy(model(pixels(images[rows])), labels[rows], label_smoothing=SMOOTHING).backward()
            muon.step(rate)
            adam.param_groups[0]["lr"] = ADAM_SHARE * rate
            adam.step()
            model.zero_grad(set_to_none=True)
    test_images, test_labels = load(folder, "test")
    with torch.inference_mode():
        right = sum(
            int((model(pixels(x)).argmax(1) == y).sum())
            for x, y in zip(test_images.split(1000), test_labels.split(1000), strict=True)
        )
    print(f"test accuracy {right / len(test_labels):.4f}")


if __name__ == "__main__":
    main()
