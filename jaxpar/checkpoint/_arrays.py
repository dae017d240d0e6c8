"""The arrays of a checkpoint: written by orbax, each shard by the process that has it, and read box by box.

A box is the place of a shard in its array: `[[start, stop], ...]`, one pair for each axis. When a state is saved, each
process takes the SHA-256 of its own shards from its memory. What is read is compared with that, on whatever devices it
goes: a process reads the saved boxes which overlap what it needs, whole, and takes its part of them. orbax itself
restores a flipped bit in silence.

Reading goes through tensorstore, on which orbax stands: so a box is read once, is verified, and needs no other process.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import glob
import hashlib
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._core.files import CheckpointError
from . import _bucket
from ._bucket import AnyPath, BucketPath

STATE = "state"  # what orbax calls the pytree in its directory, see `write`
_WRITTEN = "manifest.ocdbt"  # in it, where the arrays of all processes are
TIMEOUT = 600  # seconds after which a process no longer waits for the others, where one of them failed
# What orbax refuses, and as which it is stored.
_STORED_AS = {"uint4": np.dtype(np.uint8), "uint2": np.dtype(np.uint8)}
Box = Sequence[Sequence[int]]
Layout = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype of an array
LeafRecord = dict[str, Any]


def layout(record: LeafRecord) -> Layout:
    """Shape and dtype of the array that is saved for a leaf. Random keys are saved as their data."""
    shape = tuple(record["shape"])
    if "impl" in record:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=record["impl"]))
        data = jax.eval_shape(jax.random.key_data, key)
        name, shape, dtype = str(key.dtype), (*shape, *data.shape), np.dtype(data.dtype)
    else:
        dtype = np.dtype(record["dtype"])
        name = str(dtype)  # NumPy takes other names too, which are saved by nobody
    if name != record["dtype"]:
        raise ValueError(f"the dtype must be {name}, got {record['dtype']}")
    return shape, dtype


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which orbax has an array. An error of tensorstore for one that nothing can store."""
    import tensorstore

    native = dtype.newbyteorder("=")
    if dtype.name not in _STORED_AS:
        tensorstore.dtype(native.name)
    return _STORED_AS.get(dtype.name, native)


class HostShards:
    """An array of several devices of this process, in host memory as their shards. It is put together to be written.

    Copies of all arrays of a state would need as much memory as the state. So one at a time is put together, and none
    for its hash if each shard has whole rows.
    """

    def __init__(self, array: jax.Array, shape: tuple[int, ...], dtype: np.dtype[Any]):
        # `array` is of this shape, or flat: the padded rows, one a device, in which a store of kind `sharded` has it.
        self.shape, self.dtype = shape, dtype
        self.ndim, self.size = len(shape), math.prod(shape)
        self.nbytes = self.size * dtype.itemsize
        self._shape_on_devices = array.shape
        # In the order of the rows, without replicas. They stay though the state is donated.
        shards = sorted((s for s in array.addressable_shards if s.replica_id == 0), key=lambda s: s.index[0].start or 0)
        self._shards = [(shard.index, to_numpy(shard.data).view(dtype)) for shard in shards]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.empty(self._shape_on_devices, self.dtype)
        for index, shard in self._shards:
            whole[index] = shard
        return whole.reshape(-1)[: self.size].reshape(self.shape)  # without the padding

    def in_order(self) -> Generator[np.ndarray]:
        """All elements in the order of the array, in flat arrays."""
        if any(shard.shape[1:] != self._shape_on_devices[1:] for _, shard in self._shards):
            yield np.asarray(self).reshape(-1)  # an element of one shard comes between two of another
            return
        remainder = self.size
        for _, shard in self._shards:
            yield shard.reshape(-1)[:remainder]
            remainder -= min(remainder, shard.size)


def shards(array: jax.Array | np.ndarray | HostShards) -> list[tuple[list[list[int]], np.ndarray | HostShards]]:
    """(box, data) of each shard that this process is the one to write. The data stay though the array is donated."""
    if not isinstance(array, jax.Array):
        return [([[0, n] for n in array.shape], array)]
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    boxes = [[list(s.indices(n)[:2]) for s, n in zip(shard.index, array.shape, strict=True)] for shard in shards]
    return [(box, to_numpy(shard.data)) for box, shard in zip(boxes, shards, strict=True)]


def to_numpy(array: jax.Array) -> np.ndarray:
    """The array in host memory. Of one CPU device that is its own memory, which stays though the array is donated."""
    # jax keeps a copy that it makes for NumPy as long as the array lives: after a save the host would have the state
    # a second time. So the copy is of another array with the same memory, which nobody else has.
    shards = [shard.data for shard in array.addressable_shards]
    same_memory = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return np.asarray(jax.device_get(same_memory))  # explicit, for `jax.transfer_guard`


def sha256(array: np.ndarray | HostShards) -> str:
    digest = hashlib.sha256()
    for elements in array.in_order() if isinstance(array, HostShards) else [array]:
        digest.update(np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def write(path: Path, arrays: dict[str, Any], processes: set[int], file_size: int | None = None) -> Callable[[], None]:
    """Begin to write arrays by their names, and return a function that waits until they are written.

    With several `processes` all of them call it, with arrays over their devices. Those of NumPy are written by the
    first. On return the arrays may be donated. With `file_size` a file grows no further after so many bytes.
    """
    import orbax.checkpoint as ocp

    # orbax v1, whose `save` is to be the one of orbax 1.0, makes all processes compare their paths on their devices, so
    # that one of several cannot save by itself. Its former API writes the same files, which v1 reads.
    first = min(processes)
    # Each save has barriers of its own, by the name of its folder. orbax numbers those of one name. After a save that
    # failed in one process the processes would count differently, and none of their later saves would end.
    among = ocp.options.MultiprocessingOptions(
        primary_host=first, active_processes=processes, barrier_sync_key_prefix=f"jaxpar{first}-{path.parent.name}"
    )
    tree: dict[str, Any] = {}  # {"a/b": x} as {"a": {"b": x}}
    for name, array in arrays.items():
        *folders, last = name.split("/")
        functools.reduce(lambda node, folder: node.setdefault(folder, {}), folders, tree)[last] = array

    class HostArrays(ocp.type_handlers.NumpyHandler):
        """Arrays of NumPy, and `HostShards`, which are put together when they are written, one at a time."""

        async def serialize(
            self,
            values: Sequence[np.ndarray | HostShards],
            infos: Sequence[ocp.type_handlers.ParamInfo],
            args: Sequence[ocp.SaveArgs] | None = None,
        ) -> Sequence[ocp.Future]:
            requests = list(zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True))
            whole = [request for request in requests if isinstance(request[0], np.ndarray)]
            in_shards = [request for request in requests if isinstance(request[0], HostShards)]
            serialize = super().serialize

            def write_one_by_one() -> None:
                for value, info, arg in in_shards:
                    for writing in asyncio.run(serialize([np.asarray(value)], [info], [arg])):
                        writing.result()

            writing: list[ocp.Future] = list(await serialize(*zip(*whole, strict=True))) if whole else []
            if in_shards and jax.process_index() == first:  # of host arrays orbax writes those of the first process
                thread = ThreadPoolExecutor(1, "jaxpar-host-shards")
                writing.append(thread.submit(write_one_by_one))
                thread.shutdown(wait=False)
            return writing

    # orbax would copy arrays of NumPy, in case somebody writes to them. These are copies already, or memory that jax
    # keeps for us, or the caller waits (`_leaves.to_leaves`).
    host_arrays = HostArrays(deepcopy_host_arrays=False)
    # One of several processes that writes by itself has no record of the others' shards, for which orbax would look.
    arrays_of_all = ocp.type_handlers.get_type_handler(jax.Array)
    arrays_of_one = ocp.type_handlers.ArrayHandler(primary_host=first, array_metadata_store=None)
    types = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, host_arrays),
        (HostShards, host_arrays),
        (jax.Array, arrays_of_all if len(processes) > 1 or jax.process_count() == 1 else arrays_of_one),
    )
    # Compression costs most of the time, and floating numbers hardly shrink.
    handler = ocp.PyTreeCheckpointHandler(
        use_zarr3=True, use_compression=False, multiprocessing_options=among, type_handler_registry=types
    )
    # The folders are made here, and not by a thread of orbax. Processes tell each other of such a folder by a number
    # that each of them counts by itself. After a save of one process alone they count differently: one writes into a
    # folder before the first process has made it, which then removes what it finds there, or waits for minutes.
    at_once = ocp.options.AsyncOptions(timeout_secs=TIMEOUT, create_directories_asynchronously=False)
    composite = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=among, async_options=at_once), state=handler
    )
    stack = contextlib.ExitStack()
    orbax_path = stack.enter_context(name_for_orbax(path))
    orbax = stack.enter_context(ocp.AsyncCheckpointer(composite, async_options=at_once, multiprocessing_options=among))
    saved = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=file_size)
    try:
        orbax.save(orbax_path, args=ocp.args.Composite(state=saved))
    except BaseException:
        stack.close()
        raise

    def wait() -> None:
        with stack:
            orbax.wait_until_finished()
        if jax.process_index() == first and not (path / STATE / _WRITTEN).is_file():
            raise OSError(f"{path}: orbax has written no arrays")  # which it does not say itself

    return wait


def own_folder() -> str:
    """Where orbax has the arrays of this process, in the folder of all."""
    return f"ocdbt.process_{jax.process_index()}"


def merge(path: BucketPath, count: int) -> dict[str, list[Any]]:
    """Make the index of the arrays of so many processes, which have sent theirs. Size and SHA-256 of its files.

    Where processes write into one folder, orbax does so in the same way.
    """
    import tensorstore

    def opened(folder: BucketPath) -> Any:
        spec = {"driver": "ocdbt", "base": _bucket.spec(folder)}
        return tensorstore.KvStore.open(spec, context=path.bucket.context).result()

    transaction = tensorstore.Transaction(atomic=True)
    whole = opened(path).with_transaction(transaction)
    for process_index in range(count):
        opened(path / f"ocdbt.process_{process_index}").experimental_copy_range_to(whole).result()
    transaction.commit_async().result()
    fingerprints: dict[str, list[Any]] = {}
    for name in _bucket.names(path):
        if name == _WRITTEN or name.startswith("d/"):
            content = _bucket.get(path / name)[0] or b""
            sha256 = "" if name.startswith("d/") else hashlib.sha256(content).hexdigest()
            fingerprints[f"{STATE}/{name}"] = [len(content), sha256]
    return fingerprints


def unique_names(names: Sequence[str]) -> list[str]:
    """Names under which orbax keeps all these arrays: it joins the parts by a dot, and would write one over another."""
    # A name is also changed where it is the beginning of another, and where it has an empty part or is no Unicode.
    unique, used, folders = list[str](), set[str](), set[str]()
    for name in names:
        unicode = name.encode(errors="replace").decode().replace("\0", "?")
        text = "/".join(folder or "_" for folder in unicode.split("/"))

        def is_taken(dotted: str) -> bool:
            return dotted in folders or any(beginning in used for beginning in _beginnings(dotted))

        if is_taken(text.replace("/", ".")):
            text = text.replace("/", "_").replace(".", "_")
        while is_taken(text.replace("/", ".")):
            text += "_"
        unique.append(text)
        *above, dotted = _beginnings(text.replace("/", "."))
        used.add(dotted)
        folders.update(above)
    return unique


def _beginnings(dotted: str) -> list[str]:
    return list(itertools.accumulate(dotted.split("."), lambda above, name: f"{above}.{name}"))


@contextlib.contextmanager
def name_for_orbax(path: Path) -> Generator[Path]:
    """A name of a path that orbax and tensorstore take: in UTF-8, without "..", and no pattern of `glob`.

    For such a pattern as `[lr=0.1]` orbax would find none of the files that it has written, and say nothing.
    """
    path = Path(os.path.realpath(path.parent), path.name)  # behind a link ".." leads elsewhere than its text says
    text = str(path)
    with contextlib.ExitStack() as stack:
        if os.fsencode(path).decode(errors="ignore") != text or glob.has_magic(text) or "\\" in text:
            link = Path(stack.enter_context(tempfile.TemporaryDirectory()), "link")
            link.symlink_to(path.parent, target_is_directory=True)
            path = link / path.name
        yield path


class Stored:
    """An array on disk. What is read of it has the hashes with which it was saved, or a `CheckpointError` is raised."""

    def __init__(self, folder: AnyPath, record: LeafRecord):
        self._folder, self._record = folder, record
        self.shape, self.dtype = layout(record)
        self.ndim = len(self.shape)
        self._rows: tuple[int, int] | None = tuple(record["rows"]) if "rows" in record else None
        self._on_disk = self._rows or self.shape
        self._boxes = [(tuple(map(tuple, box)), sha256) for box, sha256 in record["boxes"]]
        check_boxes([box for box, _ in self._boxes], self._on_disk)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        ((_, array),) = self.read([[[0, n] for n in self.shape]])
        return array.astype(dtype or self.dtype, copy=False)

    def astype(self, dtype: Any) -> np.ndarray:
        return self.__array__(dtype)

    def verify(self) -> None:
        """Read all of it, one saved box at a time."""
        for box, _ in self._boxes:
            for _ in self._read([box]):
                pass

    def read(self, boxes: Sequence[Box]) -> Generator[tuple[int, np.ndarray]]:
        """The number of each box and what is in it, in arrays of their own, each as soon as it is read and verified."""
        if self._rows is None:
            yield from self._read(boxes)
            return
        # The array is on disk as flat rows. Of these the rows of the box's first axis are read, and then cut.
        step = math.prod(self.shape[1:])
        ranges = [(box[0][0] * step, box[0][1] * step) if box else (0, 1) for box in boxes]
        for i, flat in self.read_flat(ranges):
            array = flat.reshape(-1, *self.shape[1:]) if self.shape else flat.reshape(())
            within = (slice(None), *(slice(*ends) for ends in boxes[i][1:])) if boxes[i] else ()
            yield i, np.ascontiguousarray(array[within])

    def read_flat(self, ranges: Sequence[tuple[int, int]]) -> Generator[tuple[int, np.ndarray]]:
        """As `read`, of the elements from a start to a stop, in the order of a flat array."""
        # The rows, along the first axis on disk, in which they are.
        step = math.prod(self._on_disk[1:]) or 1
        boxes = [
            [[a // step, -(-b // step)], *([0, n] for n in self._on_disk[1:])][: len(self._on_disk)] for a, b in ranges
        ]
        for i, rows in self._read(boxes):
            start, stop = ranges[i]
            yield i, rows.reshape(-1)[start - start // step * step :][: max(stop - start, 0)]

    def _read(self, boxes: Sequence[Box]) -> Generator[tuple[int, np.ndarray]]:
        """As `read`, of boxes of the array on disk."""
        import tensorstore

        name, leaf = self._record["array"], self._record["words"]
        wanted = [tuple(map(tuple, box)) for box in boxes]
        # Which of the wanted boxes have a part of each saved one, and how many such parts each of them still lacks.
        users = [[i for i, box in enumerate(wanted) if _overlap(saved, box) is not None] for saved, _ in self._boxes]
        missing = collections.Counter(itertools.chain.from_iterable(users))
        arrays: dict[int, np.ndarray] = {}
        try:
            for i, box in enumerate(wanted):
                if not missing[i]:  # it has no elements
                    yield i, np.empty([max(b - a, 0) for a, b in box], self.dtype)
            if not any(users):
                return
            with contextlib.ExitStack() as stack:
                # orbax writes OCDBT, a store of keys of tensorstore's, with an array of zarr under each name.
                folder, context = self._folder / STATE, None
                if isinstance(folder, BucketPath):
                    base, context = _bucket.spec(folder), folder.bucket.context
                else:
                    base = {"driver": "file", "path": f"{stack.enter_context(name_for_orbax(folder))}/"}
                kvstore = {"driver": "ocdbt", "base": base, "path": f"{name.replace('/', '.')}/"}
                spec = {"driver": "zarr3", "kvstore": kvstore}
                array = tensorstore.open(spec, open=True, read=True, context=context).result()
                shape, dtype = tuple(array.shape), array.dtype.numpy_dtype
                if (shape, dtype) != (self._on_disk, stored_dtype(self.dtype)):
                    of_manifest = f"{stored_dtype(self.dtype)}{list(self._on_disk)}"
                    raise CheckpointError(f"it is {dtype}{list(shape)}, and in the manifest {of_manifest}")

                # Each saved box is read once, whole, since it has one hash. No more than one is in memory beside what
                # is asked for, and what is complete goes to the caller at once: of a large state nothing else fits.
                for (saved, expected), users_of_box in zip(self._boxes, users, strict=True):
                    if not users_of_box:
                        continue
                    data = array[tuple(slice(*ends) for ends in saved)].read().result()
                    if sha256(data) != expected:
                        raise CheckpointError(
                            f"it does not have the checksum it was saved with, in {[*map(list, saved)]}"
                        )
                    data = data.view(self.dtype) if self.dtype.name in _STORED_AS else data
                    for i in users_of_box:
                        missing[i] -= 1
                        if wanted[i] == saved and users_of_box == [i] and data.dtype == self.dtype:
                            arrays[i] = data  # as it is, without a copy
                            continue
                        if i not in arrays:
                            arrays[i] = np.empty([b - a for a, b in wanted[i]], self.dtype)
                        common = _overlap(saved, wanted[i])
                        assert common is not None
                        arrays[i][_slices(common, wanted[i])] = data[_slices(common, saved)]
                    del data
                    for i in users_of_box:
                        if not missing[i]:
                            yield i, arrays.pop(i)
        except Exception as error:
            if isinstance(self._folder, BucketPath):
                _bucket.names(self._folder)  # an `OSError` where the bucket does not answer, which is no damage
            reason = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
            raise CheckpointError(f"{self._folder} is damaged: {leaf} ({name}): {reason}") from error


def check_boxes(boxes: Sequence[Box], shape: Sequence[int]) -> None:
    """`ValueError` unless the boxes are a grid that covers the shape once. One without elements has no boxes."""
    if 0 in shape:
        is_grid = not boxes
    else:
        axes = [sorted({tuple(box[axis]) for box in boxes}) for axis in range(len(shape))]
        tiles = all(
            [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
            and cuts[-1][1] == n
            and all(start < stop for start, stop in cuts)
            for cuts, n in zip(axes, shape, strict=True)
            if boxes
        )
        is_whole = all(len(box) == len(shape) for box in boxes)
        different = len({tuple(map(tuple, box)) for box in boxes})
        is_grid = bool(boxes) and tiles and is_whole and len(boxes) == different == math.prod(map(len, axes))
    if not is_grid:
        raise ValueError(f"wrong boxes of an array of the shape {list(shape)}")


def _overlap(a: Box, b: Box) -> Box | None:
    common = [(max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True)]
    return common if all(start < stop for start, stop in common) else None


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(i[0] - o[0], i[1] - o[0]) for i, o in zip(inner, outer, strict=True))
