"""Updates that the codec is tested on."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollout_bridge import delta
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


def applied(old: np.ndarray, change: delta.SparseChange | delta.DenseChange) -> np.ndarray:
    if isinstance(change, delta.DenseChange):
        return change.values
    assert change.indices.dtype == np.int64
    assert (np.diff(change.indices) > 0).all()
    new = old.copy()
    new.reshape(-1)[change.indices] = change.values
    return new


def encode_all(
    changes: Sequence[delta.ArrayChange], *, preset: str = "small"
) -> list[tuple[list[int], bytes]]:
    """Each blob of `changes`, with the places of those in it: as a version is written."""
    groups = delta.together(changes)
    return [(group, delta.encode_group([changes[n] for n in group], preset=preset)) for group in groups]


def decode_all(
    blobs: Iterable[tuple[list[int], bytes]], olds: Sequence[np.ndarray]
) -> dict[int, delta.SparseChange | delta.DenseChange]:
    """The changes of `encode_all` by place: as a version is read."""
    changes: dict[int, delta.SparseChange | delta.DenseChange] = {}
    for group, blob in blobs:
        if len(group) == 1:
            changes[group[0]] = delta.decode_sparse(blob, olds[group[0]])
        else:
            found = delta.decode_group(blob, olds[group[0]].dtype)
            changes |= zip(group, found.changes_of(range(len(group)), [olds[n] for n in group]), strict=True)
    return changes


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
