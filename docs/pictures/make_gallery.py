"""Draws the pictures of gallery.md.

It needs what make.py needs, and the packages of the extra `test`.

python docs/pictures/make_gallery.py [NAME ...]
"""

import sys
from pathlib import Path

import jaxpar as jp

HERE = Path(__file__).parent
FOLDER = HERE / "gallery"
sys.path.insert(0, str(HERE.parents[1] / "tests"))


def main(names):
    import gallery

    FOLDER.mkdir(exist_ok=True)
    for name in names or gallery.MODELS:
        fn, args, options = gallery.make(name)
        jp.viz.plot_network(fn, *args, **options).save(str(FOLDER / f"{name}.svg"))


if __name__ == "__main__":
    jp.parallel.use_cpu_devices(8)
    main(sys.argv[1:])
