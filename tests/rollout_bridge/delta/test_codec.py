"""The delta codec: lossless, near the entropy of the update, its format fixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge import delta
from rollout_bridge.delta import classes
from rollout_bridge.quantization import host
from tests.rollout_bridge.delta.updates import PRESETS, applied, decode_all, encode_all, gaussian, updates


@settings(deadline=None, max_examples=200)
@given(updates(), PRESETS)
def test_what_is_decoded_is_what_was_encoded(update: tuple[np.ndarray, np.ndarray], preset: str) -> None:
    old, new = update
    kept = old.copy()
    blob = delta.encode(old, new, preset=preset)
    decoded = delta.decode(blob, old)
    assert decoded.dtype == new.dtype and decoded.shape == new.shape
    np.testing.assert_array_equal(decoded, new)
    np.testing.assert_array_equal(applied(old, delta.decode_sparse(blob, old)), new)
    np.testing.assert_array_equal(old, kept)
    np.testing.assert_array_equal(delta.decode_full(delta.encode_full(new), new.shape, new.dtype), new)


@settings(deadline=None, max_examples=60)
@given(st.lists(updates(), max_size=6), PRESETS)
def test_many_updates_share_a_blob(pairs: list[tuple[np.ndarray, np.ndarray]], preset: str) -> None:
    changes = [delta.ArrayChange.between(old, new) for old, new in pairs]
    decoded = decode_all(encode_all(changes, preset=preset), [old for old, _ in pairs])
    for place, (old, new) in enumerate(pairs):
        after = applied(old, decoded[place]) if place in decoded else old
        np.testing.assert_array_equal(after, new)


@pytest.mark.parametrize("preset", ["small", "fast"])
@pytest.mark.parametrize("format", ["fp8", "bf16"])
@pytest.mark.parametrize("rms", [1e-6, 1e-4, 1e-2])
def test_weight_updates_of_every_size_survive_every_way_of_writing(
    preset: str, format: str, rms: float
) -> None:
    """More than one chunk of 2**20, sparse to wholly changed; without the old array, with it, with ranks
    only.
    """
    old, new = gaussian(1100, 1000, rms, format)
    change = delta.ArrayChange.between(old, new)
    start = 112 if format == "bf16" else 0
    fine = classes.fine_classes(old.reshape(-1), start)
    ranks = np.empty(old.size, np.int64)
    for k in range(classes.CLASSES):
        ranks[fine == k] = np.arange((fine == k).sum())
    in_class = delta.ClassRanks(ranks[change.indices], np.bincount(fine, minlength=classes.CLASSES), start)
    options = {"shape": old.shape, "dtype": old.dtype, "preset": preset}
    arguments = change.indices, change.old_values, change.new_values
    plain = delta.encode_sparse(*arguments, **options)
    with_old = delta.encode_sparse(*arguments, **options, old=old)
    with_ranks = delta.encode_sparse(*arguments, **options, ranks=in_class)
    for blob in (plain, with_old, with_ranks):
        np.testing.assert_array_equal(delta.decode(blob, old), new)
    assert len(with_ranks) < len(plain)
    if preset == "small":
        assert len(with_old) <= 1.04 * len(with_ranks)


@pytest.mark.parametrize(("rms", "small", "fast"), [(1e-6, 1.08, 1.7), (1e-5, 1.07, 1.6), (1e-4, 1.05, 1.5)])
def test_large_updates_are_near_their_conditional_entropy(rms: float, small: float, fast: float) -> None:
    old, new = gaussian(1100, 1000, rms)
    reference = delta.conditional_entropy_bytes(old, new)
    assert len(delta.encode(old, new, preset="small")) <= small * reference
    assert len(delta.encode(old, new, preset="fast")) <= fast * reference


@pytest.mark.parametrize("rows", [128, 256, 512])
@pytest.mark.parametrize("rms", [3e-6, 1e-5, 1e-4, 3e-4])
def test_small_updates_cost_at_most_twice_their_entropy(rows: int, rms: float) -> None:
    """From half a percent to thirty percent changed; the entropy charges nothing for its own statistics."""
    old, new = gaussian(rows, 128, rms)
    for preset in ("small", "fast"):
        assert len(delta.encode(old, new, preset=preset)) <= 2 * delta.conditional_entropy_bytes(old, new)


@pytest.mark.parametrize(("rms", "reference", "apart"), [(1e-6, 1.16, 0.96), (1e-5, 1.09, 1.0)])
def test_many_small_updates_are_near_their_conditional_entropy(
    rms: float, reference: float, apart: float
) -> None:
    pairs = [gaussian(rows, 128, rms, seed=seed) for seed, rows in enumerate([128, 256, 384, 512] * 25)]
    together = sum(len(blob) for _, blob in encode_all([delta.ArrayChange.between(*pair) for pair in pairs]))
    entropy = delta.conditional_entropy_bytes(*(np.concatenate(bits) for bits in zip(*pairs, strict=True)))
    assert together <= reference * entropy
    assert together <= 5 * apart * sum(len(delta.encode(*pair)) for pair in pairs[::5])


def test_changes_that_cluster_get_their_own_statistics() -> None:
    """Rows of an embedding: those of tokens that occurred change, the others do not."""
    old, new = gaussian(1024, 512, 1e-4, "bf16")
    seen = np.random.default_rng(1).random(1024) < 0.03
    new = np.where(seen[:, None], new, old)
    spread = np.random.default_rng(2).permuted(np.stack([old, new], -1).reshape(-1, 2), axis=0)
    scattered = delta.encode(np.ascontiguousarray(spread[:, 0]), np.ascontiguousarray(spread[:, 1]))
    assert len(delta.encode(old, new)) < 0.8 * len(scattered)


def test_fast_tells_weights_near_zero_apart_when_they_are_those_that_change() -> None:
    """A step of one size for all, as AdamW's first are, moves the weights it is wide for: 2% of these.

    Which they are follows from their exponent; positions without classes are two thirds of the bytes.
    """
    random = np.random.default_rng(0)
    old = host.float32_to_bfloat16_bits((0.02 * random.standard_normal((512, 1024))).astype(np.float32))
    weights = (old.astype(np.uint32) << 16).view(np.float32)
    new = host.float32_to_bfloat16_bits(weights + random.choice(np.float32([-1e-6, 1e-6]), old.shape))
    assert 0.01 < (old != new).mean() < 0.03
    small, fast = (len(delta.encode(old, new, preset=preset)) for preset in ("small", "fast"))
    without = len(
        delta.encode_sparse(
            np.flatnonzero(old != new), old[old != new], new[old != new], shape=old.shape, dtype=old.dtype
        )
    )
    assert fast < without / 2 and small < fast


def test_a_block_whose_scale_moved_costs_little() -> None:
    """One 128x128 block goes one exponent down: 16,384 changes of the same eight codes."""
    old, _ = gaussian(512, 512, 1e-6)
    new = old.copy()
    new[128:256, 256:384] -= np.uint8(8)
    assert len(delta.encode(old, new)) < 16384 / 10


def test_an_unchanged_array_costs_its_header() -> None:
    old, _ = gaussian(128, 128, 1e-6)
    assert len(delta.encode(old, old.copy())) <= 4
    assert delta.together([delta.ArrayChange.between(old, old.copy())] * 10) == []


def test_unrelated_values_fall_back_to_all_of_them() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.integers(0, 256, (2, 64, 64)).astype(np.uint8)
    blob = delta.encode(old, new)
    assert isinstance(delta.decode_sparse(blob, old), delta.DenseChange)
    assert len(blob) < new.size + 32
    alike = np.zeros_like(old)
    assert len(delta.encode(old, alike)) < 40


@pytest.mark.parametrize("preset", ["small", "fast"])
def test_an_array_that_changed_wholly_is_sent_whole_also_without_the_old_one(preset: str) -> None:
    """Random bits to other random bits: more than 8 bits a change in any other form."""
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, 300_000).astype(np.uint8)
    for new in (
        old + rng.integers(1, 256, old.size).astype(np.uint8),
        ~old,
        np.where(old == 7, 8, 7).astype(np.uint8),
    ):
        change = delta.ArrayChange.between(old, new)
        values = change.indices, change.old_values, change.new_values
        blob = delta.encode_sparse(*values, shape=old.shape, dtype=old.dtype, preset=preset)
        assert len(blob) <= new.size + 64
        np.testing.assert_array_equal(delta.decode(blob, old), new)


@pytest.mark.parametrize("preset", ["small", "fast"])
def test_every_fp8_code_can_become_every_other(preset: str) -> None:
    """Both zeros, both NaN and all the others, 65,536 pairs."""
    old, new = (codes.astype(np.uint8) for codes in np.divmod(np.arange(1 << 16), 256))
    np.testing.assert_array_equal(delta.decode(delta.encode(old, new, preset=preset), old), new)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_special_values_keep_their_bits(dtype: type) -> None:
    """Zeros and infinities of both signs, quiet and signalling NaN with payloads, the smallest subnormals."""
    shift = 16 if dtype is np.uint16 else 0
    words = [
        0,
        1 << 31,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0xFFC10000,
        0x7FA50000,
        0x7FFF0000,
        0x10000,
        0x80010000,
    ]
    special = (np.array(words, np.uint32) >> np.uint32(shift)).astype(dtype)
    old, new = np.repeat(special, special.size), np.tile(special, special.size)
    for pair in ((old, new), (np.tile(old, 100), np.tile(new, 100))):
        np.testing.assert_array_equal(delta.decode(delta.encode(*pair), pair[0]), pair[1])


def test_the_format_of_version_1_does_not_move() -> None:
    """A store outlives the code that wrote to it: this blob was written when the format was fixed."""
    place = np.arange(4096, dtype=np.uint64)
    scattered = place * np.uint64(2654435761) % np.uint64(1 << 32) >> np.uint64(24)
    old = (scattered ^ place).astype(np.uint8)
    changed = (scattered * np.uint64(7) + place) % np.uint64(997) < np.where(old & 0x7F < 80, 200, 20)
    new = np.where(changed, old + np.where(place % 11 > 2, 1, place % 19).astype(np.uint8), old)
    np.testing.assert_array_equal(delta.decode(bytes.fromhex(GOLDEN), old), new)
    assert delta.encode(old, old).hex() == "408020"


GOLDEN = (
    "5180200002f207ff158a002e002a00260034002e0034003400413c3e4441360dc78f3f00cbce9d003ad51900b59e3b59"
    "cb1a89e8a85eff76d2a53bec3b1ebf5bf2acd63f3fa99b228c1ab22b6f532eca595ebee2c9997bac762b43a181b96f45"
    "868f454e5d7d4c0fd7112e431edae167b2b8dc67d1ebc9cd02c239957ddc2f1832d928953799f1112b633b31d8591309"
    "43a40f15ef7bf402bd5878934e3449855716f07eca3c52ab41eda2aa77c651ca624e97a7a59461dd3742e4668e59c9ed"
    "75a8dbf442ba0ab05356c76712286cd41e8b7eaf14148f6d079413b9cb72327610588d3e974523d9ee1d8a49a9ad035e"
    "47e2bd3964249499f20a489569db9f2ec25777147a3f287e69a55f5e9b2bcec9e62491e01eb9cae378c89a5cc15d5ffb"
    "6124499ee1700b19194733fb651fc56b8d2bcfac7f79698a97b1390099dafa69e6b35c1cef8fdc14e6f2075a2135ee58"
    "2e575d87e816cc9a54e965d382f46f23598a8814613d514f69197ce2ec83fafbab8c5ff0c37dd978a095284dc8a38612"
    "2509f82a3641a0266c9d49f300808a802aaaaa000080aaaaa0a834576105d557020409000069956ac2c5c7"
)


def test_reference_worked_by_hand() -> None:
    """Code 1: four elements, one goes to 2, one to 3: 4 * 1.5 bits. Code 5: two, one changes: 2 bits. Code 9:
    none.
    """
    old = np.array([1, 1, 1, 1, 5, 5, 9], np.uint8)
    new = np.array([1, 2, 1, 3, 5, 6, 9], np.uint8)
    assert delta.conditional_entropy_bytes(old, new) == pytest.approx((4 * 1.5 + 2) / 8)
    changed = np.flatnonzero(old != new)
    counts = np.bincount(old, minlength=256)
    assert delta.conditional_entropy_bytes_sparse(counts, old[changed], new[changed]) == pytest.approx(1.0)
    assert delta.conditional_entropy_bytes(old, old) == 0
    everything = np.array([2, 3, 2, 3, 5, 5, 9], np.uint8)
    assert delta.conditional_entropy_bytes(old, everything) == pytest.approx(4 / 8)


def test_arguments_that_are_no_update_are_refused() -> None:
    one, two = np.zeros(4, np.uint8), np.ones(4, np.uint8)
    with pytest.raises(ValueError, match=r"uint8\[4\] -> uint8\[5\]"):
        delta.encode(one, np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match="float32"):
        delta.encode(one.astype(np.float32), two.astype(np.float32))
    with pytest.raises(ValueError, match="tiny"):
        delta.encode(one, two, preset="tiny")
    options = {"shape": (4,), "dtype": np.uint8}
    for bad in ([1, 1], [2, 1], [3, 4], [-1, 0]):
        with pytest.raises(ValueError, match=r"ascending within \[0, 4\)"):
            delta.encode_sparse(np.array(bad), one[:2], two[:2], **options)
    with pytest.raises(ValueError, match="keeps its value"):
        delta.encode_sparse(np.array([1]), one[:1], one[:1], **options)
    with pytest.raises(ValueError, match="2 indices, 1 old"):
        delta.encode_sparse(np.array([1, 2]), one[:1], two[:2], **options)
    with pytest.raises(ValueError, match="the old array is"):
        delta.encode_sparse(np.array([1]), one[:1], two[:1], **options, old=np.zeros(5, np.uint8))
