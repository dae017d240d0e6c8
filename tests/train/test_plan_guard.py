"""What the compilers of TPUs and GPUs make of steps: collectives, their bytes, donation, and memory.

`plan_programs.py` compiles all of it, one process for each kind of devices. Without a compiler, a test is skipped.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plan_programs import CASES, LAYERS, MODELS, SHARE, WIDTH
from test_plan import compiler

import jaxpar
from jaxpar.train._plan import child
from jaxpar.train._plan.accelerators import Slice

pytestmark = pytest.mark.slow

GRADIENTS = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)  # bytes
ACTIVATIONS = 4 * SHARE * 4 * WIDTH  # of a group of four devices that share a batch
SMALL = 70_000  # metrics, and biases that travel apart


@functools.cache
def programs(on):
    """What `plan_programs.py` says of each case on these devices, or skip with the reason."""
    python, where = compiler(on), Slice(on, "x")
    environment = child._environment(where)
    root = Path(jaxpar.__file__).parents[1]
    paths = os.pathsep.join([str(root), *filter(None, sys.path)])
    words = [python, str(Path(__file__).parents[1] / "plan_programs.py"), paths, on]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout.splitlines()[-1])


def expected(on, name):
    """Bytes that a device sends, by kind of collective."""
    devices = {"v5e:2x4": 8, "v5e:16x16": 256, "h100:8": 8}[on]
    once = GRADIENTS * (devices - 1) / devices  # around a ring
    # TPUs gather the weights as bfloat16, in which their products are.
    weights = once if on == "h100:8" else once / 2
    split = {"reduce-scatter": once, "all-gather": weights}
    groups = devices // 4
    codes = {
        "2bit": (once / 16, once * 5 / 32),
        "int3": (once * 3 / 32, once * 3 / 32),
        "int8": (once / 4 * 1.004, once),
    }
    if name in codes:  # there, and the sums back
        return dict(zip(("all-to-all", "all-gather"), codes[name], strict=True))
    return {
        "local": {"all-to-all": once, "all-gather": once},
        "sharded, 2bit": {"all-to-all": once / 16, "all-gather": weights},
        "virtual shards": {"all-to-all": once, "all-gather": once},
        "powersgd": {"all-reduce": 2 * 7 / 8 * 4 * LAYERS * (2 * 2 * WIDTH + WIDTH)},
        **dict.fromkeys(("sharded", "fsdp", "by hand, fsdp"), split),
        # Over four devices, and then the sums of a quarter over the copies.
        "hsdp": {
            "reduce-scatter": GRADIENTS * 3 / 4,
            "all-gather": GRADIENTS * 3 / 8,
            "all-reduce": 2 * GRADIENTS / 4 * (groups - 1) / groups,
        },
        # The gradients of a quarter over the data. Activations before a layer are gathered as bfloat16.
        "tensor": {
            "all-reduce": 2 * GRADIENTS / 4 * (groups - 1) / groups,
            "all-gather": (LAYERS - 1) * 3 / 4 * ACTIVATIONS / 2,
            "reduce-scatter": (LAYERS - 1) * 3 / 4 * ACTIVATIONS,
        },
    }.get(name, {"all-reduce": 2 * once})


@pytest.mark.parametrize(("on", "name"), [(on, name) for on, cases in CASES.items() for name in cases])
def test_a_step(on, name):
    found = programs(on)[name]
    sent = {}
    for kind, axes, size, times in found["sends"]:
        assert axes, kind
        sent[kind] = sent.get(kind, 0) + size * times
    large = {kind: size for kind, size in sent.items() if size > SMALL}
    if name not in ("lenet", "decoder"):
        assert large == {kind: pytest.approx(size, rel=0.01, abs=SMALL) for kind, size in expected(on, name).items()}
    assert found["donated"] > 0
    assert found["returned"] - found["donated"] < 10_000  # metrics
    assert found["wide"] == []  # 64 bits
    assert found["host"] == []
    assert not [call for call in found["calls"] if re.search("callback|cpu|jaxpar", call, re.IGNORECASE)]


@pytest.mark.parametrize("on", ["v5e:2x4", "h100:8"])
def test_a_convolution_is_one_of_the_compiler(on):
    """And no formula for CPUs."""
    assert programs(on)["lenet"]["convolutions"] == 5


@pytest.mark.parametrize(
    ("name", "hand"),
    [*((name, "by hand") for name in ("pmap", "jit")), *((name, "by hand, fsdp") for name in ("sharded", "fsdp"))],
)
@pytest.mark.parametrize("on", ["v5e:2x4", "h100:8"])
def test_beside_a_step_by_hand(on, name, hand):
    mine, other = programs(on)[name], programs(on)[hand]
    assert mine["peak"] == pytest.approx(other["peak"], rel=0.05)
    assert mine["arguments"] == pytest.approx(other["arguments"], rel=0.01)
    total = [sum(size * times for _, _, size, times in one["sends"]) for one in (mine, other)]
    assert total[0] == pytest.approx(total[1], rel=0.01)


@pytest.mark.parametrize("name", ["2bit", "int8"])
def test_codes_on_a_tpu(name):
    """They cost at most 30 cycles for 1,000 bytes of gradients, and their temporaries are less than these."""
    found = programs("v5e:2x4")
    assert found[name]["cycles"] - found["pmap"]["cycles"] < 0.03 * GRADIENTS
    assert found[name]["temporary"] < GRADIENTS


@pytest.mark.parametrize("on", ["v5e:2x4", "h100:8"])
def test_a_decoder_sums_one_gradient_of_its_table(on):
    """It is looked up and multiplied. A device adds both gradients before it sends them."""
    table = 7 / 8 * 4 * 8192 * 512
    large = [kind for kind, _, size, _ in programs(on)["decoder"]["sends"] if size >= table]
    assert sorted(large) == ["all-gather", "reduce-scatter"]


def test_what_fits_is_what_the_compiler_takes():
    """Models around the memory of a chip, by their params and by their examples."""
    found = programs("v5e:1x1")
    assert len(found) == len(MODELS)
    for name, one in found.items():
        assert (one["peak"] > one["limit"]) == one["refused"] == (not one["fits"]), name
    assert sum(one["refused"] for one in found.values()) == 3
    # The peak of a program that fits and the one in a refusal come from different places, and are one measure.
    for kind, least in (("params", 12.0), ("examples", 22e3)):
        peaks = [(size, found[f"{kind} {size}"]["peak"]) for which, size in MODELS if which == kind]
        each = [peak / (LAYERS * size**2 if kind == "params" else size) for size, peak in peaks]
        assert each == pytest.approx([least] * len(each), rel=0.05)
