"""The form for many changes, also where the codec would not choose it: round trips, damage, format."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge import delta
from rollout_bridge.delta import places, planes
from rollout_bridge.delta.blob import varint
from tests.rollout_bridge.delta.updates import gaussian, updates

EFFORTS = st.sampled_from([None, *places.Effort])


def encoded(old: np.ndarray, new: np.ndarray, effort: places.Effort | None) -> tuple[int, bytes]:
    """(flags, body) of the update of flat `old`, in one class or by class."""
    indices = np.flatnonzero(old != new)
    values = old[indices], new[indices]
    if effort is None:
        return planes.encode(places.of_whole(indices, *values, old.size))
    return planes.encode(places.by_class(indices, *values, old, effort))


def decoded(flags: int, body: bytes, old: np.ndarray) -> np.ndarray:
    found = planes.decode(flags, body, old)
    for part in found[0]:
        assert (np.diff(part) > 0).all()
    indices, values = places.ascending(*found, old.size)
    assert (np.diff(indices) > 0).all()
    new = old.copy()
    new[indices] = values
    return new


@settings(deadline=None, max_examples=200)
@given(updates(), EFFORTS)
def test_what_is_decoded_is_what_was_encoded(
    update: tuple[np.ndarray, np.ndarray], effort: places.Effort | None
) -> None:
    """Gaps and steps past the half byte and past the byte included: unrelated 32-bit patterns."""
    old, new = (array.reshape(-1) for array in update)
    if np.array_equal(old, new):
        return
    np.testing.assert_array_equal(decoded(*encoded(old, new, effort), old), new)


@pytest.mark.parametrize("gap", [0, 1, 14, 15, 16, 269, 270, 271, 70_000])
@pytest.mark.parametrize("step", [1, 7, 8, 135, 136, 1000])
def test_gaps_and_steps_at_every_border_of_the_format(gap: int, step: int) -> None:
    """A regular gap and one longer by a million: 15 of a half byte, 255 of a byte."""
    old = np.full(3_000_000, 0x3F80, np.uint16)
    new = old.copy()
    new[: 1_500_000 : gap + 1][:20] += np.uint16(step)
    new[2_900_000] -= np.uint16(step)
    for effort in (None, places.Effort.two):
        np.testing.assert_array_equal(decoded(*encoded(old, new, effort), old), new)


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(["fp8", "bf16"]), st.sampled_from([1e-5, 1e-3]), EFFORTS, st.data())
def test_mutated_bodies_give_an_error_or_an_array(
    format: str, rms: float, effort: places.Effort | None, data: st.DataObject
) -> None:
    old, new = (array.reshape(-1) for array in gaussian(40, 50, rms, format))
    flags, body = encoded(old, new, effort)
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(
            st.one_of(st.integers(0, min(24, len(damaged) - 1)), st.integers(0, len(damaged) - 1))
        )
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        found = decoded(flags, bytes(damaged), old)
    except delta.DeltaError:
        return
    assert found.shape == old.shape and found.dtype == old.dtype


def test_every_truncation_and_extension_is_seen() -> None:
    old, new = (array.reshape(-1) for array in gaussian(40, 50, 1e-4))
    flags, body = encoded(old, new, places.Effort.all)
    for damaged in [*(body[:length] for length in range(len(body))), body + b"\0"]:
        with pytest.raises(delta.DeltaError):
            planes.decode(flags, damaged, old)
    with pytest.raises(delta.DeltaError, match="upgrade"):
        planes.decode(flags | 2, body, old)


def test_a_small_body_cannot_make_a_reader_expand_it() -> None:
    """A plane of 256 MiB of zeros where 64 bytes are due is refused unread."""
    old = np.arange(64, dtype=np.uint8)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    tracemalloc.start()
    for body in (
        varint(64) + b"\0" + varint(len(bomb)) + bomb,
        varint(1 << 40) + b"\0",
        varint(64) + b"\xff",
    ):
        with pytest.raises(delta.DeltaError):
            planes.decode(0, body, old)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_the_format_does_not_move() -> None:
    """A store outlives the code that wrote to it: this blob was written when the format was fixed."""
    place = np.arange(20_000, dtype=np.uint64)
    old = (place * np.uint64(2654435761) % np.uint64(1 << 32) >> np.uint64(24)).astype(np.uint8)
    changed = place % 4 == np.where(place % 1000 < 500, 0, 1)
    new = np.where(changed, old + np.where(place % 900 == 0, 40, 1).astype(np.uint8), old)
    blob = bytes.fromhex(GOLDEN)
    assert blob[0] >> 4 & 3 == 3
    np.testing.assert_array_equal(delta.decode(blob, old), new)


GOLDEN = (
    "71a09c010040cc2401dcdddfdddfddbdbb7b7777eeeedccdbdbb7b7777eeeedcddbdbb7b7777eaeedcddbdbb7b77f777"
    "f777f77757efeededdfdddfdddddbbbb7777e7ecceddddbbbb7777e7eeceddddbb3b7777e7eecedd9dbbbb7777efeefe"
    "feceddddbbbb7777e7eeceddddbbbb7377e7eeceddddbbbb7777e7eeceddfcddddbbbb7777e7eeceddddbbbb5777e7ee"
    "ceddddbbbb7777e7eeceddd5bbbb77777f777f77f7eeeedddd3bbbbfbbbfbb7b77f7eeeedcddb9bb7377f7eeeedcddb9"
    "bb7b77f7eeeeefefdcddbdbb7b77f777f777f77777e7eededd9dbb3b7777efeededd9dbb397777efeededd9dbb3b7777"
    "efee5edd9dbb3b7777eeeededdbdbb3b7757eeeededdbdbb3b7777eeeededdbdb3fbbbfbbbbb7777efeecedd9dbbbb77"
    "77efeededd9dbb3b7777efeedefd9dbb3b7777efeededdfdddfddddddfddbbbbbfbbbfbb7b77f7eeeedd9d7377e7eeee"
    "ddddbbbb7377e7eeeee5eeddddb9bb7377f7eeeedddddfdd7277f7eeeeddddb9bb7377e7eeee9deeddddb9bb7377f7ee"
    "eeddddb9bbe3eeeeddddbbbb7377e7eeeeddddbbdfb9bb7377e7eeeeddddbbbb7377e7efeeddddbbbbbfbbbfbb7b77f7"
    "eefeefeeefeededdbdbb3b7777eeeedcdcbdbb7b7777eeeedcddbdbb7b7737eeeedcddbdbb7b77f777f77777efeadedd"
    "9dbb3b7777efeededdbdbb3b7677eeeededdbdbb3b7777eeeede9dbdbb3b7777eeeededdbdbb3b7777feeededdbdbb3b"
    "7777eeeedcddbdbb7f77f777f77777efeededd9dbb3b3777efeededd9dbb3b7777efeededd8dbb3b7777eeeededdbdbb"
    "fbbbfbbbba7777efeefeeefeeeeeddddbbbb03f70228b52ffd604c116d0b0012ca0e10c015d201feffffffffffff5fb3"
    "25492dbf6d62a66d1354d8426b0b193653a3b66d8bbddaa69928448886664262d8cc580b4cdbb63926b66d664180cba8"
    "00f5cc0150238dd20112e090388e83388802711424843042848410013184904046446a541e85fe9c18b60e3bfb6540d6"
    "735099b644584be8a5bdd9c5630819e8e8b829bb722283f8010801ea99ba7aed6ca52ab08428433db8f46c00d64ee67c"
    "f11ef4dc41751dc17a7b81ab2712210a7b418ba422841855e73681d1f94fe69a00500eca66ef05da4a0f61622b8662cb"
    "cc12b45dbb5e59cef594600efe499acbb18bc8c0ed1f399242c35a76ac2df52abd3eaaac26ba0a689ca56e3160d76cd6"
    "4693a6ad970172bdb99e396a40a8cb71db8f67bee3d700c32966f00998b5f2078b6af748ca286bbde78cd5107b0ecad3"
    "93d66e91497a13e5f0e98f5dec66ab49c9dda017a06ea3920b4db76e13a26581300203b0f71379ad87e5a66798a2a034"
    "74406ba18ce53bb803363dc81428b52ffd200b5900003fca3fa23f3f3fee3fc63fbc0200810128b52ffd603c00bd0300"
    "b2880f10c0251dfcfffffffffffff704ec24a30c6a9679a6b1fcf5505f8581ae7ff435bc86f87a58970558af8c4c07ba"
    "2c53067855a6ffeb5996e9ea6bac665902160060305c2cb0d9c031e7016130240b721b4d5e3285689899431292b74150"
    "048fe198c6ad374c032ed64286003732eb808bf16c3a012728b52ffd202af50000b0f0eff0eff0f0efeff0eff0efeff0"
    "f0efeff0f0efeff0020060c092dd12"
)
