"""Live memory of a step: what is live, the gaps that the compiler leaves, and what is said where it does not tell."""

import functools
import types

import jax
import numpy as np
import optax
import pytest
from test_step import arguments, lenet_step, step, total, transformer_step

from jaxpar.viz._program import memory
from jaxpar.viz._program.hlo import parse


def places(compiled):
    """The places of temporaries with the times of their values: [start, end, first, last]."""
    buffers, values = memory._buffers(compiled, compiled.memory_analysis().serialized_buffer_assignment_proto)
    lives = memory._Lives(parse(compiled.as_text()), values)
    spans = sorted((one.start, one.end, lives.first(one), lives.last(one)) for one in buffers)
    merged = []  # a value in a loop has several names and one place
    for span in spans:
        if merged and merged[-1][:2] == [*span[:2]] and span[2] <= merged[-1][3] + 1:
            merged[-1][3] = max(merged[-1][3], span[3])
        else:
            merged.append([*span])
    return merged


def placed(values, order):
    """The size of an allocation with these values, each in the smallest hole that is free while it lives."""
    taken = []
    for start, end, first, last in sorted(values, key=order):
        size, holes, covered = end - start, [], 0
        for left, right, _, _ in sorted(one for one in taken if one[2] <= last and first <= one[3]):
            if left - covered >= size:
                holes.append((left - covered, covered))
            covered = max(covered, -(-right // 64) * 64)
        at = min(holes)[1] if holes else covered
        taken.append((at, at + size, first, last))
    return max(right for _, right, _, _ in taken)


def by_size(value):
    return value[0] - value[1], value[2] - value[3], value[2]


def by_time(value):
    return value[2] - value[3], value[0] - value[1], value[2]


LENETS = [(engine, tx) for engine in ("jit", "shard_map") for tx in (optax.sgd(0.1), optax.adam(1e-3))]


@pytest.mark.slow
@pytest.mark.parametrize("make", [transformer_step, *(functools.partial(lenet_step, *options) for options in LENETS)])
def test_what_is_not_live_are_gaps_of_the_placement(make):
    """The times of values that `memory_of` finds, placed by XLA's two orders, need what XLA sets aside."""
    made, args = make()
    compiled = made.lower(*args).compile()
    found, _ = memory.memory_of(parse(compiled.as_text()), compiled)
    assert found.is_exact
    assert found.total == total(compiled) == found.peak + found.gaps
    kept = found.total - compiled.memory_analysis().temp_size_in_bytes
    sizes = [kept + placed(places(compiled), order) for order in (by_size, by_time)]
    assert min(abs(size - found.total) for size in sizes) <= 0.02 * found.total
    assert min(sizes) >= found.peak


@pytest.fixture(scope="module")
def program():
    return jax.jit(step).lower(*arguments()).compile()


def test_a_value_is_live_from_the_instruction_that_fills_it_to_its_last_reader(program):
    text = parse(program.as_text())
    names = list(text.computations[text.entry].instructions)
    _, live = memory.memory_of(text, program)
    stats = program.memory_analysis()
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    buffers, _ = memory._buffers(program, stats.serialized_buffer_assignment_proto)
    for time, name in enumerate(names):
        covered = np.zeros(stats.temp_size_in_bytes, bool)
        for one in buffers:
            if names.index(one.name) <= time <= last_reader(text, names, one.name):
                covered[one.start : one.end] = True
        assert live[name] == kept + covered.sum()


def last_reader(text, names, name):
    """Of the text, without loops: views are read in place of what they show."""
    last = names.index(name)
    for other in names:
        if name in text[other].operands:
            is_view = text[other].opcode in ("bitcast", "tuple", "get-tuple-element")
            last = max(last, last_reader(text, names, other) if is_view else names.index(other))
    return last


def test_a_place_of_no_known_instruction_is_not_exact(program, monkeypatch):
    renamed = lambda module: ((number, f"{name}.other") for number, name in names(module))  # noqa: E731
    names = memory._names
    monkeypatch.setattr(memory, "_names", renamed)
    assert not memory.memory_of(parse(program.as_text()), program)[0].is_exact


def test_two_values_in_one_place_at_one_time_are_not_exact(program, monkeypatch):
    monkeypatch.setattr(memory._Lives, "last", lambda lives, buffer: len(lives.order))
    assert not memory.memory_of(parse(program.as_text()), program)[0].is_exact


def test_a_backend_that_tells_no_places(program):
    stats = program.memory_analysis()
    names = ("argument", "output", "alias", "temp")
    told = {f"{name}_size_in_bytes": getattr(stats, f"{name}_size_in_bytes") for name in names}
    sizes, executable = types.SimpleNamespace(**told), program.runtime_executable
    silent = types.SimpleNamespace(memory_analysis=lambda: sizes, runtime_executable=executable)
    found, live = memory.memory_of(parse(program.as_text()), silent)
    assert (found.total, found.peak, found.gaps, found.is_exact) == (total(program), total(program), 0, False)
    assert live == {}


LOOP = """HloModule loop, is_scheduled=true

%asks (at: (s32[], f32[4])) -> pred[] {
  %at = (s32[], f32[4]) parameter(0)
  %n = s32[] get-tuple-element(%at), index=0
  ROOT %more = pred[] compare(%n, %n), direction=LT
}

%does (was: (s32[], f32[4])) -> (s32[], f32[4]) {
  %was = (s32[], f32[4]) parameter(0)
  %m = s32[] get-tuple-element(%was), index=0
  %x = f32[4] get-tuple-element(%was), index=1
  %y = f32[4] negate(%x)
  %z = f32[4] exponential(%y)
  ROOT %next = (s32[], f32[4]) tuple(%m, %z)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  %i = s32[] constant(0)
  %a = f32[4] sine(%p)
  %both = (s32[], f32[4]) tuple(%i, %a)
  %while = (s32[], f32[4]) while(%both), condition=%asks, body=%does
  %b = f32[4] get-tuple-element(%while), index=1
  ROOT %c = f32[4] cosine(%b)
}
"""


def test_what_a_loop_carries_is_free_between_its_last_reader_and_its_next_value():
    values = {(name, 1) for name in ("at", "was", "while")} | {(name, None) for name in "payzc"}
    lives = memory._Lives(parse(LOOP), values)

    def lifetime(name, index=None):
        buffer = memory._Buffer(0, 0, 16, name, index)
        return lives.order[lives.first(buffer)], lives.order[lives.last(buffer)]

    assert lifetime("a") == ("a", "while")
    assert lifetime("at", 1) == ("at", "more")
    assert lifetime("was", 1) == ("was", "y")  # its place may hold something else here
    assert lifetime("z") == ("z", "next")
    assert lifetime("while", 1) == ("next", "c")


def test_what_a_loop_hands_on_unchanged_is_live_in_all_of_it():
    unchanged = LOOP.replace("tuple(%m, %z)", "tuple(%m, %x)")
    lives = memory._Lives(parse(unchanged), {(name, None) for name in "payzc"})
    last = lives.last(memory._Buffer(0, 0, 16, "a", None))
    assert lives.order[last] == "c"
