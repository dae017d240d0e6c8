"""The shapes of the parameters of real networks, for the benchmarks."""

from __future__ import annotations

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """ResNet-50 of He et al. (2015), version 1: 161 values, 25,557,032 parameters."""
    shapes: list[Shape] = []

    def conv(size: int, given: int, made: int) -> None:
        shapes.extend([(size, size, given, made), (made,), (made,)])  # the filter, then scale and shift

    conv(7, 3, 64)
    given = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            conv(1, given, width)
            conv(3, width, width)
            conv(1, width, 4 * width)
            if block == 0:
                conv(1, given, 4 * width)
            given = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def gpt2_small() -> list[Shape]:
    """The transformer of 12 layers of Radford et al. (2019): 148 values, 124,439,808 parameters."""
    width, words, positions = 768, 50257, 1024
    layer: list[Shape] = [
        (width,),
        (width,),
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        (width,),
        (width,),
        (width, 4 * width),
        (4 * width,),
        (4 * width, width),
        (width,),
    ]
    return [(words, width), (positions, width), *(12 * layer), (width,), (width,)]


# Users, items, width, batch: MXNet's article on recommenders (MovieLens 100k), and its sparse example (10M).
MATRIX = {"matrix": (944, 1683, 64, 64), "matrix large": (71568, 65134, 128, 128)}
