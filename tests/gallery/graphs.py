"""Writes the graph of each network of the gallery as text, so that two versions of the package can be compared.

PYTHONPATH=.:tests python -m gallery.graphs FOLDER
"""

import sys
from pathlib import Path

import jax

import jaxpar as jp
from gallery import MODELS, make

OPTIONS = ("params_argnums", "depth", "max_nodes", "repeats", "rules")


def text_of(graph):
    """A line for each layer, then one for each edge."""
    lines = [f"{graph!r} {graph.scopes}"]
    for node in graph.nodes:
        numbers = f"{node.params} params {node.flops} FLOP {node.equations} equations ×{node.repeat}"
        lines.append(f"{'/'.join(node.scope)} | {node.name} | {node.op} {node.detail} | {node.shape} | {numbers}")
    lines += [f"{edge.source} -> {edge.target}{' carry' * edge.carry}" for edge in graph.edges]
    return "\n".join(lines) + "\n"


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        fn, args, options = make(name)
        options = {key: value for key, value in options.items() if key in OPTIONS}
        with jax.numpy_rank_promotion("allow"):  # as users have it
            picture = jp.viz.trace(fn, *args, **options)
            whole = jp.viz.trace(fn, *args, **options | {"max_nodes": None})
        (folder / f"{name}.txt").write_text(text_of(picture) + "\nall layers\n" + text_of(whole))


if __name__ == "__main__":
    jp.parallel.use_cpu_devices(8)
    main(Path(sys.argv[1]))
