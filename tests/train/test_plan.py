"""`train.plan`: names of slices, what is read of a compiled step, tables, and the process that compiles.

Where this machine has no compiler for absent devices, CPU devices stand in for them.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import launched
import numpy as np
import optax
import pytest
from kv_model import collectives_in

from jaxpar import kv, parallel, train, viz
from jaxpar.__main__ import main
from jaxpar._cli.commands import parse_choice
from jaxpar.train._plan import accelerators, child, compiled
from jaxpar.train._plan.accelerators import Slice

COUNT = 4


def make(devices, kind="device", rows=16, read=False, fsdp=False, compression=None, **options):
    """A layer of 64 x 64, Adam."""
    params = {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}
    if read:
        float(params["b"][0])
    place = {"devices": devices}
    if fsdp:
        mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
        place = {"sharding": parallel.fsdp("data", min_size=0), "mesh": mesh}
    store = kv.from_params(params, kind=kind, optimizer=optax.adam(0.1), **place)
    store = store if compression is None else kv.set_gradient_compression(store, {"type": compression})

    def loss(params, batch, rng):
        return ((jnp.tanh(batch["x"] @ params["w"]) + params["b"][None]) ** 2).mean(), {}

    batch = {"x": jax.ShapeDtypeStruct((rows, 64), jnp.float32)}
    return train.make_train_step(loss, **options), train.create_state(store, 0), batch


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """CPU devices in place of those of a slice, and this process in place of the one that compiles."""
    monkeypatch.setattr(Slice, "devices", lambda self: tuple(jax.devices()[:COUNT]))
    for module in ("plan", "largest"):
        monkeypatch.setattr(f"jaxpar.train._plan.{module}.ask", lambda *request: _checked(*request))


def _checked(work, make, where, choices, caller):
    try:
        return work(make, where, choices, 0.75)
    except Exception as error:
        raise ValueError(compiled.in_one_line(error)) from None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5x:2x4", "unknown accelerator, on='v5x:2x4'; did you mean v5"),
        ("rtx:1", "known are v4, v5e"),
        ("v5e", "unknown slice 'v5e'; v5e has 1x1, .* such as v5e:4x4"),
        ("v5e:0x4", "unknown slice 'v5e:0x4'"),
        ("h100", "a host has 1, 2, 4 or 8 GPUs, such as h100:8"),
        ("v5e:3x5", "unknown slice 'v5e:3x5'; v5e has 1x1, 2x2"),
        ("v5p:4x4", "v5p has three sizes"),
        ("v5p:4x4x6", "multiples of 4"),
        ("v4:32x32x32", "at most 4,096 chips"),
        ("h100:3", "a host has 1, 2, 4 or 8 GPUs"),
        ("h100:2x2x8", "a host has 1, 2, 4 or 8 GPUs"),
    ],
)
def test_slices_that_nobody_rents(name, words):
    for call in (train.plan, train.compare_plans):
        with pytest.raises(ValueError, match=words.replace("(", r"\(")):
            call(make, on=name)


def test_a_step_in_place_of_make():
    """The natural call has a step, its state and a batch. It says what `make` is."""
    step, state, batch = make(jax.devices()[:COUNT])
    lines = r"make must be a function, make\(devices, \*\*choices\) -> \(step, state, batch\), got a train step; put"
    for call in (train.plan, train.compare_plans):
        for given in ((step,), (step, state), (step, "v5e:2x2")):
            with pytest.raises(TypeError, match=lines):
                call(*given)
    with pytest.raises(ValueError, match="unknown accelerator, on=a TrainState; known are v4"):
        train.plan(make, state)
    with pytest.raises(TypeError, match=r"make must be a function.*got a tuple of 3"):
        train.plan((step, state, batch))


def test_names():
    assert Slice("v5p:8x8x16", "x").shape == (8, 8, 16)
    assert Slice("h100:4x8", "x").shape == (4, 8)
    assert Slice("h100:8", "x").shape == (1, 8)
    assert Slice("h100:8", "x").limit(0.75) == int(0.75 * 84_942_979_072)
    assert Slice("v5e:2x4", "x").limit(0.75) == int(15.75 * 2**30)


def test_a_plan():
    plan = train.plan(make, on="v5e:2x2")
    arrays = 3 * 4 * (64 * 64 + 64)
    assert plan.fits
    assert (plan.devices, plan.engine) == (COUNT, "shard_map")
    assert plan.argument_bytes >= arrays + 4 * 16 // COUNT * 64
    assert arrays <= plan.donated_bytes <= plan.returned_bytes
    assert plan.argument_bytes < plan.peak_bytes < plan.limit_bytes
    (one,) = [c for c in plan.collectives if c.bytes > 100]
    assert (one.kind, one.axes, one.runs) == ("all-reduce", ("data",), 1)
    assert one.bytes == pytest.approx(2 * 4 * (64 * 64 + 64) * 3 / 4, rel=0.01)
    assert plan.sent_bytes == {"all-reduce": sum(c.bytes for c in plan.collectives)}
    # Forward, and the gradient of the weights: two products of (4, 64) by (64, 64) on each device, and little else.
    assert 2 * 2 * 4 * 64 * 64 <= plan.flops <= 3 * 2 * 4 * 64 * 64 + 30 * 64 * 64
    assert plan.arguments[0]["name"] in ("params/w", "optimizer_state[0].mu['w']", "optimizer_state[0].nu['w']")
    assert plan.arguments[0]["bytes"] == 4 * 64 * 64
    assert "fits" in str(plan)
    assert "over data" in str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["sent_bytes"] == plan.sent_bytes
    assert plan.plot().step.devices == COUNT
    assert "<svg" in plan._repr_html_()


def sent_by(text, devices):
    """Bytes that a device sends around a ring, by kind of collective, from the text of a program without loops."""
    of_result = {  # the share of a collective's result that goes out of each device
        "all-reduce": 2 * (devices - 1) / devices,
        "all-gather": (devices - 1) / devices,
        "reduce-scatter": devices - 1,
    }
    by_kind = {}
    for kind, size in collectives_in(text):
        by_kind[kind] = by_kind.get(kind, 0) + size * of_result[kind]
    return by_kind


@pytest.mark.sampled(1)
@pytest.mark.parametrize("choices", [{"kind": "sharded"}, {"kind": "device"}, {"fsdp": True}], ids=str)
def test_what_each_layer_sends_on_several_meshes(choices):
    """As many bytes as an independent count in the texts of the programs. "v5e" is four CPU devices here."""
    compared = viz.compare_meshes(make, on=["cpu:2", "cpu:8", "v5e:2x2"], **choices)  # the same function
    devices = {"cpu:2": 2, "cpu:8": 8, "v5e:2x2": COUNT}
    assert {on: step.devices for on, step in compared.steps.items()} == devices
    for on, count in devices.items():
        *_, (stage,) = compiled.construct(make, tuple(jax.devices()[:count]), choices)
        expected = sent_by(stage.traced.lower().compile().as_text(), count)
        found = {}
        for row in compared.rows:
            found[row["kind"]] = found.get(row["kind"], 0) + row["bytes"].get(on, 0)
        assert found == pytest.approx(expected, abs=8)
        assert compared.sent_bytes[on] == sum(found.values())
    # The weight is in a row of its layer on each mesh, and what is sent of it grows with the devices.
    layers = [layer for layer in compared.steps["cpu:8"].layers if layer.params]
    weight = max(layers, key=lambda layer: layer.params).name
    of_weight = [row["bytes"] for row in compared.rows if weight in row["layers"]]
    sent = {on: sum(sizes.get(on, 0) for sizes in of_weight) for on in devices}
    assert 4 * 64 * 64 <= sent["cpu:2"] < sent["v5e:2x2"] < sent["cpu:8"]
    lines = str(compared).splitlines()
    assert lines[1].split() == ["layer", "sent", *devices]
    assert weight in str(compared)
    assert compared._repr_html_().count("<th ") == 2 + len(devices)
    assert compared.plot("cpu:2").step is compared.steps["cpu:2"]


def test_meshes_that_there_are_not():
    with pytest.raises(ValueError, match=r"'cpu:99' is more than the 8 CPU devices .*use_cpu_devices\(99\)"):
        train.compare_meshes(make, on=["cpu:99"])
    with pytest.raises(ValueError, match="unknown mesh 'cpu8'; write cpu:8"):
        train.compare_meshes(make, on=["cpu8"])
    with pytest.raises(ValueError, match="unknown accelerator, on='v5x:2x4'"):
        train.compare_meshes(make, on=["cpu:2", "v5x:2x4"])
    with pytest.raises(TypeError, match="on must be a list of meshes, got 'cpu:8'"):
        train.compare_meshes(make, on="cpu:8")
    with pytest.raises(TypeError, match="make must be a function"):
        train.compare_meshes(3, on=["cpu:8"])
    # What is wrong on one mesh is in its row, and says why there is no picture.
    compared = train.compare_meshes(make, on=["cpu:1", "cpu:2"], read=True)
    assert "make reads the values of an array" in compared.steps["cpu:2"]
    assert "make reads the values of an array" in str(compared)
    with pytest.raises(ValueError, match="no picture of cpu:2: make reads"):
        compared.plot("cpu:2")


@pytest.mark.slow
def test_flops_and_arguments_are_of_one_device_under_each_engine():
    """Engine `jit` traces whole arrays, and the others those of a device."""
    by_jit, by_map = train.plan(make, on="v5e:2x2", fsdp=True), train.plan(make, on="v5e:2x2")
    assert by_jit.flops == pytest.approx(by_map.flops, rel=0.8)
    assert by_jit.arguments[0]["bytes"] == 4 * 64 * 64 // COUNT
    assert by_jit.choices == {"fsdp": "True"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda devices: make(devices, kind="loocal"), "unknown kind 'loocal'.*test_plan.py"),
        (lambda devices: make(devices, rows=15), "a batch of 15 cannot be divided by 4 devices"),
        (lambda devices: make(devices, read=True), "make reads the values of an array .test_plan.py"),
        (lambda _: make(jax.devices()[4:6]), r"make puts the state on .*; give the store the devices"),
        (lambda devices: make(devices)[:2], "not enough values to unpack"),
        (3, "make must be a function"),
    ],
)
def test_what_make_cannot_do(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        train.plan(make, on="v5e:2x2")


def test_a_line_is_named_in_a_folder_that_is_called_jaxpar():
    names = {"kv": kv}
    exec(compile("def make(devices):\n    return kv.create('loocal')\n", "/home/me/jaxpar/run.py", "exec"), names)
    with pytest.raises(ValueError, match=r"unknown kind 'loocal'.*\(run.py:2\)"):
        train.plan(names["make"], on="v5e:2x2")


@pytest.mark.slow
@pytest.mark.parametrize("shards", [4, 8, 6])
def test_virtual_shards_are_several_programs(shards):
    """As often as a device runs each: the gradient of a shard, the exchange of sums, the update."""
    one, plan = (train.plan(make, on="v5e:2x2", rows=48, **more) for more in ({}, {"virtual_shards": shards}))
    slots, grads = -(-shards // COUNT), 4 * (64 * 64 + 64)
    rows = slots * COUNT * 48 // shards  # with those of the padding
    assert plan.fits
    assert plan.flops == pytest.approx(one.flops * rows / 48, rel=0.5)
    assert plan.donated_bytes >= 3 * grads
    assert 3 * grads < plan.argument_bytes < plan.argument_bytes + slots.bit_length() * grads < plan.peak_bytes
    sent = sum(plan.sent_bytes.values())
    kept = 2 if shards == 6 else 1  # sums that a device cannot add
    assert 0.75 * grads * kept <= sent <= 2.1 * COUNT * grads * kept
    assert {c.axes for c in plan.collectives} == {("data",)} or {c.axes for c in plan.collectives} == {("devices",)}
    with pytest.raises(ValueError, match="several programs"):
        plan.plot()


@pytest.mark.slow
def test_options_that_keep_parts_in_the_state_and_arrays_as_a_batch():
    def with_arrays(devices):
        step, state, _ = make(devices, nonfinite="skip", loss_scale="dynamic", grad_transform=optax.ema(0.9))
        return step, state, {"x": np.ones((16, 64))}

    plan = train.plan(with_arrays, on="v5e:2x2")
    assert plan.argument_bytes > train.plan(make, on="v5e:2x2").argument_bytes + 4 * 64 * 64


def test_what_does_not_fit(monkeypatch):
    chip = accelerators.CHIPS["h100"]
    monkeypatch.setitem(accelerators.CHIPS, "h100", accelerators.Chip(50_000, numbers=chip.numbers))
    plan = train.plan(make, on="h100:4")
    assert not plan.fits
    assert plan.peak_bytes > plan.limit_bytes == 37_500
    assert "does NOT fit" in str(plan)
    assert "split them over the devices" in str(plan)


def test_the_words_of_the_compiler_of_tpus(monkeypatch):
    """It refuses. The peak is what it says, and what only a program says is None."""
    words = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (36.50G) exceeds available HBM (15.75G). HLO module: jit_train_step."
    )

    def refuse(lowered):
        raise RuntimeError(words)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    plan = train.plan(make, on="v5e:2x2")
    assert (plan.fits, plan.peak_bytes, plan.donated_bytes, plan.collectives) == (False, int(36.5 * 2**30), None, ())
    assert "temporaries are the most" in str(plan)
    assert "NOT fit" in plan._repr_html_()
    with pytest.raises(ValueError, match="no picture: the program does not fit"):
        plan.plot()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("split", "sent", "is_said"),
    [
        (["data"], ("data",), True),
        (["data"], ("copies", "data"), True),
        (["data"], ("copies",), False),  # the gradients of copies
        (["data", "model"], ("model",), False),  # activations under tensor parallelism
        (["model"], ("model",), False),
        ([], ("data",), False),
    ],
)
def test_split_weights_that_travel_whole(split, sent, is_said):
    """FSDP over many chips, as the compiler of TPUs has it. CPUs estimate no cycles."""
    plan = train.plan(make, on="v5e:2x2", fsdp=True)
    weights = next(one for one in plan.arguments if one["name"] == "params/w")
    assert weights["axes"] == ["data"]
    assert plan.batch_axes == ("data",)
    reduce = train.PlannedCollective("all-reduce", sent, 1000, 1, False, True)
    plan = dataclasses.replace(
        plan, cycles=10, collectives=(reduce,), arguments=({**weights, "axes": split},), batch_axes=("copies", "data")
    )
    assert ("keep copies over the rest" in str(plan)) == is_said


@pytest.mark.slow
def test_a_comparison():
    table = train.compare_plans(make, on=["v5e:2x2", "h100:4"], kind=["device", "sharded", "loocal"])
    assert len(table.rows) == 6
    assert len(table.plans) == 4
    assert table.best == {}  # CPUs estimate no cycles
    assert str(table).count("with this") == 2
    assert "0.5" in str(table).split("sharded")[1]  # of the memory
    rows = [(on, chosen, dataclasses.replace(plan, cycles=10)) for on, chosen, plan in table.rows[:2]]
    assert train.PlanComparison(tuple(rows)).best["v5e:2x2"] in (rows[0][2], rows[1][2])
    fast = dataclasses.replace(rows[1][2], cycles=5)
    ranked = train.PlanComparison((rows[0], ("v5e:2x2", {"kind": "sharded"}, fast)))
    assert ranked.best == {"v5e:2x2": fast}
    assert "2.00 x cycles" in str(ranked)
    refused = dataclasses.replace(fast, fits=False, peak_bytes=fast.limit_bytes + 10**9)
    ranked = train.PlanComparison((rows[0], ("v5e:2x2", {"kind": "sharded"}, refused)))
    assert ranked.best == {"v5e:2x2": rows[0][2]}
    assert "does not fit by 1.00 GB" in str(ranked)
    assert "unknown kind 'loocal'" in str(table)
    assert "<table" in table._repr_html_()
    rows = json.loads(json.dumps(table.to_dict()))[:3]
    assert [row["choices"]["kind"] for row in rows] == ["device", "sharded", "loocal"]
    assert ["error" in row for row in rows] == [False, False, True]
    with pytest.raises(TypeError, match="kind must be a list of values, got 'device'"):
        train.compare_plans(make, kind="device")


@pytest.mark.slow
def test_the_command_line(capsys, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    here = ["plan", "test_plan:make", "--on", "v5e:2x2"]
    assert main([*here, "--json", "--choose", "rows=32", "-o", str(tmp_path / "step.svg")]) == 0
    assert json.loads(capsys.readouterr().out)["choices"] == {"rows": "32"}
    assert (tmp_path / "step.svg").read_text().count("<svg") == 1
    wanted = {
        "shape=(2,4)": [(2, 4)],
        "shape=(2,4),(4,2)": [(2, 4), (4, 2)],
        "shape=2,4": [2, 4],
        "a=[1,(2,3)],None, True": [[1, (2, 3)], None, True],
        "a='x,y',z": ["x,y", "z"],
        "a={'k': (1,2)},1e-3": [{"k": (1, 2)}, 1e-3],
        "kind=device,sharded": ["device", "sharded"],
        "a=": [""],
    }
    assert {text: parse_choice(text)[1] for text in wanted} == wanted
    assert main([*here, "--choose", "kind=device,sharded"]) == 0
    assert "compared" in capsys.readouterr().out
    for words, message in [
        (["plan", "test_plan:make", "--on", "v5e:3x5"], "unknown slice"),
        ([*here, "--choose", "kind"], "expected NAME=VALUE"),
        ([*here, "--choose", "shape=(rows,4)"], "'(rows,4)' does not begin with a value of Python, such as (2,4)"),
        ([*here, "--choose", "rows=16,32", "-o", "a.svg"], "-o draws one plan"),
    ]:
        assert main(words) == 2
        assert message in capsys.readouterr().err


def ask(on, python=sys.executable, **choices):
    """`train.plan` in a fresh process, which starts the one that compiles."""
    program = (
        "import json, test_plan\nfrom jaxpar import train\n"
        f"try:\n  print(json.dumps(train.plan(test_plan.make, {on!r}, **{choices!r}).to_dict()))\n"
        "except Exception as error:\n  print(type(error).__name__, error)"
    )
    return launched.python("-c", program, timeout=600, JAXPAR_PLAN_PYTHON=str(python)).stdout.strip()


@pytest.mark.slow
def test_without_a_compiler(tmp_path):
    if child._missing(Slice("v5e:2x4", "x")):
        assert "RuntimeError train.plan, on='v5e:2x4': " in (words := ask("v5e:2x4"))
        assert "has no libtpu, the compiler for TPUs" in words
        assert "make plan-env" in words
    if child._missing(Slice("h100:8", "x")):
        assert "has no CUDA plugin of JAX, the compiler for GPUs" in ask("h100:8")
    assert str(tmp_path / "nothing") in ask("h100:8", tmp_path / "nothing")
    ends = tmp_path / "python"
    ends.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    ends.chmod(0o755)
    assert "ended with 3: out of luck" in ask("h100:8", ends)


def compiler(on):
    """A Python with the compiler for these devices, or skip with the reason."""
    root = Path(__file__).parents[2]
    python = Path(os.environ.get("JAXPAR_PLAN_PYTHON") or root / ".venv-plan" / "bin" / "python")
    module = "libtpu" if on.startswith("v") else "jax_cuda12_plugin"
    other = f"sys.version_info[:2] != {sys.version_info[:2]} or not importlib.util.find_spec({module!r})"
    probe = [python, "-c", f"import importlib.util, sys; sys.exit({other})"]
    if not python.exists() or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"needs {module} of this Python's version: make plan-env, or JAXPAR_PLAN_PYTHON")
    return python


@pytest.mark.slow
@pytest.mark.parametrize("on", ["v5e:2x4", "h100:8"])
@pytest.mark.parametrize("choices", [{}, {"kind": "sharded"}, {"fsdp": True}, {"engine": "jit", "nonfinite": "skip"}])
def test_with_the_compiler(on, choices):
    plan = json.loads(ask(on, compiler(on), **choices, rows=64))
    assert plan["fits"]
    assert plan["devices"] == 8
    assert plan["chip"] == ("TPU v5 lite" if on == "v5e:2x4" else "NVIDIA H100 80GB HBM3")
    assert plan["sent_bytes"].get("all-reduce", 1) > 0
    assert (plan["cycles"] is None) == (on == "h100:8")
    assert all(one["axes"] == ["data"] for one in plan["collectives"])
    # All that the state has is donated, except its key.
    split = 8 if "kind" in choices or "fsdp" in choices else 1
    assert plan["donated_bytes"] >= 3 * 4 * 64 * 64 // split


def test_the_largest_batch_is_the_last_one_that_fits_by_its_program(monkeypatch):
    def of(devices, batch_size, rows=None, **options):
        store = kv.from_params({"w": jnp.zeros(64)}, optimizer=optax.sgd(0.1), devices=devices)
        step = train.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean(), **options)
        return step, train.create_state(store, 0), jax.ShapeDtypeStruct((rows or batch_size, 64), jnp.float32)

    devices = jax.devices()[:1]

    def peak(size):
        *_, (stage,) = compiled.construct(of, tuple(devices), {"batch_size": size})
        return compiled.peak_bytes(stage.traced.lower().compile(), stage)

    limit = peak(1024) + 1000
    assert train.largest_batch(of, limit=limit, devices=devices, multiple_of=512) == 1024
    assert limit < peak(1536)
    with pytest.raises(ValueError, match=r"a step of 4 examples needs .* the limit is 100;"):  # 2 times accumulate
        train.largest_batch(of, limit=100, devices=jax.devices()[:2], accumulate=2)
    with pytest.raises(ValueError, match=r"cpu.* does not say how much memory it has; give limit= in bytes"):
        train.largest_batch(of)
    with pytest.raises(ValueError, match="must return a batch of 1 examples"):
        train.largest_batch(of, limit=1e9, devices=devices, rows=7)

    # On chips that are not there. Of a GPU, JAX takes three quarters of the memory, and `limit` is a part of these.
    with pytest.raises(ValueError, match="on='h100:1' has devices of its own; give on= or devices=, not both"):
        train.largest_batch(of, "h100:1", devices=devices)
    with pytest.raises(ValueError, match=r"unknown accelerator, on=0\.5; known are v4"):
        train.largest_batch(of, 0.5)
    monkeypatch.setattr(Slice, "devices", lambda self: tuple(devices))
    assert train.largest_batch(of, "h100:1", limit, multiple_of=512) == 1024
    chip = accelerators.Chip(int(limit / 0.5 / 0.75) + 2, numbers=accelerators.CHIPS["h100"].numbers)
    monkeypatch.setitem(accelerators.CHIPS, "h100", chip)
    assert train.largest_batch(of, "h100:1", 0.5, multiple_of=512) == 1024
