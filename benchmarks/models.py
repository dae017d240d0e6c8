"""Steps per second of six networks: jaxpar beside plain JAX and PyTorch, each in processes of its own.

A small CNN, ResNet-18, a transformer, an MLP, an LSTM and a matrix factorization in two sizes, float32, plain SGD. The
last has row-sparse contenders, and MXNet, which waits for each of its steps. jaxpar runs in a process of one device and
in one of two, as memory comes and with `use_cpu_devices(keep_memory=True)`, convolutions in bfloat16 too. PyTorch runs
eagerly and compiled, convolutions with channels last too, and again with that setting of `malloc`, which PyTorch itself
does not make. It is found in this Python, or in the one that the environment variable JAXPAR_TORCH_PYTHON names. With
`--gpu` all of them run on one GPU, with products in TF32, JAX's default there.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from pathlib import Path

from _harness import (
    KEEP_MEMORY,
    Child,
    Turn,
    arguments,
    environment,
    medians,
    ratio,
    save,
    saved,
    show,
    start_mxnet,
    take_turns,
)
from _shapes import MATRIX

HERE = Path(__file__).resolve().parent
NETWORKS = ("cnn", "resnet18", "transformer", "mlp", "lstm", *MATRIX)
CONVOLUTIONAL = ("cnn", "resnet18")
KEPT = ", memory kept"
MEMORY = {"": {}, KEPT: KEEP_MEMORY}  # how it is had, and the environment for that
PLAIN = (1, "")
WAYS = [(devices, memory) for memory in MEMORY for devices in (1, 2)]


def main() -> None:
    words = "Steps per second of six networks, beside their peers."
    options = arguments(words, 9, 0.5, gpu="on one GPU in place of CPU devices")
    rows = options.rows or list(NETWORKS)
    with contextlib.ExitStack() as stack:
        ways = [PLAIN] if options.gpu else WAYS
        jax_children = {way: stack.enter_context(contextlib.closing(_jax(*way, options.gpu))) for way in ways}
        torch_children = {}
        for memory in ("",) if options.gpu else ("", KEPT):
            child = _torch(memory, options.gpu)
            if child is not None:
                torch_children[memory] = stack.enter_context(contextlib.closing(child))
        with_mxnet = set(rows) & set(MATRIX) and not options.no_mxnet and not options.gpu
        mxnet = start_mxnet(options.mxnet_python) if with_mxnet else None
        if mxnet is not None:
            stack.enter_context(contextlib.closing(mxnet))
        measured = {row: _row(row, jax_children, torch_children, mxnet, options) for row in rows}
        gpu = jax_children[PLAIN].ask(do="device") if options.gpu else ""
    versions = environment(mxnet) | {"jax": jax_children[PLAIN].version}
    versions["torch"] = torch_children[""].version if torch_children else "not installed"
    name = f"models_jax_{versions['jax']}"
    if options.gpu:
        name, versions["gpu"] = f"{name}_gpu", gpu
    save(options, name, {"environment": versions, "networks": saved(options, name).get("networks", {}) | measured})


def _jax(devices: int, memory: str, gpu: bool) -> Child:
    # JAX takes three quarters of a GPU's memory at once, and here two libraries share it.
    env = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"} if gpu else {"JAX_PLATFORMS": "cpu"}
    env["JAX_NUM_CPU_DEVICES"] = str(devices)
    kept = memory == KEPT  # by the call that users make
    child = _child(env if kept else env | MEMORY[memory], sys.executable, "_models_jax.py", *["keep memory"][:kept])
    child.version = child.ask(do="version")
    return child


def _child(env: dict[str, str], python: str, script: str, *options: str) -> Child:
    return Child(["env", *(f"{name}={value}" for name, value in env.items()), python, str(HERE / script), *options])


def _torch(memory: str, gpu: bool) -> Child | None:
    python = os.environ.get("JAXPAR_TORCH_PYTHON", sys.executable)
    child = _child(MEMORY[memory], python, "_models_torch.py", *["cuda"][:gpu])
    try:
        child.version = child.ask(do="version")
    except (RuntimeError, OSError) as error:
        print(f"no PyTorch: {error}; `pip install torch`, or name its Python in JAXPAR_TORCH_PYTHON")
        return None
    return child


def _row(network: str, jax_children: dict, torch_children: dict[str, Child], mxnet: Child | None, options) -> dict:
    turns: dict[str, Turn] = {"plain JAX": _start(jax_children[PLAIN], network, "plain")}
    for (count, memory), child in jax_children.items():
        turns[f"jaxpar, {count} device{'s'[: count > 1]}{memory}"] = _start(child, network, "jaxpar")
        if network in CONVOLUTIONAL and not memory:
            turns[f"jaxpar, {count} device{'s'[: count > 1]}, bfloat16"] = _start(child, network, "bfloat16")
    if options.gpu:  # where the host decides how long a small step takes
        turns["jaxpar, 8 steps a call"] = _start(jax_children[PLAIN], network, "many")
    if network in MATRIX:
        turns |= {f"{name} rows": _start(jax_children[PLAIN], network, f"{name} rows") for name in ("plain", "jaxpar")}
        if mxnet is not None:
            sizes = dict(zip(("users", "items", "width", "batch"), MATRIX[network], strict=True))
            turns |= {name: mxnet.turn(name) for name in mxnet.ask(do="matrix", **sizes)}
    turns |= _torch_turns(network, torch_children)
    times = take_turns(turns, options.rounds, options.turn_seconds, most_seconds=180)
    plain = {name: round(ratio(times, "plain JAX", name), 3) for name in times}
    best = {name: _against_torch(times, name) for name in times if name.startswith("jaxpar")}
    table = [
        (name, f"{1000 * seconds:.2f}", f"{plain[name]:.2f}x", f"{best[name]:.2f}x" if best.get(name) else "")
        for name, seconds in medians(times).items()
    ]
    show((network, "ms a step", "against plain JAX", "against PyTorch's best"), table)
    print()
    return {"milliseconds": {n: round(1000 * s, 3) for n, s in medians(times).items()}} | {
        "against_plain_jax": plain,
        "against_best_pytorch": best,
        "against_best_pytorch_with_memory_kept": {
            name: _against_torch(times, name, KEPT) for name in best if name.endswith(KEPT)
        },
        "rounds": len(times["plain JAX"]),
    }


def _torch_turns(network: str, children: dict[str, Child]) -> dict[str, Turn]:
    """PyTorch as it comes, and with memory kept."""
    turns: dict[str, Turn] = {}
    for memory, child in children.items():
        for how in _torch_ways(network):
            try:
                turns[f"PyTorch {how}{memory}"] = _start(child, network, how)
            except RuntimeError as error:  # its compiler raises what it likes
                print(f"no PyTorch {how}: {str(error).splitlines()[-1]}")
    return turns


def _start(child: Child, network: str, contender: str) -> Turn:
    name = f"{network}, {contender}"
    child.ask(do="start", network=network, contender=contender, name=name)
    return child.turn(name)


def _torch_ways(network: str) -> list[str]:
    layouts = ("", ", channels last") if network in CONVOLUTIONAL else ("",)
    if network in MATRIX:
        return ["eager", "compiled", "eager, sparse"]
    return [how + layout for layout in layouts for how in ("eager", "compiled")]


def _against_torch(times: dict[str, list[float]], ours: str, memory: str = "") -> float | None:
    """How many times as fast as PyTorch's fastest in each round; the median of the rounds.

    PyTorch's memory is as `memory` says. Row-sparse steps are compared with row-sparse ones, dense ones with
    dense ones.
    """
    others = [name for name in MEMORY if name and name != memory]
    torch = {
        n: t
        for n, t in times.items()
        if n.startswith("PyTorch") and n.endswith(memory) and not n.endswith(tuple(others))
    }
    rivals = [t for name, t in torch.items() if ("sparse" in name) == ("rows" in ours)]
    if not rivals:
        return None
    return round(statistics.median(min(turns) / own for *turns, own in zip(*rivals, times[ours], strict=True)), 3)


if __name__ == "__main__":
    main()
