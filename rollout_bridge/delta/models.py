"""Probabilities of symbols: static families named by a byte, or an explicit table when it pays for itself.

Everything a decoder computes uses only IEEE additions, multiplications and divisions, so that it finds the
encoder's tables on any machine.
"""

from __future__ import annotations

import functools

import numpy as np

from rollout_bridge.delta.rans import TOTAL
from rollout_bridge.delta.symbols import STARTS, alphabet_size

ALPHABET = 192
EXPLICIT = 255
# Weight of byte w > 0 of an explicit table: 2**((w - 1) / 16), with 11 significant bits.
_MANTISSAS = [round(2 ** (j / 16) * 1024) for j in range(16)]
_WEIGHTS = np.array([0, *(_MANTISSAS[w % 16] << (w // 16) for w in range(255))], np.float64)
_LARGEST_COUNT = 1 << 15

# The families of value steps: most are one code up or down, the others have a geometric tail.
_OTHER = (0.96, 0.9, 0.8, 0.68, 0.55, 0.42, 0.32, 0.24, 0.17, 0.12, 0.08, 0.05, 0.03, 0.015, 0.005, 0.001)
_TAIL = (1.1, 1.4, 1.8, 2.3, 3.0, 4.0, 5.5, 7.5, 10.0, 14.0, 20.0, 40.0, 100.0, 1e3, 3e4)


def quantize(probabilities: np.ndarray, size: int) -> np.ndarray:
    """Frequencies uint32[..., ALPHABET] summing to TOTAL, positive for the first `size` symbols only."""
    floor = np.arange(ALPHABET) < size
    frequencies = np.floor(np.where(floor, probabilities, 0.0) * (TOTAL - size)).astype(np.int64) + floor
    largest = np.argmax(frequencies, axis=-1)
    rest = TOTAL - frequencies.sum(axis=-1)
    if frequencies.ndim == 1:
        frequencies[largest] += rest
    else:
        frequencies[np.arange(len(frequencies)), largest] += rest
    return frequencies.astype(np.uint32)


def geometric(count: int, changed: int) -> np.ndarray:
    """Frequencies of the gaps between `changed` elements spread at random over `count`."""
    size = alphabet_size(count - 1)
    probabilities = np.zeros(ALPHABET)
    probabilities[:size] = -np.diff(_powers(1.0 - changed / count, STARTS[: size + 1]))
    return quantize(probabilities, size)


@functools.lru_cache(maxsize=4)
def step_families(bits: int) -> np.ndarray:
    """Frequencies uint32[families, ALPHABET] of value steps of `bits`-bit patterns; a row is a family."""
    rows = []
    for other in _OTHER:
        for mean in _TAIL:
            # Steps 0, 1 are one code up, down; of the magnitudes from two codes on, those in [a, b) have
            # r**a - r**b.
            ends = np.maximum(STARTS[: ALPHABET + 1] / 2 - 1, 0)
            below = 1.0 - _powers(1.0 - 1.0 / mean, np.floor(ends).astype(np.int64))
            tail = np.diff(below)
            tail[2:16] = np.repeat(below[[4, 6, 8, 10, 12, 14, 16]] - below[[2, 4, 6, 8, 10, 12, 14]], 2) / 2
            tail[:2] = 0
            row = other * tail
            row[:2] = (1.0 - other) / 2
            rows.append(row)
    frequencies = quantize(np.stack(rows), alphabet_size((1 << bits) - 1))
    frequencies.flags.writeable = False
    return frequencies


@functools.lru_cache(maxsize=4)
def step_costs(bits: int) -> np.ndarray:
    """Bits of each symbol under each family: float64[families, ALPHABET], 0 outside the alphabet."""
    frequencies = step_families(bits).astype(np.float64)
    return np.where(frequencies > 0, np.log2(TOTAL / np.maximum(frequencies, 1)), 0.0)


def describe(histogram: np.ndarray) -> bytes:
    """An explicit table of the frequencies `histogram`: its length, then a byte of log-weight a symbol."""
    used = int(np.flatnonzero(histogram)[-1]) + 1
    counts = histogram[:used] / max(1.0, histogram.max() / _LARGEST_COUNT)
    codes = np.where(histogram[:used] > 0, 1 + np.rint(16 * np.log2(np.maximum(counts, 1))), 0)
    return bytes([used]) + codes.astype(np.uint8).tobytes()


def read_explicit(codes: bytes, size: int) -> np.ndarray:
    """Frequencies of an explicit table (the bytes after its length) over the first `size` symbols."""
    weights = np.zeros(ALPHABET)
    weights[: len(codes)] = _WEIGHTS[np.frombuffer(codes, np.uint8)]
    weights[size:] = 0
    return quantize(weights / max(float(weights.sum()), 1.0), size)


def cost(histogram: np.ndarray, frequencies: np.ndarray) -> float:
    """Bits to code symbols that occur `histogram` times under `frequencies`."""
    seen = np.flatnonzero(histogram)
    return float((histogram[seen] * np.log2(TOTAL / frequencies[seen])).sum())


def _powers(ratio: float, exponents: np.ndarray) -> np.ndarray:
    """ratio ** exponents by repeated squaring, because `pow` differs between machines."""
    result = np.ones(exponents.shape)
    square = np.float64(ratio)
    for bit in range(int(exponents.max()).bit_length()):
        result = np.where((exponents >> bit) & 1, result * square, result)
        square = square * square
    return result
