"""What a data-parallel step costs on many devices: latency, bandwidth, nodes and a network between them.

The times of the collectives are the textbook's (Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009 for the
ring; Sanders, Speck and Träff 2009 for the two trees): a message of S bytes takes latency + S / bandwidth. Seconds
and bytes throughout. Not in the model: other traffic on the network, slow devices that all others wait for, failures,
the loading of data, and what compression costs to compute.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxpar import compression
from jaxpar._devices import collectives
from jaxpar.compression import Int8

Shape = tuple[int, ...]
FLOAT32 = 4
SMALL = 64 << 10  # jaxpar._devices.collectives gathers smaller buckets of kind `local` whole


@dataclasses.dataclass(frozen=True)
class Link:
    """One device's connection.

    Attributes:
        latency: seconds a message takes however small it is.
        bandwidth: bytes per second that one device can send, while it receives as many.
    """

    latency: float
    bandwidth: float

    def __post_init__(self):
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(f"a link has a latency >= 0 and a bandwidth > 0, got {self.latency}, {self.bandwidth}")

    def send(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of several devices each, every device with a network card of its own.

    Attributes:
        name: for the tables.
        flops: a device's peak, floating-point operations per second.
        memory_bandwidth: bytes per second between a device and its own memory.
        node: devices in a node.
        inside, between: the links of a device within its node, and to other nodes.
        combine: bytes up to which the compiler merges collectives of one sort; all-to-all is never merged.
        sources: where the figures come from, and which of them are assumptions.
    """

    name: str
    flops: float
    memory_bandwidth: float
    node: int
    inside: Link
    between: Link
    combine: float = 0
    sources: tuple[str, ...] = ()


H100 = Cluster(
    name="H100 nodes",
    flops=989e12,
    memory_bandwidth=3.35e12,
    node=8,
    inside=Link(3.4e-6, 0.8 * 450e9),
    between=Link(9.6e-6, 0.9 * 50e9),
    combine=30 << 20,
    sources=(
        "NVIDIA H100 SXM data sheet: 989 TFLOP/s bfloat16 without sparsity, 3.35 TB/s of memory, NVLink 900 GB/s both "
        "directions together, so 450 GB/s each",
        "NVIDIA DGX H100 user guide: 8 GPUs and 8 ConnectX-7 ports for them, 400 Gb/s InfiniBand = 50 GB/s per GPU",
        "latencies: NCCL's own tuning table (src/graph/tuning.cc, ring, protocol Simple): 3.4 us over NVLink, 9.6 us "
        "over the network",
        "XLA merges all-reduces, all-gathers and reduce-scatters on GPUs up to 30 MiB (its default thresholds)",
        "assumption: 80 % of NVLink's and 90 % of the network's bandwidth are reached",
    ),
)


@dataclasses.dataclass(frozen=True)
class Work:
    """A network and how it is trained.

    Attributes:
        shapes: of the parameters; gradients and parameters travel as float32, as jaxpar's store keeps them.
        flops: of forward and backward, an example.
        examples: on each device.
        utilization: the share of the device's peak that the computation reaches.
        update_bytes: what the updater reads and writes in memory, a parameter.
        sources: where the figures come from, and which of them are assumptions.
    """

    name: str
    shapes: tuple[Shape, ...]
    flops: float
    examples: float
    utilization: float
    update_bytes: float = 20  # SGD with momentum: gradient, value and momentum read, value and momentum written
    sources: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes))


def transformer(width: int, layers: int, words: int, positions: int) -> tuple[Shape, ...]:
    """The parameters of a transformer as GPT-2's, output and input embedding shared."""
    vector, norm = (width,), [(width,), (width,)]
    attention = [*norm, (width, 3 * width), (3 * width,), (width, width), vector]
    mlp = [*norm, (width, 4 * width), (4 * width,), (4 * width, width), vector]
    return ((words, width), (positions, width), *(layers * (attention + mlp)), *norm)


def resnet50() -> Work:
    from _shapes import resnet50

    return Work(
        "ResNet-50",
        tuple(resnet50()),
        flops=3 * 2 * 4.09e9,
        examples=128,
        utilization=0.10,
        sources=(
            "4.09e9 multiply-adds forward for 224 x 224 (torchvision's model table); backward counted as twice that",
            "assumption: 10 % of the peak, 4,030 images/s a device. MLPerf Training 3.0 (8 H100 in 13.466 minutes, "
            "some 35 to 40 epochs) comes to 17 to 20 %, by code written for it alone",
        ),
    )


def one_billion() -> Work:
    shapes = transformer(2048, 18, 50257, 2048)
    parameters = sum(map(math.prod, shapes))
    return Work(
        "1-billion transformer",
        shapes,
        flops=6 * parameters * 2048,
        examples=8,
        utilization=0.40,
        sources=(
            "18 layers of width 2,048, 50,257 words, sequences of 2,048 tokens; 6 operations a parameter and token "
            "(Kaplan et al. 2020), attention's own not counted",
            "assumption: 40 % of the peak; Dubey et al. (2024) report 38 to 43 % for Llama 3 on up to 16,384 H100",
        ),
    )


# Collectives over n equal links.


def ring_all_reduce(nbytes: float, n: int, link: Link) -> float:
    """2(n-1) messages of 1/n each."""
    return 2 * (n - 1) * link.send(nbytes / n)


def ring_gather(nbytes: float, n: int, link: Link) -> float:
    """All-gather that makes `nbytes`, or reduce-scatter that is given them: n-1 messages of 1/n each."""
    return (n - 1) * link.send(nbytes / n)


def halving_gather(nbytes: float, n: int, link: Link) -> float:
    """The same by recursive doubling: log2(n) messages, as many bytes."""
    return math.ceil(math.log2(n)) * link.latency + (n - 1) / n * nbytes / link.bandwidth


def tree_all_reduce(nbytes: float, n: int, link: Link, chunk: float = 256 << 10) -> float:
    """Up and down two binary trees at once, in chunks: the depth of the trees, then the flow of all bytes."""
    if n == 1:
        return 0.0
    return 2 * math.ceil(math.log2(n)) * link.send(min(chunk, nbytes)) + 2 * nbytes / link.bandwidth


def all_to_all(nbytes: float, n: int, link: Link) -> float:
    """Pair by pair: n-1 messages of 1/n each."""
    return (n - 1) * link.send(nbytes / n)


# Collectives on a cluster.


def _parts(cluster: Cluster, n: int) -> tuple[int, int]:
    """Devices that take part in a node, and nodes."""
    if n > cluster.node and n % cluster.node:
        raise ValueError(f"{n} devices do not fill nodes of {cluster.node}")
    return min(n, cluster.node), max(1, n // cluster.node)


def all_reduce_times(nbytes: float, n: int, cluster: Cluster) -> dict[str, float]:
    """Seconds by each algorithm.

    `ring` goes through all devices, `node` rings side by side so that every network card works; `hierarchical` sums
    within the nodes (each device a share), then between them by a ring or by trees, then hands out within them.
    """
    devices, nodes = _parts(cluster, n)
    inside, between = cluster.inside, cluster.between
    hops = 2 * (n - nodes) * inside.latency + 2 * (nodes - 1) * between.latency
    if nodes == 1:
        return {"ring": ring_all_reduce(nbytes, n, inside), "tree": tree_all_reduce(nbytes, n, inside)}
    flow = 2 * (n - 1) / n * nbytes
    shares = 2 * ring_gather(nbytes, devices, inside)
    return {
        "ring": hops + max(flow / inside.bandwidth, flow / (devices * between.bandwidth)),
        "hierarchical ring": shares + ring_all_reduce(nbytes / devices, nodes, between),
        "hierarchical tree": shares + tree_all_reduce(nbytes / devices, nodes, between),
    }


def gather_time(nbytes: float, n: int, cluster: Cluster) -> float:
    """All-gather that makes `nbytes`, or reduce-scatter: between the nodes by ring or doubling, then within."""
    devices, nodes = _parts(cluster, n)
    within = ring_gather(nbytes, devices, cluster.inside)
    apart = nbytes / devices
    return within + min(ring_gather(apart, nodes, cluster.between), halving_gather(apart, nodes, cluster.between))


def all_to_all_time(nbytes: float, n: int, cluster: Cluster) -> float:
    """Each device sends 1/n of its bytes to every other one; node and network work side by side."""
    devices, _ = _parts(cluster, n)
    near = (devices - 1) * cluster.inside.send(nbytes / n)
    return max(near, (n - devices) * cluster.between.send(nbytes / n))


# What jaxpar sends.


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One collective of the step.

    Attributes:
        op: as in `_hlo.Collective`, and `nbytes` as there.
        gradient: of the gradients, so that it may run beside the backward pass; False: the gather of the parameters
            of a sharded store, which comes before the forward pass.
    """

    op: str
    nbytes: float
    gradient: bool = True


def exchanges(
    shapes: Sequence[Shape], kind: str, n: int, compressor: str = "none", limits: collectives.BucketLimits | None = None
) -> list[Exchange]:
    """The collectives of one step of `jaxpar.train.make_train_step`, apart from those of the metrics.

    Args:
        shapes: of float32 parameters.
        kind: `local`, `device` or `sharded`.
        n: devices.
        compressor: for kind `device`, `none` or a type of `jaxpar.compression` apart from `powersgd`.
        limits: the store's; None are the defaults.

    Raises:
        ValueError: another kind or compressor.
    """
    limits = collectives.BucketLimits() if limits is None else limits
    if kind == "sharded" and compressor == "none":
        padded = [(n, -(-math.prod(s) // n)) for s in shapes]
        rows = [FLOAT32 * sum(math.prod(padded[i]) for i in g) for g in _groups(padded, limits)]
        return [*(Exchange("all-gather", b, False) for b in rows), *(Exchange("reduce-scatter", b) for b in rows)]
    sizes = [sum(math.prod(shapes[i]) for i in g) for g in _groups(shapes, limits)]
    if kind == "device" and compressor == "none":
        return [Exchange("all-reduce", FLOAT32 * s) for s in sizes]
    if kind == "device":
        plain, coded = _compressed(tuple(shapes), compressor, n, limits)
        return [*exchanges(plain, kind, n, limits=limits), *coded]
    if kind == "local" and compressor == "none":
        return [e for s in sizes for e in _star(s, n)]
    raise ValueError(f"the model does not know kind {kind!r} with compression {compressor!r}")


def sent_bytes(exchange: Exchange, n: int) -> float:
    """Bytes that each device sends for a collective by the ring."""
    return (2 if exchange.op == "all-reduce" else 1) * (n - 1) / n * exchange.nbytes


def _star(size: int, n: int) -> list[Exchange]:
    if FLOAT32 * size < SMALL:
        return [Exchange("all-gather", FLOAT32 * size * n)]
    padded = FLOAT32 * n * -(-size // n)
    return [Exchange("all-to-all", padded), Exchange("all-gather", padded)]


@functools.lru_cache
def _compressed(
    shapes: tuple[Shape, ...], name: str, n: int, limits: collectives.BucketLimits
) -> tuple[list[Shape], list[Exchange]]:
    """The values that are sent plain, and the collectives of the others."""
    made = compression.make({"type": name})
    if made is None or isinstance(made, compression.LinearCompressor):
        raise ValueError(f"the model does not know compression {name!r}")
    pay = [s for s in shapes if made.pays(s, "float32")]
    coded = _two_way(pay, n, limits) if made.two_way else _words(made, pay, n, limits) if made.elementwise else None
    return [s for s in shapes if s not in pay], _one_by_one(made, pay, n) if coded is None else coded


def _words(
    made: compression.Compressor, shapes: list[Shape], n: int, limits: collectives.BucketLimits
) -> list[Exchange]:
    """Codes in words that are cut anywhere: all gathered, or to the owners and back, or summed as integers."""
    sizes = [sum(math.prod(shapes[i]) for i in g) for g in _groups(shapes, limits)]
    item, grid = (2, None) if made.per_word == 1 else (4, made.grid(n))
    words = [((-(-size // made.per_word),), f"uint{8 * item}") for size in sizes]
    found: list[Exchange] = []
    for group in collectives.plan([jax.ShapeDtypeStruct(*word) for word in words], limits):
        count = sum(words[i][0][0] for i in group)
        size, unit = count * made.per_word, made.per_word if grid is None else 32
        chunk, bits = unit * -(-size // (unit * n)), 32 if grid is None else grid.bits
        ways = [
            [Exchange("all-gather", n * count * item)],
            [Exchange("all-to-all", n * chunk // made.per_word * item), Exchange("all-gather", n * chunk * bits / 8)],
            _owned(size, n),
        ]
        if grid is not None and grid.is_exact:
            ways.append([Exchange("all-reduce", 4 * -(-size // (32 // bits)))])
        found += _least(ways, n)
    return found


def _one_by_one(made: compression.Compressor, shapes: list[Shape], n: int) -> list[Exchange]:
    """Values that are encoded one by one. Those of one way share collectives, which changes no bytes."""
    found: dict[str, float] = {}
    for shape in shapes:
        for e in _of_value(made, math.prod(shape), n):
            found[e.op] = found.get(e.op, 0) + e.nbytes
    return [Exchange(op, nbytes) for op, nbytes in found.items()]


@functools.lru_cache
def _of_value(made: compression.Compressor, size: int, n: int) -> list[Exchange]:
    payload = _payload(made, size)
    ways = [[Exchange("all-gather", n * _nbytes_of(payload))], _owned(size, n)]
    if isinstance(made, Int8):
        rows = jax.eval_shape(functools.partial(made.cut, shape=(size,), count=n), payload)
        back = Exchange("all-gather", FLOAT32 * n * -(-size // n))
        ways.append([Exchange("all-to-all", _nbytes_of(rows)), back])
    return _least(ways, n)


@functools.lru_cache
def _payload(made: compression.Compressor, size: int) -> Any:
    flat = jax.ShapeDtypeStruct((size,), "float32")
    return jax.eval_shape(lambda v: made.encode(v, made.init(v.shape, v.dtype))[0], flat)


def _two_way(shapes: list[Shape], n: int, limits: collectives.BucketLimits) -> list[Exchange]:
    """3 bits for each element to its owner and 3 back, and twice a scale for each value."""
    chunks = [-(-math.prod(s) // n) for s in shapes]
    rows = [-(-c // 32) for c in chunks]  # words; short ones share a bucket
    words = [jax.ShapeDtypeStruct((n if w >= 8 else 1, w), "uint32") for w in rows]
    bits = [12 * n * -(-sum(chunks[i] for i in g) // 32) for g in collectives.plan(words, limits)]
    scales = [Exchange("all-reduce", FLOAT32 * len(shapes))] * (2 if shapes else 0)
    return [Exchange(op, b) for b in bits for op in ("all-to-all", "all-gather")] + scales


def _owned(size: int, n: int) -> list[Exchange]:
    """Plain numbers to their owners, and the sums to all."""
    padded = FLOAT32 * n * -(-size // n)
    return [Exchange("all-to-all", padded), Exchange("all-gather", padded)]


def _least(ways: list[list[Exchange]], n: int) -> list[Exchange]:
    return min(ways, key=lambda way: sum(sent_bytes(e, n) for e in way))


def _nbytes_of(tree: Any) -> int:
    return sum(_nbytes(x.shape, x.dtype) for x in jax.tree.leaves(tree))


def _nbytes(shape: Shape, dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize


def _groups(shapes: Sequence[Shape], limits: collectives.BucketLimits) -> tuple[tuple[int, ...], ...]:
    return collectives.plan([jax.ShapeDtypeStruct(s, "float32") for s in shapes], limits)


def combined(found: Sequence[Exchange], most: float) -> list[Exchange]:
    """The exchanges after the compiler merged those of one sort, in their order, up to `most` bytes each."""
    merged: list[Exchange] = []
    last: dict[tuple[str, bool], int] = {}
    for e in found:
        i = last.get((e.op, e.gradient))
        if i is not None and e.op != "all-to-all" and merged[i].nbytes + e.nbytes <= most:
            merged[i] = dataclasses.replace(e, nbytes=merged[i].nbytes + e.nbytes)
        else:
            last[e.op, e.gradient] = len(merged)
            merged.append(e)
    return merged


def exchange_time(exchange: Exchange, n: int, cluster: Cluster, algorithm: str = "best") -> float:
    """Seconds of one collective; `algorithm` names one of `all_reduce_times`, or `best` of them."""
    if n == 1:
        return 0.0
    if exchange.op == "all-reduce":
        times = all_reduce_times(exchange.nbytes, n, cluster)
        return min(times.values()) if algorithm == "best" else times.get(algorithm, times["ring"])
    if exchange.op == "all-to-all":
        return all_to_all_time(exchange.nbytes, n, cluster)
    return gather_time(exchange.nbytes, n, cluster)


# The step.


@dataclasses.dataclass(frozen=True)
class Step:
    """Predicted seconds of one step.

    Attributes:
        forward, backward, update: computing.
        gradients, parameters: communication, all of it.
        exposed: communication that nothing hides.
    """

    forward: float
    backward: float
    update: float
    gradients: float
    parameters: float
    exposed: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.update + self.exposed

    @property
    def efficiency(self) -> float:
        """The share of the step that is computing: what is left of perfect scaling."""
        return (self.forward + self.backward + self.update) / self.seconds


def step(
    work: Work,
    cluster: Cluster,
    n: int,
    *,
    kind: str = "device",
    compressor: str = "none",
    overlap: float = 0.0,
    algorithm: str = "best",
) -> Step:
    """The step on n devices.

    Args:
        overlap: from 0 to 1, the share of the gradients' communication that may run beside the backward pass; at most
            as much is hidden as the backward pass lasts. The gather of parameters is never hidden.
        algorithm: of the all-reduce, see `exchange_time`.

    Raises:
        ValueError: an overlap out of range, or devices that do not fill nodes.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap is a share from 0 to 1, got {overlap}")
    compute = work.flops * work.examples / (cluster.flops * work.utilization)
    backward = compute * 2 / 3
    times = {True: 0.0, False: 0.0}
    for e in combined(exchanges(work.shapes, kind, n, compressor), cluster.combine):
        times[e.gradient] += exchange_time(e, n, cluster, algorithm)
    updated = work.parameters / (n if kind == "sharded" else 1)
    exposed = times[True] - min(overlap * times[True], backward) + times[False]
    update = updated * work.update_bytes / cluster.memory_bandwidth
    return Step(compute - backward, backward, update, times[True], times[False], exposed)


def fit(n: int, small: tuple[float, float], large: tuple[float, float]) -> Link:
    """The link for which `ring_all_reduce` over n takes the two times measured, each (bytes, seconds).

    Raises:
        ValueError: times that no link gives.
    """
    (s0, t0), (s1, t1) = small, large
    if not (s0 < s1 and t0 < t1):
        raise ValueError(f"the larger sum must take longer: {small}, {large}")
    slope = (t1 - t0) / (s1 - s0)
    latency = max(0.0, t0 - slope * s0) / (2 * (n - 1))
    return Link(latency, 2 * (n - 1) / n / slope)
