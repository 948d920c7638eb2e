"""Blobs made by hand that are in form but for one value that no writer writes: each is refused by name.

Without its check each is either taken for an update or ends in an error that is not `DeltaError`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import zstandard

from rollout_bridge import delta
from rollout_bridge.delta import rans, stream
from rollout_bridge.delta.blob import Reader, varint

U8 = np.dtype(np.uint8)
STREAM, PLANES = 0x50, 0x70  # first byte: version 1, mode, elements of one byte, one class
GROUP = 0x80  # version 2, elements of one byte, one class
STEP_FAMILY = bytes([0])


def plane(content: bytes) -> bytes:
    """A length and a frame, as `planes` and `group` keep bytes."""
    frame = zstandard.ZstdCompressor().compress(content)
    return varint(len(frame)) + frame


def in_planes(size: int, halves: Sequence[int], *rest: bytes) -> bytes:
    """The update of `size` elements: `halves` (16 * step + gap of each change), then other planes."""
    head = bytes([PLANES]) + varint(size) + varint(len(halves)) + b"\0"  # gaps are not split
    return head + plane(bytes(halves)) + b"".join(map(plane, rest))


def integers(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


@pytest.mark.parametrize(
    "planes",
    [
        pytest.param([[0x0F], b"\xff", integers(-20)], id="a gap of -5"),
        pytest.param([[0xF0], b"\xff", integers(-20)], id="a step of -5"),
        pytest.param([[0x0F], b"\xff", integers((1 << 63) - 1)], id="a gap past 63 bits"),
        pytest.param([[0xF0], b"\xff", integers(255)], id="a step of 270"),
        pytest.param([[0xF0], b"\xfe"], id="a step of 269"),
    ],
)
def test_integers_of_planes_are_in_range(planes: list) -> None:
    """An integer is 15 more than its byte, or than the 8 bytes that stand for it where the byte is 255."""
    with pytest.raises(delta.DeltaError, match="a decoded step or gap is out of range"):
        delta.decode(in_planes(100, *planes), np.zeros(100, U8))


def test_the_largest_integers_of_planes_are_taken() -> None:
    """A gap of 99 = 15 + 84; a step of 255 = 15 + 240 goes 128 codes towards zero and past it, from +0."""
    new = delta.decode(in_planes(100, [0xFF], bytes([240]), bytes([84])), np.zeros(100, U8))
    assert np.flatnonzero(new).tolist() == [99] and new[99] == 0xFF


def test_gaps_whose_sum_comes_round_to_a_place_inside_the_class() -> None:
    """Four gaps of 2^62 add up to 2^64, which is 0 in 64 bits: the last of the four changes would be at 3."""
    rest = (1 << 62) - 15
    blob = in_planes(100, [0x0F] * 4, b"\xff" * 4, integers(rest, rest, rest, rest))
    with pytest.raises(delta.DeltaError, match="a decoded gap is out of range"):
        delta.decode(blob, np.zeros(100, U8))


def coded(moved: int, payload: bytes) -> bytes:
    """`moved` changes with gap 0 and step 0 of one class of 100 elements, as a stream codes them."""
    models = varint(2 * moved) + STEP_FAMILY
    _, tables = stream.read_models(Reader(models), np.array([100]), 8)
    rows = np.repeat(
        np.arange(2, dtype=np.uint8), moved
    )  # each gap under the first table, each step under the second
    data = rans.encode(np.zeros(2 * moved, np.uint8), rows, np.stack(tables), lanes=1, payload=payload)
    return models + data


def test_bits_past_the_end_of_a_stream_are_clear() -> None:
    """Small gaps and steps have no extra bits, so the two bytes that the coder starts from say nothing."""
    old = np.zeros(100, U8)
    head = bytes([STREAM]) + varint(100)
    assert np.flatnonzero(delta.decode(head + coded(3, b"\0\0"), old)).tolist() == [0, 1, 2]
    for payload in (b"\1\0", b"\0\x80"):
        with pytest.raises(delta.DeltaError, match="bits are set past the end of the update"):
            delta.decode(head + coded(3, payload), old)


def grouped(sizes: Sequence[int], moved: int, counts: Sequence[int]) -> bytes:
    """A group of arrays of `sizes`, in one class, that says `counts` changes of each and codes `moved`."""
    nothing = np.zeros(moved, np.int64)
    coder = stream.Coder(nothing, nothing, *map(np.array, ([sum(sizes)], [moved])), 8)
    runs = varint(len(sizes)) + b"".join(varint(1) + varint(size) for size in sizes)
    of_arrays = varint(len(counts)) + plane(bytes(counts))
    return bytes([GROUP]) + runs + varint(sum(sizes)) + coder.models + of_arrays + coder.coded(0)


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([2, 2], id="fewer than are coded"),
        pytest.param([3, 3], id="more than are coded"),
        pytest.param([5, 0], id="more in an array than it has elements"),
    ],
)
def test_the_changes_of_the_arrays_of_a_group_add_up(counts: list[int]) -> None:
    """Five changes in two arrays of four elements."""
    sound = delta.decode_group(grouped([4, 4], 5, [2, 3]), U8)
    assert [change.indices.tolist() for change in sound.changes_of([0, 1], [np.zeros(4, U8)] * 2)] == [
        [0, 1],
        [0, 1, 2],
    ]
    with pytest.raises(
        delta.DeltaError, match="the changes of the arrays do not add up to those of the group"
    ):
        delta.decode_group(grouped([4, 4], 5, counts), U8)


def test_a_group_of_too_many_changes_is_refused_before_they_are_read() -> None:
    """2^20 go together. Changes of all elements cost next to nothing to code, and 17 bytes each in memory."""
    size = (1 << 20) + 1
    head = bytes([GROUP]) + varint(1) + varint(2) + varint(size) + varint(2 * size)
    with pytest.raises(delta.DeltaError, match="a group of 1048577 changes, at most 1048576"):
        delta.decode_group(head + varint(2 * size) + STEP_FAMILY, U8)
    with pytest.raises(delta.DeltaError, match="the blob ends"):  # one fewer: on to what is missing
        delta.decode_group(head + varint(2 * size - 2) + STEP_FAMILY, U8)


def test_a_writer_makes_no_group_of_too_many_changes() -> None:
    size = (1 << 20) + 1
    values = np.zeros(size, U8)
    change = delta.ArrayChange(np.arange(size), values, values + U8.type(1), size)
    with pytest.raises(ValueError, match="1048577 changes; at most 4096, 16777216 and 1 to 1048576"):
        delta.encode_group([change, delta.ArrayChange(*(values[:0],) * 3, size)])
