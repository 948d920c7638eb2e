"""The delta codec: lossless, bounded on hostile input, and near the entropy of the update."""

from __future__ import annotations

import contextlib
import functools
import math

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollout_bridge import delta
from rollout_bridge.delta import classes, models, rans, symbols
from rollout_bridge.quantization import host

DTYPES = st.sampled_from([np.uint8, np.uint16, np.uint32])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12)
PRESETS = st.sampled_from(["small", "fast"])


@st.composite
def updates(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Old and new bits: unrelated, equal, one code apart here and there, or changed in one stretch."""
    dtype, shape = draw(DTYPES), draw(SHAPES)
    old = draw(hnp.arrays(dtype, shape))
    kind = draw(st.sampled_from(["unrelated", "equal", "steps", "stretch"]))
    if kind == "unrelated":
        return old, draw(hnp.arrays(dtype, shape))
    new = old.copy().reshape(-1)
    if kind == "steps" and old.size:
        places = draw(st.lists(st.integers(0, old.size - 1), max_size=20))
        new[places] ^= 1
    if kind == "stretch" and old.size:
        start = draw(st.integers(0, old.size - 1))
        new[start : start + draw(st.integers(0, 50))] += np.array(8, dtype)
    return old, new.reshape(shape)


def _applied(old: np.ndarray, change: delta.SparseChange | delta.Dense) -> np.ndarray:
    if isinstance(change, delta.Dense):
        return change.values
    assert change.indices.dtype == np.int64
    assert (np.diff(change.indices) > 0).all()
    new = old.copy()
    new.reshape(-1)[change.indices] = change.values
    return new


@functools.cache
def gaussian(
    rows: int, columns: int, rms: float, format: str = "fp8", seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Bits of weights of deviation 0.02 before and after an update of the given root mean square."""
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((rows, columns)) * 0.02).astype(np.float32)
    moved = weights + (rng.standard_normal((rows, columns)) * rms).astype(np.float32)
    before, after = host.float32_to_bfloat16_bits(weights), host.float32_to_bfloat16_bits(moved)
    if format == "bf16":
        return before, after
    return host.quantize_block_fp8(before)[0], host.quantize_block_fp8(after)[0]


@settings(deadline=None, max_examples=200)
@given(updates(), PRESETS)
def test_what_is_decoded_is_what_was_encoded(update: tuple[np.ndarray, np.ndarray], preset: str) -> None:
    old, new = update
    kept = old.copy()
    blob = delta.encode(old, new, preset=preset)
    decoded = delta.decode(blob, old)
    assert decoded.dtype == new.dtype and decoded.shape == new.shape
    np.testing.assert_array_equal(decoded, new)
    np.testing.assert_array_equal(_applied(old, delta.decode_sparse(blob, old)), new)
    np.testing.assert_array_equal(old, kept)
    np.testing.assert_array_equal(delta.decode_full(delta.encode_full(new), new.shape, new.dtype), new)


@settings(deadline=None, max_examples=60)
@given(st.lists(updates(), max_size=6), PRESETS)
def test_many_updates_share_a_blob(pairs: list[tuple[np.ndarray, np.ndarray]], preset: str) -> None:
    changes = [delta.ArrayChange.between(old, new) for old, new in pairs]
    decoded = delta.decode_many(delta.encode_many(changes, preset=preset), [old for old, _ in pairs])
    assert len(decoded) == len(pairs)
    for (old, new), change in zip(pairs, decoded, strict=True):
        np.testing.assert_array_equal(_applied(old, change), new)


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
        assert len(with_old) <= 1.01 * len(with_ranks)


@pytest.mark.parametrize(("rms", "small", "fast"), [(1e-6, 1.08, 1.7), (1e-5, 1.05, 1.6), (1e-4, 1.05, 1.5)])
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


def test_shared_statistics_are_smaller_than_apart() -> None:
    pairs = [gaussian(rows, 128, 3e-6, seed=seed) for seed, rows in enumerate([128, 256, 384, 512] * 5)]
    together = len(delta.encode_many([delta.ArrayChange.between(*pair) for pair in pairs]))
    assert together < 0.96 * sum(len(delta.encode(*pair)) for pair in pairs)
    assert together <= 1.35 * sum(delta.conditional_entropy_bytes(*pair) for pair in pairs)


def test_changes_that_cluster_get_their_own_statistics() -> None:
    """Rows of an embedding: those of tokens that occurred change, the others do not."""
    old, new = gaussian(1024, 512, 1e-4, "bf16")
    seen = np.random.default_rng(1).random(1024) < 0.03
    new = np.where(seen[:, None], new, old)
    spread = np.random.default_rng(2).permuted(np.stack([old, new], -1).reshape(-1, 2), axis=0)
    scattered = delta.encode(np.ascontiguousarray(spread[:, 0]), np.ascontiguousarray(spread[:, 1]))
    assert len(delta.encode(old, new)) < 0.8 * len(scattered)


def test_a_block_whose_scale_moved_costs_little() -> None:
    """One 128x128 block goes one exponent down: 16,384 changes of the same eight codes."""
    old, _ = gaussian(512, 512, 1e-6)
    new = old.copy()
    new[128:256, 256:384] -= np.uint8(8)
    assert len(delta.encode(old, new)) < 16384 / 10


def test_an_unchanged_array_costs_its_header() -> None:
    old, _ = gaussian(128, 128, 1e-6)
    assert len(delta.encode(old, old.copy())) <= 4
    assert len(delta.encode_many([delta.ArrayChange.between(old, old.copy())] * 10)) <= 11


def test_unrelated_values_fall_back_to_all_of_them() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.integers(0, 256, (2, 64, 64)).astype(np.uint8)
    blob = delta.encode(old, new)
    assert isinstance(delta.decode_sparse(blob, old), delta.Dense)
    assert len(blob) < new.size + 32
    alike = np.zeros_like(old)
    assert len(delta.encode(old, alike)) < 40


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


# Hostile and damaged blobs.


def _sound(old: np.ndarray, new: np.ndarray) -> list[bytes]:
    change = delta.ArrayChange.between(old, new)
    wide = delta.encode_sparse(
        change.indices, change.old_values, change.new_values, shape=old.shape, dtype=old.dtype, preset="fast"
    )
    return [delta.encode(old, new), wide, delta.encode_full(new)]


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(["fp8", "bf16"]), st.sampled_from([1e-5, 1e-3]), st.integers(0, 2), st.data())
def test_mutated_blobs_give_an_error_or_an_array(
    format: str, rms: float, form: int, data: st.DataObject
) -> None:
    old, new = gaussian(40, 50, rms, format)
    blob = bytearray(_sound(old, new)[form])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.one_of(st.integers(0, min(24, len(blob) - 1)), st.integers(0, len(blob) - 1)))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                blob[place] = data.draw(st.integers(0, 255))
            case "cut":
                del blob[place : place + data.draw(st.integers(1, 8))]
            case _:
                blob[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        if not blob:
            break
    try:
        decoded = delta.decode(bytes(blob), old)
    except delta.DeltaError:
        return
    assert decoded.shape == old.shape and decoded.dtype == old.dtype


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=60), st.sampled_from([0x40, 0x50, 0x51, 0x52, 0x53, 0x60, None]))
def test_noise_gives_an_error_or_an_array(noise: bytes, first: int | None) -> None:
    old = np.arange(200, dtype=np.uint8)
    blob = noise if first is None else bytes([first, 200, 1]) + noise
    for read in (delta.decode, delta.decode_sparse, lambda b, o: delta.decode_full(b, o.shape, o.dtype)):
        with contextlib.suppress(delta.DeltaError):
            read(blob, old)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_mutated_shared_blobs_give_an_error_or_changes_in_range(data: st.DataObject) -> None:
    pairs = [gaussian(16, 40, 1e-3, seed=seed) for seed in range(4)]
    blob = bytearray(delta.encode_many([delta.ArrayChange.between(*pair) for pair in pairs]))
    blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        changes = delta.decode_many(bytes(blob), [old for old, _ in pairs])
    except delta.DeltaError:
        return
    for (old, _), change in zip(pairs, changes, strict=True):
        assert _applied(old, change).shape == old.shape


def test_every_truncation_and_extension_is_seen() -> None:
    old, new = gaussian(40, 50, 1e-4)
    for blob in _sound(old, new):
        for length in range(len(blob)):
            with pytest.raises(delta.DeltaError):
                delta.decode(blob[:length], old)
        with pytest.raises(delta.DeltaError):
            delta.decode(blob + b"\0", old)


def test_a_blob_of_another_array_is_refused() -> None:
    old, new = gaussian(40, 50, 1e-4)
    for blob in _sound(old, new):
        with pytest.raises(delta.DeltaError, match="2000 elements of 1 bytes, the array has 1950"):
            delta.decode(blob, old[1:])
        with pytest.raises(delta.DeltaError, match="the array has 2000 of 2"):
            delta.decode(blob, old.astype(np.uint16))
        with pytest.raises(delta.DeltaError, match="codec version 0"):
            delta.decode(bytes([blob[0] & 0x3F]) + blob[1:], old)
    with pytest.raises(delta.DeltaError, match="an update"):
        delta.decode_full(delta.encode(old, new), old.shape, old.dtype)


def test_a_small_blob_cannot_make_a_reader_expand_it_past_the_array() -> None:
    """16 MiB of zeros in a few hundred bytes, presented as an array of 64."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(delta.DeltaError, match="announces 16777216"):
        delta.decode_full(bytes([0x60, 64]) + bomb, (64,), np.uint8)
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24))
    with pytest.raises(delta.DeltaError):
        delta.decode_full(bytes([0x60, 64]) + hidden, (64,), np.uint8)
    groups = bytes([1]) + b"\x01" * 40 + b"\x00"
    many = [np.broadcast_to(np.uint8(0), (1 << 20,))] * 40
    with pytest.raises(delta.DeltaError):
        delta.decode_many(groups, many)


# Wrong arguments.


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


# The parts.


@given(hnp.arrays(np.int64, st.integers(0, 50), elements=st.integers(0, (1 << 48) - 1)))
def test_integers_survive_as_symbols_and_extra_bits(values: np.ndarray) -> None:
    coded = symbols.symbols_of(values)
    extra = symbols.pack_extra(values, coded)
    assert len(extra) == symbols.extra_size(coded)
    np.testing.assert_array_equal(symbols.unpack_extra(extra, coded), values)


@given(DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, (2, 30))))
def test_steps_lead_from_old_to_new(pair: np.ndarray) -> None:
    old, new = pair[:, pair[0] != pair[1]]
    np.testing.assert_array_equal(symbols.apply_steps(old, symbols.steps_between(old, new)), new)


def test_neighbouring_numbers_are_one_step_apart() -> None:
    """e4m3fn codes in the order of their values: away from zero is step 0, towards and through it step 1."""
    rising = np.array([0x8A, 0x89, 0x81, 0x80, 0x00, 0x01, 0x02], np.uint8)
    assert symbols.steps_between(rising[[1, 3, 4, 5]], rising[[0, 2, 5, 6]]).tolist() == [0] * 4
    assert symbols.steps_between(rising[[0, 2, 3, 4, 5]], rising[[1, 3, 4, 3, 4]]).tolist() == [1] * 5
    assert symbols.steps_between(rising[[2, 5]], rising[[5, 2]]).tolist() == [5, 5]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 400), st.integers(1, 40))
def test_the_coder_returns_symbols_and_payload(seed: int, rows: int, count: int, lanes: int) -> None:
    rng = np.random.default_rng(seed)
    tables = models.quantize(rng.dirichlet(np.full(models.ALPHABET, 0.05), rows), 100)
    chosen = rng.integers(0, rows, count).astype(np.uint8)
    coded = rng.integers(0, 100, count).astype(np.uint8)
    payload = rng.bytes(lanes * rans.PAYLOAD_BYTES)
    data = rans.encode(coded, chosen, tables, lanes=lanes, payload=payload)
    found = rans.decode(data + b"rest", chosen, tables, lanes=lanes)
    np.testing.assert_array_equal(found.symbols, coded)
    assert (found.payload, found.size) == (payload, len(data))


def test_the_coder_reaches_the_entropy_of_its_tables() -> None:
    rng = np.random.default_rng(0)
    table = models.geometric(1 << 20, 50_000)[None]
    coded = rng.choice(models.ALPHABET, 20_000, p=table[0] / rans.TOTAL).astype(np.uint8)
    ideal = models.cost(np.bincount(coded, minlength=models.ALPHABET), table[0]) / 8
    lanes = 64
    payload = bytes(lanes * rans.PAYLOAD_BYTES)
    size = len(rans.encode(coded, np.zeros_like(coded), table, lanes=lanes, payload=payload)) - len(payload)
    assert ideal - 4 * lanes < size < 1.002 * ideal + 2 * lanes


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), DTYPES, st.integers(1, 2000), st.integers(0, classes.ALL_CLASSES))
def test_ranks_count_earlier_members_and_positions_invert_them(
    seed: int, dtype: type, size: int, mask: int
) -> None:
    """Oracle: counting one by one."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(dtype).max, size, endpoint=True).astype(dtype)
    start = classes.exponents_start(old)
    merged = classes.merged_classes(classes.fine_classes(old, start), mask)
    boundaries = classes.used_boundaries(mask, old.dtype.itemsize, start)
    counts = classes.count_classes(old, boundaries)
    number = len(boundaries) + 1
    assert counts.sum(axis=0).tolist() == np.bincount(merged, minlength=number).tolist()
    chosen = rng.random(size) < rng.choice([0.01, 0.3, 1.0])
    members = [np.flatnonzero((merged == k) & chosen) for k in range(number)]
    ranks = classes.ranks(old, boundaries, counts, members)
    for k in range(number):
        assert ranks[k].tolist() == [int((merged[:p] == k).sum()) for p in members[k]]
    for found, expected in zip(classes.positions(old, boundaries, counts, ranks), members, strict=True):
        np.testing.assert_array_equal(found, expected)


@given(st.integers(1, 1 << 40), st.data())
def test_gap_tables_are_the_geometric_distribution(count: int, data: st.DataObject) -> None:
    changed = data.draw(st.integers(1, count))
    table = models.geometric(count, changed)
    size = symbols.alphabet_size(count - 1)
    assert table.sum() == rans.TOTAL
    assert (table[:size] > 0).all() and not table[size:].any()
    for place in range(min(size, 16)):
        exact = (
            changed / count * math.exp(place * math.log1p(-changed / count))
            if changed < count
            else float(place == 0)
        )
        floor = 1 if place != int(np.argmax(table)) else rans.TOTAL
        assert abs(table[place] - exact * (rans.TOTAL - size)) <= floor + 1e-6


def test_step_tables_are_complete_and_explicit_ones_follow_their_histogram() -> None:
    for bits in (8, 16, 32):
        families = models.step_families(bits)
        size = symbols.alphabet_size((1 << bits) - 1)
        assert len(families) < models.EXPLICIT
        assert (families.sum(axis=1) == rans.TOTAL).all()
        assert (families[:, :size] > 0).all() and not families[:, size:].any()
    histogram = np.zeros(models.ALPHABET, np.int64)
    histogram[[0, 1, 7, 30]] = 80_000, 10_000, 9_999, 1
    described = models.describe(histogram)
    table = models.read_explicit(described[1:], 36)
    assert described[0] == len(described) - 1 == 31
    assert table[[0, 1, 7]] / rans.TOTAL == pytest.approx([0.8, 0.1, 0.1], rel=0.05)
    assert (table[:36] > 0).all() and not table[36:].any() and table.sum() == rans.TOTAL


def test_a_stack_splits_into_its_arrays() -> None:
    old, new = (
        np.stack(arrays) for arrays in zip(*(gaussian(30, 20, 1e-3, seed=s) for s in range(3)), strict=True)
    )
    new[1] = old[1]
    whole = delta.ArrayChange.between(old, new)
    fine = classes.fine_classes(old.reshape(-1), 0)
    ranks = np.array([(fine[:p] == fine[p]).sum() for p in whole.indices])
    parts = delta.split_stacked(
        whole.indices,
        whole.old_values,
        whole.new_values,
        counts=(old != new).sum((1, 2)),
        size=600,
        ranks=ranks,
        class_sizes=np.stack([np.bincount(part, minlength=16) for part in fine.reshape(3, -1)]),
    )
    decoded = delta.decode_many(delta.encode_many(parts), list(old))
    for before, after, change in zip(old, new, decoded, strict=True):
        np.testing.assert_array_equal(_applied(before, change), after)
    assert [len(part.indices) for part in parts][1] == 0
