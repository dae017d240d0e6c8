"""The layers of `convolutions.py`: convolutions as they stand in networks, with batches of a few milliseconds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


class Layer(NamedTuple):
    """One convolution.

    Attributes:
        images: N, spatial sizes, C.
        window: spatial sizes.
        features: O.
        stride, dilation: along every spatial axis. Of a transposed convolution the stride is that of the images.
        groups: of the channels.
        padding: as lax takes it.
        is_transposed: whether it enlarges images by its stride.
        dtype: of images and filter.
        is_channels_first: whether the images are N, C, spatial sizes.
    """

    images: tuple[int, ...]
    window: tuple[int, ...]
    features: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    padding: str = "SAME"
    is_transposed: bool = False
    dtype: str = "float32"
    is_channels_first: bool = False

    def __str__(self) -> str:
        batch, *sides, channels = self.images
        words = [f"{batch} x {'·'.join(map(str, sides))}", f"{channels} → {self.features}"]
        words.append("·".join(map(str, self.window)))
        if self.stride != 1:
            words.append(f"stride {self.stride}")
        if self.dilation != 1:
            words.append(f"dilation {self.dilation}")
        if self.groups != 1:
            words.append(f"{self.groups} groups")
        words += ["transposed"] * self.is_transposed + [self.padding.lower()] * (self.padding != "SAME")
        words += ["channels first"] * self.is_channels_first + [self.dtype] * (self.dtype != "float32")
        return ", ".join(words)

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of images and filter."""
        batch, *sides, channels = self.images
        images = (batch, channels, *sides) if self.is_channels_first else self.images
        return images, (*self.window, channels // self.groups, self.features)

    def options(self) -> dict[str, Any]:
        """The arguments of lax's convolution but the operands."""
        axes = SPATIAL[len(self.window)]
        layout = f"NC{axes}" if self.is_channels_first else f"N{axes}C"
        options: dict[str, Any] = {
            "window_strides": (1,) * len(self.window) if self.is_transposed else (self.stride,) * len(self.window),
            "padding": self.padding,
            "rhs_dilation": (self.dilation,) * len(self.window),
            "dimension_numbers": (layout, f"{axes}IO", layout),
            "feature_group_count": self.groups,
        }
        if self.is_transposed:
            options["lhs_dilation"] = (self.stride,) * len(self.window)
            options["padding"] = [_transposed_padding(size, self.stride) for size in self.window]
        return options

    def flops(self, result: tuple[int, ...]) -> int:
        """Of the sums, zeros of the padding counted, in each of the three directions. `result` is a shape."""
        of_images = self.images if self.is_transposed else result
        sides = of_images[2:] if self.is_channels_first and not self.is_transposed else of_images[1:-1]
        places = self.images[0] * math.prod(sides)
        return 2 * places * math.prod(self.window) * self.images[-1] // self.groups * self.features


def _transposed_padding(size: int, stride: int) -> tuple[int, int]:
    """That of `lax.conv_transpose` for "SAME"."""
    total = size + stride - 2
    before = size - 1 if stride > size - 1 else math.ceil(total / 2)
    return before, total - before


def _squares(batch: int, *rows: tuple[int, ...], **options: Any) -> Iterator[Layer]:
    """Layers of square images and windows: side, C, O, window, and a stride."""
    for side, channels, features, window, *stride in rows:
        yield Layer((batch, side, side, channels), (window, window), features, *stride, **options)


def _lines(batch: int, *rows: tuple[int, ...], **options: Any) -> Iterator[Layer]:
    """1-D: length, C, O, window, dilation."""
    for length, channels, features, window, dilation in rows:
        yield Layer((batch, length, channels), (window,), features, 1, dilation, **options)


_RESNET18 = ((56, 64, 64, 3), (56, 64, 128, 3, 2), (28, 128, 128, 3), (14, 256, 256, 3), (7, 512, 512, 3))
_SMALL_RESNET18 = ((32, 64, 64, 3), (32, 64, 128, 3, 2), (16, 128, 128, 3), (16, 128, 256, 3, 2), (8, 256, 256, 3),
                   (8, 256, 512, 3, 2), (4, 512, 512, 3), (32, 64, 128, 1, 2), (8, 256, 512, 1, 2))  # fmt: skip

NETWORKS: dict[str, tuple[Layer, ...]] = {
    "lenet": (*_squares(64, (28, 1, 20, 5), (12, 20, 50, 5), padding="VALID"), *_squares(8, (12, 20, 50, 5))),
    "cnn": (
        *_squares(128, (32, 3, 32, 3), (16, 32, 64, 3), (8, 64, 128, 3)),
        *_squares(128, (28, 1, 32, 3), (14, 32, 64, 3), (7, 64, 64, 3)),
        *_squares(8, (32, 3, 32, 3), (16, 32, 64, 3)),
    ),
    "resnet18 of 32": tuple(_squares(32, *_SMALL_RESNET18)),
    "resnet18": (*_squares(2, (224, 3, 64, 7, 2), *_RESNET18), *_squares(1, *_RESNET18[2:4])),
    "resnet50": tuple(
        _squares(
            4,
            (56, 64, 256, 1),
            (56, 256, 64, 1),
            (28, 512, 128, 1),
            (28, 256, 512, 1, 2),
            (14, 1024, 256, 1),
            (7, 512, 2048, 1),
            (28, 128, 128, 3, 2),
        )
    ),
    "vgg": (*_squares(1, (112, 64, 128, 3), (56, 256, 256, 3), (14, 512, 512, 3)), *_squares(32, (4, 256, 256, 3))),
    "alexnet": tuple(_squares(4, (224, 3, 64, 11, 4), (27, 64, 192, 5), (13, 192, 384, 3))),
    "mobilenet": (
        *_squares(4, (56, 128, 128, 3), (28, 128, 128, 3, 2), groups=128),
        *_squares(8, (14, 384, 384, 3), groups=384),
        *_squares(4, (112, 32, 64, 1), (28, 32, 192, 1), (14, 384, 64, 1), (7, 320, 1280, 1)),
    ),
    "grouped": (*_squares(4, (28, 128, 128, 3), (14, 256, 256, 3), groups=32), *_squares(4, (28, 96, 96, 3), groups=3)),
    "u-net": (
        *_squares(1, (128, 64, 64, 3), (64, 128, 128, 3)),
        *_squares(1, (64, 128, 64, 2, 2), (32, 256, 128, 2, 2), is_transposed=True),
        *_squares(16, (7, 64, 32, 4, 2), (8, 128, 64, 4, 2), is_transposed=True),
    ),
    "wavenet": (
        *_lines(4, (4000, 64, 128, 2, 1), (4000, 64, 128, 2, 64), padding="VALID"),
        *_lines(16, (256, 64, 64, 3, 1), (256, 64, 64, 3, 4), (128, 256, 256, 5, 1), (1000, 1, 32, 9, 1)),
    ),
    "3-D": (
        Layer((1, 16, 56, 56, 3), (3, 7, 7), 32, 2),
        Layer((2, 16, 16, 16, 32), (3, 3, 3), 32),
        Layer((4, 8, 8, 8, 64), (3, 3, 3), 64),
    ),
    "convnext": (*_squares(4, (28, 96, 96, 7), groups=96), *_squares(4, (56, 3, 96, 4, 4), (28, 96, 192, 2, 2))),
    "patches": tuple(_squares(8, (224, 3, 192, 16, 16), (32, 3, 256, 4, 4), (28, 1, 64, 7, 7), padding="VALID")),
    "channels first": tuple(_squares(16, (16, 32, 64, 3), (8, 128, 128, 3), (32, 3, 32, 3), is_channels_first=True)),
    "half": (
        *_squares(8, (16, 64, 64, 3), (32, 3, 32, 3), dtype="bfloat16"),
        *_squares(8, (16, 64, 64, 3), dtype="float16"),
    ),
}
