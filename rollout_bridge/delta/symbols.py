"""Integers as (symbol, extra bits), and value changes as integers.

A non-negative integer below 16 is its own symbol; above, a symbol is a quarter of an octave and the place
inside it is sent as extra bits. The symbols are what the models give probabilities to; inside a quarter
octave the distributions met here are flat, to a thousandth of a bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

DIRECT = 16
_MAXIMUM_BITS = 48


def _starts() -> np.ndarray:
    quarters = [(4 + quarter) << (octave - 2) for octave in range(4, _MAXIMUM_BITS) for quarter in range(4)]
    return np.array([*range(DIRECT), *quarters, 1 << _MAXIMUM_BITS], np.int64)


# Symbol s holds the integers from STARTS[s] up to, but not including, STARTS[s + 1].
STARTS = _starts()
EXTRA_BITS = np.array([0] * DIRECT + [int(s).bit_length() - 3 for s in STARTS[DIRECT:-1]], np.uint8)
_SMALL = 1 << 12
_SYMBOL_OF_SMALL = (np.searchsorted(STARTS, np.arange(_SMALL), side="right") - 1).astype(np.uint8)


def symbols_of(values: np.ndarray) -> np.ndarray:
    """Symbols uint8 of integers in [0, 2**48)."""
    if values.size == 0:
        return np.empty(0, np.uint8)
    if values.max() < _SMALL:
        return _SYMBOL_OF_SMALL[values]
    symbols = _SYMBOL_OF_SMALL[np.minimum(values, _SMALL - 1)]
    large = np.flatnonzero(values >= _SMALL)
    symbols[large] = np.searchsorted(STARTS, values[large], side="right") - 1
    return symbols


def alphabet_size(maximum: int) -> int:
    """How many symbols the integers up to `maximum` need."""
    return int(np.searchsorted(STARTS, maximum, side="right"))


def pack_extra(values: np.ndarray, symbols: np.ndarray) -> bytes:
    """The extra bits of `values`, grouped by their number, least significant bit first."""
    pieces = []
    for width, chosen in _by_width(symbols):
        offsets = values[chosen] - STARTS[symbols[chosen]]
        octets = offsets.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : -(-width // 8)]
        pieces.append(np.unpackbits(octets, axis=1, count=width, bitorder="little").reshape(-1))
    return np.packbits(np.concatenate(pieces), bitorder="little").tobytes() if pieces else b""


def extra_size(symbols: np.ndarray) -> int:
    """Bytes that `pack_extra` makes for these symbols."""
    return (int(EXTRA_BITS[symbols].sum(dtype=np.int64)) + 7) // 8


def unpack_extra(data: bytes, symbols: np.ndarray) -> np.ndarray:
    """The integers int64 of `symbols` with the extra bits `data`, of exactly `extra_size` bytes."""
    values = STARTS[symbols]
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    at = 0
    for width, chosen in _by_width(symbols):
        part = bits[at : at + chosen.size * width].reshape(chosen.size, width)
        at += chosen.size * width
        octets = np.zeros((chosen.size, 8), np.uint8)
        packed = np.packbits(part, axis=1, bitorder="little")
        octets[:, : packed.shape[1]] = packed
        values[chosen] += octets.view("<i8").reshape(-1)
    return values


def _by_width(symbols: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each number of extra bits that occurs, ascending from 1, and the places of the symbols that have it."""
    places = np.flatnonzero(symbols >= DIRECT)
    widths = EXTRA_BITS[symbols[places]]
    for width in np.flatnonzero(np.bincount(widths)).tolist():
        if width:
            yield width, places[widths == width]


def steps_between(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Changes of float bit patterns (old != new) as integers of their dtype.

    0 is one representable number away from zero, 1 one towards zero (and past it), 2 two away, 3 two towards,
    and so on, modulo the number of patterns. Decay and a moved scale then look the same for both signs
    of a weight.
    """
    signed = np.dtype(f"i{old.dtype.itemsize}")
    difference = (_ordered(new) - _ordered(old)).view(signed)
    one = old.dtype.type(1)
    towards = (difference >> _sign_shift(old.dtype)) ^ (old.view(signed) >> _sign_shift(old.dtype))
    return ((np.abs(difference).view(old.dtype) - one) << one) | (towards.view(old.dtype) & one)


def apply_steps(old: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The new bit patterns of `old` after `steps` of `steps_between`."""
    one = old.dtype.type(1)
    backwards = (steps & one) ^ (old >> old.dtype.type(_sign_shift(old.dtype)))
    change = (steps >> one) + one
    ordered = _ordered(old) + ((change ^ -backwards) + backwards)
    signed = np.dtype(f"i{old.dtype.itemsize}")
    negative = ~(ordered.view(signed) >> _sign_shift(old.dtype)).view(old.dtype)
    return ordered ^ (negative | _top_bit(old.dtype))


def _ordered(values: np.ndarray) -> np.ndarray:
    """Sign-magnitude patterns to unsigned integers in the order of their numbers; -0 comes just before +0."""
    signed = np.dtype(f"i{values.dtype.itemsize}")
    negative = (values.view(signed) >> _sign_shift(values.dtype)).view(values.dtype)
    return values ^ (negative | _top_bit(values.dtype))


def _sign_shift(dtype: np.dtype) -> int:
    return dtype.itemsize * 8 - 1


def _top_bit(dtype: np.dtype) -> np.integer:
    return dtype.type(1 << _sign_shift(dtype))
