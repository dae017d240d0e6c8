"""Checkpoints of format 1, which jaxpar 0.1 and 0.2 wrote: read for one more release.

This module goes with the release after the next (0.4), together with `_files.load`'s branch for format 1 and the
samples tests/checkpoint/written/0.1.0 and 0.2.0. Until then: restore and save again, and the state is in format 2.

    step_00000120/
        jaxpar.json     the manifest: leaves, and size and SHA-256 of each file
        arrays/         orbax (OCDBT). The arrays are called "0", "1", ... in the manifest's order, and were saved whole
        frozen/         the same for params that are not trained
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._core.files import CheckpointError
from ._arrays import Layout, layout, name_for_orbax

_ARRAYS, _FROZEN = "arrays", "frozen"


def read(path: Path, manifest: dict[str, Any]) -> list[np.ndarray]:
    """All arrays, in the order of the manifest, of a checkpoint whose files are as the manifest says."""
    try:
        layouts = [layout(record) for record in manifest["leaves"]]
        is_frozen = [record.get("frozen", False) for record in manifest["leaves"]]
        arrays: dict[str, np.ndarray] = {}
        for folder, frozen in ((_ARRAYS, False), (_FROZEN, True)):
            arrays |= _restore(path / folder, {str(i): x for i, x in enumerate(layouts) if is_frozen[i] is frozen})
        return [arrays[str(i)] for i in range(len(layouts))]
    except Exception as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
        raise CheckpointError(f"{path} cannot be read, but its checksums are right ({reason})") from error


def _restore(path: Path, layouts: dict[str, Layout]) -> dict[str, np.ndarray]:
    """Arrays with the shapes and dtypes of the manifest. `ValueError` for others, and for more than the memory."""
    import orbax.checkpoint as ocp

    this_process = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=this_process, active_processes={this_process}, barrier_sync_key_prefix=f"jaxpar{this_process}"
    )
    arrays = {name: np.zeros(*layout) for name, layout in layouts.items() if 0 in layout[0]}  # orbax drops these
    expected = {name: layout for name, layout in layouts.items() if 0 not in layout[0]}
    if expected:
        handler = ocp.PyTreeCheckpointHandler()
        with name_for_orbax(path) as name_of_path, ocp.Checkpointer(handler, multiprocessing_options=options) as orbax:
            stored = orbax.metadata(name_of_path).item_metadata.tree
            for name, (shape, dtype) in expected.items():
                on_disk = tuple(stored[name].shape), np.dtype(stored[name].dtype)
                if on_disk != (shape, dtype.newbyteorder("=")):
                    raise ValueError(
                        f"array {name} is {on_disk[1]}{[*on_disk[0]]}, and in the manifest {dtype}{[*shape]}"
                    )
            total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in expected.values())
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if total > memory:
                raise ValueError(f"the arrays have {total} bytes, more than the {memory} of this machine's memory")
            restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in expected}
            args = ocp.args.PyTreeRestore(item=dict.fromkeys(expected, 0), restore_args=restore_args)
            arrays |= orbax.restore(name_of_path, args=args)
    return arrays
