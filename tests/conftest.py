"""Every test sees eight emulated CPU devices; rank promotion is an error, as warnings are."""

import gc
import importlib.metadata
import os
import re
import resource
import signal
import zlib

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
# Most of the time of the tests goes into compiling small programs. So LLVM does not optimise, and on jax 0.10 XLA's
# older emitters of loops write the code, in one piece: a program of a step takes a third of the time there, four fifths
# on newer versions. XLA's own passes and the collectives stay. XLA ends a process that has a flag it does not know, and
# newer versions do not know the emitters'. XLA_FLAGS= (set and empty) tests the code that users get.
if "XLA_FLAGS" not in os.environ:
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = flags

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

CLUSTER = ("JAXPAR_", "SLURM_", "OMPI_", "JAX_COORDINATOR", "JOB_COMPLETION_INDEX")
KEPT = ("JAXPAR_SCREENSHOTS", "JAXPAR_PLAN_PYTHON", "JAXPAR_TEST_PROGRAMS")
for name in [name for name in os.environ if name.startswith(CLUSTER) and name not in KEPT]:
    del os.environ[name]  # the tests are one process, whatever has started them

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for jobs that a script starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_numpy_rank_promotion", "raise")

# `make test` keeps compiled programs from one run to the next, since compiling is most of its time. The key of one has
# its source lines and the version of jaxlib in it. Each worker has its own folder, since jax writes files in place.
# A process that a test starts compiles for itself.
if programs := os.environ.get("JAXPAR_TEST_PROGRAMS"):
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    jax.config.update("jax_compilation_cache_dir", os.path.join(programs, worker))
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# The second row has four: the programs are those of two and of eight.
COUNTS = [1, 2, pytest.param(4, marks=pytest.mark.slow), 8]


@pytest.fixture(params=COUNTS, ids=lambda n: f"{n}dev")
def devices(request):
    found = jax.devices()[: request.param]
    if len(found) < request.param:  # on a machine with a GPU, by JAX_PLATFORMS=cuda
        pytest.skip(f"needs {request.param} devices, there are {len(found)}")
    return found


@pytest.fixture(params=["pmap", "shard_map"])
def engine(request):
    return request.param


def pytest_collection_finish(session):
    """What is there before the first test stays: Python need not look through it, nor so often through the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture
def quick_collections():
    """`gc.collect` looks at what the test made alone; of older objects there are millions, half a second each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def full_disk():
    """A function after which no file of this process can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(autouse=True)
def programs_are_compiled():
    """A test that leaves jax's cache of programs on gives later tests programs of other days and other lines."""
    name = "jax_compilation_cache_dir"
    before = getattr(jax.config, name)
    yield
    after = getattr(jax.config, name)
    jax.config.update(name, before)
    if after != before:
        compilation_cache.reset_cache()
        pytest.fail(f"the test left {name} at {after!r}")


@pytest.fixture(scope="module", autouse=True)
def large_programs_are_dropped(request):
    """Whole networks and a thousand convolutions: gigabytes of programs, which no test after them uses."""
    yield
    if request.path.parent.name in ("mxnet", "cpu_kernels"):
        jax.clear_caches()


# The store, the step and what they stand on. The flags above change what is compiled, so CI runs these with XLA as
# users have it, and only so.
CORE = (
    "test_kv_push_pull test_kv_kinds test_kv_compression test_kv_async test_kv_sparse "
    "test_compression test_owners test_parallel test_sharing test_train_step test_step_many test_local_steps "
    "test_step_scaling test_virtual_shards"
).split()

# What another jax changes most: numbers, the store, the step, devices. Not what starts processes or a compiler, and not
# the longest tables, which take two to three times as long on newer jax.
NUMERIC = re.compile(
    r"(compression|cpu|cpu_kernels|devices|kv|parallel|sparse|updaters)/test_(?!processes|building)|house/test_programs"
    r"|train/test_(certificate|definition|engine_jit|every_optimizer|frozen|fsdp|local_steps|step_|train_step|unused)"
)

# What neither jax nor Python changes: rules and texts of the house, hostile bytes, files. CI runs it on one Python.
ONCE = re.compile(
    r"house/test_(house.py::test_(?!examples)|docs.py::test_(?!the_code)|packaging|benchmarks|scale|types|site)"
    r"|house/test_notebooks.py::test_committed|distributed/test_(hostile_peers|secret|proxy)"
    r"|mxnet/test_mxnet_(params|hostile|records)|data/test_data_load"
)


def pytest_addoption(parser):
    help = "leave out the tests with this marker, which CI runs elsewhere"
    parser.addoption("--without", choices=("core", "once"), action="append", default=[], help=help)
    help = "of the numeric tests of the second row, one in four on the newest Python, and the others on the oldest"
    parser.addoption("--share", choices=("newest", "oldest"), help=help)


def pytest_ignore_collect(collection_path, config):
    """Where the core alone runs, the other files need not be read."""
    is_other = collection_path.match("test_*.py") and collection_path.stem not in CORE
    return True if is_other and config.option.markexpr.startswith("core and ") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Give the tests the markers above, and leave out what the options leave to another run.

    Of a table of cases that is marked `sampled(n)` the first row runs n, evenly spread. The second row runs the others.
    """
    tables = {}
    for item in items:
        if item.path.stem in CORE:
            item.add_marker(pytest.mark.core)
        if NUMERIC.search(item.nodeid) and not item.originalname.startswith(("test_random_", "test_as_plain_optax")):
            item.add_marker(pytest.mark.numeric)
        if ONCE.search(item.nodeid):
            item.add_marker(pytest.mark.once)
        sampled = item.get_closest_marker("sampled")
        if sampled and not (item.get_closest_marker("slow") or item.get_closest_marker("release")):
            tables.setdefault((item.path, item.originalname, *sampled.args), []).append(item)
    for (_, _, count), cases in tables.items():
        chosen = {i * len(cases) // count for i in range(count)}
        for i, item in enumerate(cases):
            if i not in chosen:
                item.add_marker(pytest.mark.slow)

    elsewhere = set()
    for mark in config.getoption("without"):
        elsewhere |= {item for item in items if item.get_closest_marker(mark)}
    share = config.getoption("share")
    if share is not None:
        # By a hash of the name: of a table of two engines every second case has the same one, and a table may have
        # other cases on another version of jax.
        numeric = {item for item in items if item.get_closest_marker("slow") and item.get_closest_marker("numeric")}
        elsewhere |= {i for i in numeric if (zlib.crc32(i.nodeid.encode()) % 4 == 0) != (share == "newest")}
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item not in elsewhere]
