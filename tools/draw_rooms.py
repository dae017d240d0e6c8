"""Draw the rooms of jaxpar and the imports between them: docs/pictures/rooms.svg.

    python tools/draw_rooms.py          # needs graphviz
    python tools/draw_rooms.py --check  # exit status 1 where the picture's arrows are not those of the source

An arrow means "imports". Arrows that follow from others are left out, and so are those to `_core`, which all use.
"""

import ast
import itertools
import re
import sys
from pathlib import Path

import graphviz

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
SOURCE = ROOT / "jaxpar"
# The layers of tests/house/test_house.py, and what each room holds.
LAYERS = [
    {"_cli": "python -m jaxpar"},
    {"mxnet": "MXNet's networks,\nrecords and names"},
    {"train._runs": "a run\nas a value"},
    {"train._fit": "the loop: progress,\ncheckpoints, interrupts"},
    {"train._elastic": "steps while processes\ncome and go"},
    {"train._evaluate": "once over every example"},
    {"train._callbacks": "after steps and epochs", "train._plan": "a step compiled for\nabsent TPUs and GPUs"},
    {
        "train._step": "the compiled step,\npure",
        "parallel": "split_and_load,\nallreduce, spmd",
        "free_running": "parameter servers\non Ray",
    },
    {"kv": "the verbs: init, push, pull"},
    {"_store": "the store as a value,\nand what a push computes"},
    {
        "updaters": "what a push does\nto a value",
        "compression": "what a push\nsends",
        "sparse": "rows of tables",
        "models": "LeNet, matrix\nfactorization",
        "checkpoint": "named arrays\non disk",
        "distributed": "several\nprocesses",
        "viz": "any function\nas a picture",
        "_launch": "processes on\none machine",
    },
    {"data": "data sets\nand batches"},
    {
        "_cpu": "what CPUs compute\nfaster than XLA",
        "_devices": "arrays on devices and between them",
        "_heartbeat": "how a lost process is noticed",
    },
    {"_core": "checks, text, files: used everywhere"},
]
ROOMS = {room: words for layer in LAYERS for room, words in layer.items()}


def room(parts):
    """The room of a module. `train` itself is the door of its rooms."""
    if parts[:1] == ("train",) and ".".join(parts[:2]) not in ROOMS:
        return "train._fit"
    return ".".join(parts[:2]) if ".".join(parts[:2]) in ROOMS else parts[0] if parts else ""


def imports():
    """(room, imported room) for each import of the source, wherever it is written."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        package = parts[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = (*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else ()))
                for name in node.names:
                    pair = room(parts), room((*base, name.name))
                    if pair[0] != pair[1] and set(pair) <= ROOMS.keys():
                        yield pair


def arrows():
    """The arrows that do not follow from others, without those to `_core`."""
    all_pairs = {pair for pair in imports() if pair[1] != "_core"}
    reach = set(all_pairs)
    for middle, start, end in itertools.product(ROOMS, repeat=3):
        if (start, middle) in reach and (middle, end) in reach:
            reach.add((start, end))
    via = {(a, c) for (a, b) in reach for (b2, c) in reach if b == b2}
    return sorted(all_pairs - via)


def picture(pairs):
    dot = graphviz.Digraph(graph_attr={"rankdir": "TB", "nodesep": "0.15", "ranksep": "0.4", "fontname": "Helvetica"})
    dot.attr("node", shape="box", style="rounded,filled", fillcolor="#eef3fb", color="#5b7db1", fontname="Helvetica")
    dot.attr("node", fontsize="11", margin="0.08,0.04")
    dot.attr("edge", color="#8a9bb5", arrowsize="0.6")
    for layer in LAYERS:
        with dot.subgraph() as same:
            same.attr(rank="same")
            for name, words in layer.items():
                size = '<br/><font point-size="9" color="#445566">'
                body = words.replace("\n", "<br/>")
                public = not name.startswith("_")
                same.node(name, f"<<b>{name}</b>{size}{body}</font>>", fillcolor="#eef3fb" if public else "#f3f3f3")
    for above, below in itertools.pairwise(LAYERS):
        dot.edge(next(iter(above)), next(iter(below)), style="invis")
    for start, end in pairs:
        dot.edge(start, end)
    return dot


def drawn():
    """The arrows in the committed picture."""
    titles = re.findall(r'class="edge">\s*<title>([^<]*)</title>', PICTURE.read_text())
    return {tuple(title.replace("&#45;", "-").replace("&gt;", ">").split("->")) for title in titles}


if __name__ == "__main__":
    if "--check" in sys.argv:
        missing = set(arrows()) - drawn()
        sys.exit(f"draw the rooms again: {sorted(missing)}" if missing else 0)
    PICTURE.write_bytes(picture(arrows()).pipe("svg"))
