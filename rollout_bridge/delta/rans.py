"""An interleaved range asymmetric numeral system (rANS) coder over static tables, vectorised in numpy.

Symbol i belongs to lane i % lanes; all lanes share one stream of 16-bit words. A lane starts from 16 bits of
payload, which the decoder has left at its end, so a lane costs nothing beyond its symbols. All arithmetic is
in integers, so every machine reads what another wrote. Source: J. Duda, "Asymmetric numeral systems", arXiv
1311.2540; interleaving after F. Giesen, arXiv 1402.3392.
"""

from __future__ import annotations

import dataclasses

import numpy as np

PRECISION = 14
TOTAL = 1 << PRECISION
_LOWEST = 1 << 16
PAYLOAD_BYTES = 2
_FEW_SYMBOLS = 4096  # up to here a search is quicker than making a table of slots
_TOP_SHIFT = np.uint32(32 - PRECISION)


class CorruptStream(ValueError):
    """The words do not decode to the announced number of symbols."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """symbols u8[n]; payload, PAYLOAD_BYTES a lane; size: how many bytes of the data they took."""

    symbols: np.ndarray
    payload: bytes
    size: int


def encode(
    symbols: np.ndarray, tables: np.ndarray, frequencies: np.ndarray, *, lanes: int, payload: bytes
) -> bytes:
    """Code `symbols` u8[n], each under row `tables` u8[n] of `frequencies` u32[t, a] (rows sum to TOTAL).

    payload: PAYLOAD_BYTES a lane. The result is 4 bytes a lane, then 2 a word. Every coded symbol has a
      positive frequency.
    """
    width = frequencies.shape[1]
    cumulative = (np.cumsum(frequencies, axis=1) - frequencies).astype(np.uint32)
    place = tables.astype(np.int32) * width + symbols
    frequency = frequencies.astype(np.uint32).reshape(-1)[place]
    start = cumulative.reshape(-1)[place]
    state = np.frombuffer(payload, "<u2", lanes).astype(np.uint32) | np.uint32(_LOWEST)
    words: list[np.ndarray] = []
    for begin in range((symbols.size - 1) // lanes * lanes if symbols.size else -1, -1, -lanes):
        f, c = frequency[begin : begin + lanes], start[begin : begin + lanes]
        x = state[: f.size]
        full = (x >> _TOP_SHIFT) >= f
        spilled = x[full]
        words.append(spilled.astype(np.uint16))
        x[full] = spilled >> 16
        quotient = x // f
        state[: f.size] = (quotient << PRECISION) + (x - quotient * f) + c
    words.reverse()
    return state.astype("<u4").tobytes() + (np.concatenate(words).astype("<u2").tobytes() if words else b"")


def decode(data: bytes, tables: np.ndarray, frequencies: np.ndarray, *, lanes: int) -> Decoded:
    """What `encode` coded under `tables` u8[n].

    Raises CorruptStream when the data runs out or the coder does not come to rest where it can have started.
    """
    if len(data) < 4 * lanes:
        raise CorruptStream(f"{len(data)} bytes cannot hold the states of {lanes} lanes")
    state = np.frombuffer(data, "<u4", lanes).astype(np.uint32)
    words = np.frombuffer(data, "<u2", (len(data) - 4 * lanes) // 2, 4 * lanes).astype(np.uint32)
    width = frequencies.shape[1]
    flat = frequencies.astype(np.uint32).reshape(-1)
    # Rows follow one another in one axis of slots, TOTAL apart; `ends` is where each (row, symbol) ends
    # there.
    ends = np.cumsum(flat, dtype=np.uint32)
    starts = ends - flat
    owner_at = np.repeat(np.arange(flat.size, dtype=np.uint16), flat) if tables.size > _FEW_SYMBOLS else None
    base = tables.astype(np.uint32) << PRECISION
    owners = np.empty(tables.size, np.uint16)
    at = 0
    for begin in range(0, tables.size, lanes):
        slots = base[begin : begin + lanes]
        x = state[: slots.size]
        slot = (x & np.uint32(TOTAL - 1)) | slots
        place = np.searchsorted(ends, slot, side="right") if owner_at is None else owner_at[slot]
        owners[begin : begin + slots.size] = place
        x = flat[place] * (x >> PRECISION) + slot - starts[place]
        low = np.flatnonzero(x < _LOWEST)
        if at + low.size > words.size:
            raise CorruptStream(f"the words run out at symbol {begin} of {tables.size}")
        x[low] = (x[low] << 16) | words[at : at + low.size]
        at += low.size
        state[: slots.size] = x
    if ((state >> 16) != 1).any():
        raise CorruptStream("the coder did not come to rest at an initial state")
    payload = state.astype(np.uint16).astype("<u2").tobytes()
    return Decoded((owners % width).astype(np.uint8), payload, 4 * lanes + 2 * at)
