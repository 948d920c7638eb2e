"""Damaged and hostile blobs: an error or an array, bounded in memory."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_bridge import delta
from tests.rollout_bridge.delta.updates import applied, gaussian


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
    blob = bytearray(delta.encode_group([delta.ArrayChange.between(*pair) for pair in pairs]))
    blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        group = delta.decode_group(bytes(blob), pairs[0][0].dtype)
        changes = group.changes_of(range(4), [old for old, _ in pairs])
    except delta.DeltaError:
        return
    for (old, _), change in zip(pairs, changes, strict=True):
        assert applied(old, change).shape == old.shape


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
