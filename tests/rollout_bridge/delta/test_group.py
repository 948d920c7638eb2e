"""Updates that share a blob: each decodes alone, whatever the blob says costs bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge import delta
from rollout_bridge.delta import classes, group
from tests.rollout_bridge.delta.updates import PRESETS, applied, gaussian, updates


@settings(deadline=None, max_examples=60)
@given(st.lists(updates(), min_size=1, max_size=6), PRESETS, st.randoms())
def test_any_array_decodes_alone_in_any_order(
    pairs: list[tuple[np.ndarray, np.ndarray]], preset: str, random: st.random.Random
) -> None:
    changes = [delta.ArrayChange.between(old, new) for old, new in pairs]
    for members in delta.together(changes):
        assert len({pairs[place][0].dtype for place in members}) == 1
        if len(members) == 1:
            continue
        blob = delta.encode_group([changes[place] for place in members], preset=preset)
        decoded = delta.decode_group(blob, pairs[members[0]][0].dtype)
        for number in random.sample(range(len(members)), len(members)):
            old, new = pairs[members[number]]
            np.testing.assert_array_equal(applied(old, decoded.change(number, old)), new)


@pytest.mark.parametrize("known", ["old", "ranks", "nothing"])
@pytest.mark.parametrize("format", ["fp8", "bf16"])
def test_whatever_the_writer_knows_the_reader_finds_the_same(known: str, format: str) -> None:
    pairs = [gaussian(rows, 40, 1e-4, format, seed=rows) for rows in (30, 31, 31, 64)]
    start = 0 if format == "fp8" else 112
    changes = []
    for old, new in pairs:
        change = delta.ArrayChange.between(old, new)
        fine = classes.fine_classes(old.reshape(-1), start)
        ranks = np.array([(fine[:place] == fine[place]).sum() for place in change.indices])
        changes.append(
            delta.ArrayChange(
                change.indices,
                change.old_values,
                change.new_values,
                change.size,
                old if known == "old" else None,
                delta.ClassRanks(ranks, np.bincount(fine, minlength=16), start) if known == "ranks" else None,
            )
        )
    assert delta.together(changes) == [[0, 1, 2, 3]]
    decoded = delta.decode_group(delta.encode_group(changes), pairs[0][0].dtype)
    assert decoded.changes == sum(len(change.indices) for change in changes)
    for number, (old, new) in enumerate(pairs):
        np.testing.assert_array_equal(applied(old, decoded.change(number, old)), new)


def test_arrays_that_change_far_more_often_are_apart_and_large_ones_alone() -> None:
    """Bounds of `together`: a factor of four, 2**20 elements, 2**20 changes a blob."""

    def change(size: int, moved: int) -> delta.ArrayChange:
        values = np.zeros(moved, np.uint8)
        return delta.ArrayChange(np.arange(moved), values, values + np.uint8(1), size)

    assert delta.together([change(1000, 10), change(1000, 41), change(1000, 39), change(1000, 0)]) == [
        [0, 2],
        [1],
    ]
    assert delta.together([change(100, 1), change(1 << 20, 10486), change(100, 1)]) == [[0, 2], [1]]
    many = [change(600_000, 600_000), change(600_000, 600_000), change(10, 10)]
    assert delta.together(many) == [[0], [1, 2]]


def test_a_reader_refuses_what_would_cost_it_more_than_a_group_may() -> None:
    pairs = [gaussian(16, 40, 1e-3, seed=seed) for seed in range(3)]
    blob = delta.encode_group([delta.ArrayChange.between(*pair) for pair in pairs])
    assert blob[0] >> 6 == group.VERSION and blob[1:5] == bytes([1, 3, 0x80, 5])
    huge = bytes([0xFF, 0xFF, 0xFF, 0xFF, 0x0F])
    for damaged, message in (
        (blob[:1] + bytes([1]) + huge + b"\x00", "arrays and 0 elements"),
        (blob[:1] + bytes([1, 3]) + huge, "elements or more"),
        (blob[:1] + bytes([1, 3, 0x80, 6]) + blob[5:], "do not add up"),
        (bytes([blob[0] & 0x3F | 1 << 6]) + blob[1:], "codec version 2"),
        (blob + b"\0", "follow the end"),
    ):
        with pytest.raises(delta.DeltaError, match=message):
            delta.decode_group(damaged, np.dtype(np.uint8))
    for length in range(len(blob)):
        with pytest.raises(delta.DeltaError):
            delta.decode_group(blob[:length], np.dtype(np.uint8))
    with pytest.raises(delta.DeltaError, match="the tensor is uint16"):
        delta.decode_group(blob, np.dtype(np.uint16))
    sound = delta.decode_group(blob, np.dtype(np.uint8))
    for number, old in ((3, pairs[0][0]), (0, pairs[0][0][1:]), (0, pairs[0][0].astype(np.uint16))):
        with pytest.raises(delta.DeltaError, match="another tensor"):
            sound.change(number, old)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_mutated_groups_give_an_error_or_changes_in_range(data: st.DataObject) -> None:
    pairs = [gaussian(16, 40, 1e-3, seed=seed) for seed in range(4)]
    blob = bytearray(delta.encode_group([delta.ArrayChange.between(*pair) for pair in pairs]))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.one_of(st.integers(0, 40), st.integers(0, len(blob) - 1)))
        blob[place] = data.draw(st.integers(0, 255))
    for number, (old, _) in enumerate(pairs):
        try:
            change = delta.decode_group(bytes(blob), old.dtype).change(number, old)
        except delta.DeltaError:
            continue
        assert applied(old, change).shape == old.shape


def test_the_format_of_version_2_does_not_move() -> None:
    """A store outlives the code that wrote to it: this blob was written when the format was fixed."""
    place = np.arange(4096, dtype=np.uint64)
    scattered = place * np.uint64(2654435761) % np.uint64(1 << 32) >> np.uint64(24)
    old = (scattered ^ place).astype(np.uint8)
    changed = (scattered * np.uint64(7) + place) % np.uint64(997) < np.where(old & 0x7F < 80, 60, 9)
    new = np.where(changed, old + np.where(place % 11 > 2, 1, place % 19).astype(np.uint8), old)
    decoded = delta.decode_group(bytes.fromhex(GOLDEN), np.dtype(np.uint8))
    assert decoded.sizes.tolist() == [1024, 1024, 2048]
    for number, part in enumerate((slice(0, 1024), slice(1024, 2048), slice(2048, 4096))):
        np.testing.assert_array_equal(applied(old[part], decoded.change(number, old[part])), new[part])


GOLDEN = (
    "810202800801801000028014800cb00262140d060f28b52ffd200631000026274b010405b412fb373fb976ab72105005"
    "d327114aa5d3b62a21eca4526ce922e77efe4914b3d87a7b12616cd55bb1a6d2e9cd15211cfe13112b113314dd3b27b4"
    "f3157f7e8fec02e3611f15f34fa3d8f48d56b04f8d3647663fb54f8e94ce4d54eb201ce3fbe3aa88ba48bd55b64f47cc"
    "b987340a2c82e00488fa4b71e382b487224c2b4f26d47012080dd103f303304d16fb9113e5d4faf7e4b8d3400165d9d2"
    "81aaaa0aa02ae0056dce6d2c240c48b8406c887d1a"
)
