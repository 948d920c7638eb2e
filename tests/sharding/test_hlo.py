"""HLO text: the three notations of device groups, and payloads and execution counts, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.errors import ShardingError
from sharding.hlo import instructions, parse_groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}, dimensions={0}", [[0, 1], [2, 3]]),
        ("{}, to_apply=%add", [[0, 1, 2, 3]]),
        ("[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("[4,2]<=[2,4]T(1,0), x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}, x", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        # an axis of 8 = 2 x 2 x 2, and the group spans the middle part
        ("mesh['a'=8] {'a':(2)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}, x", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'x'}, x", [[0, 1], [2, 3]]),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}, x", [[0, 2], [1, 3]]),
    ],
)
def test_groups(text, groups):
    assert parse_groups(text, 4).tolist() == groups


@pytest.mark.parametrize("text", ["<2x2>", "mesh['a'=2] nothing", "{{0,1},{2}}", "[2,2]<=(4)"])
def test_unknown_groups_are_an_error_and_not_a_guess(text):
    with pytest.raises(ShardingError, match="device groups"):
        parse_groups(text, 4)


@given(st.data())
def test_iota_and_mesh_notation_of_the_same_axes_agree(data):
    """Reduction over some axes of a mesh: its iota form has the kept axes first, then the reduced."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    reduced = data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1))
    order = [axis for axis in range(len(sizes)) if axis not in reduced] + sorted(reduced)
    width = math.prod(sizes[axis] for axis in reduced)
    total = math.prod(sizes)
    shape = ",".join(map(str, sizes))
    iota = f"[{total // width},{width}]<=[{shape}]T({','.join(map(str, order))})"
    axes = ",".join(f"'x{i}'={size}" for i, size in enumerate(sizes))
    mesh = f"mesh[{axes}] {{{','.join(f'{chr(39)}x{i}{chr(39)}' for i in sorted(reduced))}}}"
    found = parse_groups(iota, total)
    np.testing.assert_array_equal(found, parse_groups(mesh, total))
    assert sorted(found.reshape(-1).tolist()) == list(range(total))


MODULE = """HloModule jit_step, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (p: bf16[8,4]) -> bf16[2,4] {
  %all-reduce.9 = bf16[8,4]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = bf16[2,4]{1,0} dynamic-slice(%all-reduce.9, %i)
}

%inner (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %permute-start = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %tuple.1 = (s32[], f32[8]{0}) tuple(%i, %x)
}

%inner_condition (t: (s32[], f32[8])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[]{:T(512)} compare(%counter, %constant.1), direction=LT
}

%outer (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %loop.2 = (s32[], f32[8]{0}) while(%t), condition=%inner_condition, body=%inner
  %rs = f32[2,3]{1,0} reduce-scatter(%z), channel_id=2, replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%add
  ROOT %tuple.2 = (s32[], f32[8]{0}) tuple(%i, %x)
}

%outer_condition (t: (s32[], f32[8])) -> pred[] {
  ROOT %lt.1 = pred[] compare(%counter, %limit), direction=LT
}

%unknown (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %broadcast = (f32[2]{0}, s4[3]{0}) all-to-all(%a, %b), channel_id=3, replica_groups={{0,2},{1,3}}
}

%dead (p: f32[4]) -> f32[4] {
  ROOT %never = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}

ENTRY %main (p: bf16[8,4]) -> bf16[2,4] {
  %gather-start = ((f32[2]{0}, pred[4]{0}), (f32[8]{0}, pred[16]{0})) all-gather-start(%a, %b), replica_groups={{0,1,2,3}}
  %gather-done = (f32[8]{0}, pred[16]{0}) all-gather-done(%gather-start)
  %loop.1 = (s32[], f32[8]{0}) while(%t), condition=%outer_condition, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %loop.3 = (s32[], f32[8]{0}) while(%t), condition=%outer_condition, body=%unknown
  ROOT %fusion = bf16[2,4]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(step)/x"}
}
"""  # noqa: E501


def test_kinds_payloads_and_executions_by_hand():
    found = {i.name: (i.kind, i.bytes, i.executions) for i in instructions(MODULE)}
    assert found == {
        # TPU's fused form: an operand of 8 x 4 bfloat16
        "all-reduce.9": ("reduce-scatter", 64, 1),
        # the second of (operand, result, context, context); 3 x 5 iterations, the 5 read from the condition
        "permute-start": ("collective-permute", 32, 15),
        # the operand is twice the result of 2 x 3 float32, as groups have two devices
        "rs": ("reduce-scatter", 48, 3),
        # 8 bytes of float32 and 12 bits of int4, in a loop nothing is known about
        "broadcast": ("all-to-all", 10, None),
        # 8 float32 and 16 booleans
        "gather-start": ("all-gather", 48, 1),
    }


def test_text_without_an_entry_is_refused():
    with pytest.raises(ShardingError, match="no ENTRY"):
        instructions("not hlo")
