"""Compiled programs: instructions, collectives of CPU, GPU and TPU, groups of devices, protocol buffers."""

import pytest
from hlo_text import program_from

from jaxpar.viz._program import proto
from jaxpar.viz._program.groups import axes_between, read_groups
from jaxpar.viz._program.hlo import Flow, cycles_of, parse
from jaxpar.viz._program.sends import sends_of

# What XLA writes for GPUs: asynchronous halves, combined tuples, loops, wrapped collectives, tiled layouts.
GPU = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/project/net.py"

FunctionNames
1 "net"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=40 end_line=40 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: bf16[1024,64]) -> bf16[128,64] {
  %p = bf16[1024,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %reduce-scatter.1 = bf16[128,64]{1,0} reduce-scatter(%p), channel_id=5, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

%body (state: (s32[], f32[16,4])) -> (s32[], f32[16,4]) {
  %state = (s32[], /*index=1*/f32[16,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[16,4]{1,0} get-tuple-element(%state), index=1
  %collective-permute.1 = f32[16,4]{1,0} collective-permute(%x), channel_id=3, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}
  ROOT %next = (s32[], f32[16,4]{1,0}) tuple(%i, %collective-permute.1)
}

%condition (state.1: (s32[], f32[16,4])) -> pred[] {
  %state.1 = (s32[], f32[16,4]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (w: f32[1000], b: f32[24], big: bf16[1024,64], x: (s32[], f32[16,4])) -> f32[1000] {
  %w = f32[1000]{0} parameter(0), metadata={op_name="params[\\'a, )b\\']"}
  %b.1 = f32[24]{0} parameter(1)
  %big = bf16[1024,64]{1,0} parameter(2)
  %x.1 = (s32[], f32[16,4]{1,0}) parameter(3)
  %all-reduce-start.1 = (f32[1000]{0}, f32[24]{0}) all-reduce-start(%w, %b.1), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/transpose(jvp(net))/dot_general" stack_frame_id=2}
  %all-gather-start.1 = (f32[24]{0}, f32[96]{0}) all-gather-start(%b.1), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %rs-start = ((bf16[1024,64]{1,0}), bf16[128,64]{1,0}) async-start(%big), async_execution_thread="parallel", calls=%wrapped
  %rs-done = bf16[128,64]{1,0} async-done(%rs-start)
  %loop = (s32[], f32[16,4]{1,0}) while(%x.1), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %all-gather-done.1 = f32[96]{0} all-gather-done(%all-gather-start.1)
  %done = (f32[1000]{0}, f32[24]{0}) all-reduce-done(%all-reduce-start.1)
  %q = s4[3,5]{1,0:E(4)} constant({...})
  %all-to-all.1 = (s4[3,5]{1,0:E(4)}, s4[3,5]{1,0:E(4)}) all-to-all(%q, %q), replica_groups={}
  ROOT %out = f32[1000]{0} get-tuple-element(%done), index=0
}
"""  # noqa: E501
MESH = {"data": 2, "model": 4}


def test_collectives_of_a_gpu():
    program = program_from(GPU)
    assert program.is_scheduled
    found = [(one.kind, one.bytes, one.devices, one.axes, one.times) for one in sends_of(program, MESH, 8)]
    assert found == [
        ("reduce-scatter", 2 * 1024 * 64, 8, ("data", "model"), 1),
        ("collective-permute", 4 * 16 * 4, 8, ("model",), 12),
        ("all-reduce", 4 * 1024, 4, ("model",), 1),
        ("all-gather", 4 * 24, 2, ("data",), 1),
        ("all-to-all", 2 * 8, 8, ("data", "model"), 1),
    ]


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    text = GPU.replace(', backend_config={"known_trip_count":{"n":"12"}}', "")
    (permute,) = [one for one in sends_of(program_from(text), MESH, 8) if one.kind == "collective-permute"]
    assert (permute.times, permute.is_exact) == (1, False)


def test_positions_and_names():
    program = program_from(GPU)
    start = program["all-reduce-start.1"]
    assert start.frames == (("/home/me/project/net.py", 12), ("/home/me/project/net.py", 40))
    assert start.op_name == "jit(step)/transpose(jvp(net))/dot_general"
    assert program["w"].op_name == "params['a, )b']"
    assert program["x.1"].arrays[1].shape == (16, 4)
    assert [array.bytes for array in program["all-to-all.1"].arrays] == [8, 8]  # two elements in a byte
    assert (program["i"].index, program["x"].index, program["big"].index) == (0, 1, 2)


def test_no_program():
    with pytest.raises(ValueError, match="has no computation that runs first"):
        parse(b"")


def test_ways_through_a_loop():
    flow = Flow(program_from(GPU))
    assert set(flow.sources(("state", 1))) == {("x.1", 1), ("next", 1)}
    assert list(flow.readers(("x.1", 1))) == [("state.1", 1), ("state", 1), ("loop", 1)]
    assert ("loop", 1) in set(flow.readers(("next", 1)))


SUM = """HloModule m

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2] parameter(0)
  ROOT %c = f32[2] all-reduce(%a), channel_id=1, replica_groups=GROUPS, use_global_device_ids=true, to_apply=%add
}
"""


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("model",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("{}", ("data", "model")),
        ("[2,4]<=[8]", ("model",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("mesh['data'=2,'model'=4] {'model'}", ("model",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", ("data", "model")),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ("model",)),
        ("mesh['a'=8] {'a':(1)2}", ("data",)),
        ("mesh['a'=8] {'a':(2)4}", ("model",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ()),
    ],
)
def test_groups_of_devices_as_axes(text, axes):
    (found,) = sends_of(program_from(SUM.replace("GROUPS", text)), MESH, 8)
    assert found.axes == axes


def field(number, value):
    """A field of a protocol buffer: a number, or bytes."""
    key = number << 3 | (2 if isinstance(value, bytes) else 0)
    return bytes([key & 127 | 128, key >> 7]) + (
        bytes([len(value)]) + value if isinstance(value, bytes) else bytes([value])
    )


def test_groups_along_a_mesh_of_listed_devices():
    """A mesh of 2×2 with the devices 3, 1, 2, 0: its second axis has 3 and 1, and 2 and 0."""
    axis = field(1, field(1, b"x") + field(2, 2))
    along = field(93, field(1, axis + axis + field(2, bytes([3, 1, 2, 0]))) + field(2, field(1, 1)))
    assert read_groups(proto.message(along), "c") == ((3, 1), (2, 0))
    lists = field(1, field(1, bytes([0, 1]))) + field(1, field(1, bytes([2, 3])))
    assert read_groups(proto.message(field(87, lists)), "c") == ((0, 1), (2, 3))
    rows = field(1, 2) + field(2, 2) + field(3, bytes([2, 2])) + field(4, bytes([1, 0]))
    assert read_groups(proto.message(field(92, rows)), "c") == ((0, 2), (1, 3))


def test_groups_of_no_known_form():
    assert read_groups({}, "c") == ()
    with pytest.raises(ValueError, match="the devices of c may be in a form that is not known here, field 104"):
        read_groups({104: [b""]}, "c")


def test_pairs_of_a_permutation():
    assert axes_between(((0, 4), (4, 0)), MESH) == ("data",)
    assert axes_between(((0, 5),), MESH) == ("data", "model")


def test_protocol_buffers():
    inner = bytes([8, 1, 18, 2, 104, 105])
    fields = proto.message(bytes([10, len(inner)]) + inner + bytes([26, 3, 1, 150, 1, 37, 0, 0, 0, 0]))
    (child,) = proto.nested(fields, 1)
    assert (proto.integer(child, 1), proto.text(child, 2), proto.integer(child, 9)) == (1, "hi", 0)
    assert proto.integers(fields, 3) == [1, 150]
    with pytest.raises(ValueError, match="ends within"):
        proto.message(bytes([10, 9, 1]))
    with pytest.raises(ValueError, match="a field of form 3"):
        proto.message(bytes([11]))


# What XLA writes for TPUs, cut from programs of libtpu 0.0.52: loops without a count, a sum in a fusion that keeps a
# part, one gather in three fusions, tiled layouts and axes of a mesh.
TPU = """HloModule jit_step, is_scheduled=true

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%all-reduce-scatter.1 (input: bf16[2048,128]) -> bf16[256,128] {
  %input = bf16[2048,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-reduce.1 = bf16[2048,128]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=14, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add
  %at = s32[]{:T(128)} constant(0)
  ROOT %part = bf16[256,128]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %at, %at), dynamic_slice_sizes={256,128}
}

%begins (shard: bf16[128,128]) -> (bf16[128,128], bf16[128,1024]) {
  %shard = bf16[128,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.1 = bf16[128,1024]{1,0:T(8,128)(2,1)} all-gather(%shard), channel_id=62, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={1}, backend_config={"async_collective_fusion_config":{"flag_start_iteration_bound":"0"}}
  ROOT %started = (bf16[128,128]{1,0:T(8,128)(2,1)S(1)}, bf16[128,1024]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%goes_on (shard.1: bf16[128,128]) -> bf16[256,128] {
  %shard.1 = bf16[128,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.2 = bf16[128,1024]{1,0:T(8,128)(2,1)} all-gather(%shard.1), channel_id=62, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={1}, backend_config={"async_collective_fusion_config":{"flag_start_iteration_bound":"0"}}
  ROOT %product = bf16[256,128]{1,0} convolution(%shard.1, %shard.1), dim_labels=bf_io->bf
}

%ends (shard.2: bf16[128,128]) -> bf16[128,1024] {
  %shard.2 = bf16[128,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.3 = bf16[128,1024]{1,0:T(8,128)(2,1)} all-gather(%shard.2), channel_id=62, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={1}, backend_config={"async_collective_fusion_config":{"flag_start_iteration_bound":"0"}}
  ROOT %finished = bf16[128,1024]{1,0} custom-call(%shard.2, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%body (state: (s32[], bf16[128,128])) -> (s32[], bf16[128,128]) {
  %state = (s32[]{:T(128)}, bf16[128,128]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %i.copy = s32[]{:T(128)} copy(%i)
  %w = bf16[128,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state), index=1
  %async-collective-start.1 = (bf16[128,128]{1,0}, bf16[128,1024]{1,0}) fusion(%w), kind=kCustom, calls=%begins
  %fusion.1 = bf16[256,128]{1,0} fusion(%w), kind=kOutput, calls=%goes_on, backend_config={"estimated_cycles":"1000"}
  %async-collective-done.1 = bf16[128,1024]{1,0} fusion(%w), kind=kCustom, calls=%ends
  %alone = bf16[128,128]{1,0:T(8,128)} all-reduce(%w), channel_id=20, replica_groups=mesh['axis_0'=8] {'axis_0'}, to_apply=%add
  %by = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i.copy, %by)
  ROOT %out = (s32[]{:T(128)}, bf16[128,128]{1,0}) tuple(%next, %w)
}

%condition (state.1: (s32[], bf16[128,128])) -> pred[] {
  %end = s32[]{:T(128)} constant(11)
  %state.1 = (s32[]{:T(128)}, bf16[128,128]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %end), direction=LT
}

ENTRY %main (x: bf16[2048,128], w.1: bf16[128,128]) -> bf16[256,128] {
  %x = bf16[2048,128]{1,0:T(8,128)(2,1)} parameter(0)
  %w.1 = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(1)
  %zero = s32[]{:T(128)} constant(2)
  %zero.copy = s32[]{:T(128)} copy(%zero)
  %begin = (s32[]{:T(128)}, bf16[128,128]{1,0}) tuple(%zero.copy, %w.1)
  %while.1 = (s32[]{:T(128)}, bf16[128,128]{1,0}) while(%begin), condition=%condition, body=%body
  %collective-permute-start.1 = (bf16[128,128]{1,0}, bf16[128,128]{1,0}) collective-permute-start(%w.1), channel_id=3, source_target_pairs={{0,1},{1,0}}
  %permuted = bf16[128,128]{1,0} collective-permute-done(%collective-permute-start.1)
  ROOT %fusion.2 = bf16[256,128]{1,0:T(8,128)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1, backend_config={"estimated_cycles":"70"}
}
"""  # noqa: E501


def sent(text, kind):
    return [one for one in sends_of(program_from(text), {"data": 8}, 8) if one.kind == kind]


def test_a_loop_of_a_tpu_counts_from_its_counter():
    """From 2 to 11 by 2: five times, though the constant of the condition is 11."""
    (reduce,) = sent(TPU, "all-reduce")
    assert (reduce.times, reduce.is_exact) == (5, True)
    for old, new in [("copy(%zero)", "copy(%x)"), ("add(%i.copy, %by)", "add(%i.copy, %i.copy)"), ("LT", "NE")]:
        (reduce,) = sent(TPU.replace(old, new), "all-reduce")
        assert (reduce.times, reduce.is_exact) == (1, False)


def test_a_sum_that_keeps_a_part_is_a_reduce_scatter():
    (scatter,) = sent(TPU, "reduce-scatter")
    assert (scatter.bytes, scatter.sent, scatter.axes) == (2 * 2048 * 128, 2 * 2048 * 128 * 7 // 8, ("data",))
    assert not scatter.is_overlapped


def test_a_gather_in_several_fusions_is_one_beside_compute():
    (gather,) = sent(TPU, "all-gather")
    assert (gather.bytes, gather.sent, gather.times) == (2 * 128 * 128, 7 * 2 * 128 * 128, 5)
    assert gather.is_overlapped
    compute = "%fusion.1 = bf16[256,128]{1,0} fusion(%w), kind=kOutput, calls=%goes_on"
    (gather,) = sent(TPU.replace(compute, "%none = bf16[128,128]{1,0} copy(%w)"), "all-gather")
    assert not gather.is_overlapped


def test_what_runs_between_the_halves_of_a_collective():
    (permute,) = sent(TPU, "collective-permute")
    assert not permute.is_overlapped
    assert {one.kind: one.is_overlapped for one in sends_of(program_from(GPU), MESH, 8)} == {
        "reduce-scatter": False,
        "collective-permute": False,
        "all-reduce": True,
        "all-gather": True,
        "all-to-all": False,
    }


def test_cycles_of_loops():
    assert cycles_of(program_from(TPU)) == 5 * 1000 + 70
    assert cycles_of(program_from(TPU.replace('"70"', f'"{2**63 - 1}"'))) == 5 * 1000  # no estimate
    assert cycles_of(program_from(GPU)) is None
