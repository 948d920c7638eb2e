"""The sparse form of an update: changed positions and value steps, modelled by class and coded by rANS.

Layout, after what the caller keeps (mode, size, type): [exponent start, u8, if elements are wider than a
byte] [partition mask, u16, if flagged] then for each class a varint, 2 * changed + (1 if its gap table is
explicit), and if any changed [explicit gap table] [step family u8, or 255 and an explicit table]; then the
rANS states and words, then the extra bits.
Symbols: the gaps between the ranks of the changed elements class after class, then their value steps in the
same order.
"""

from __future__ import annotations

import numpy as np

from rollout_bridge.delta import models, places, rans, symbols
from rollout_bridge.delta.blob import DeltaError, Reader, varint

FLAG_WIDE = 2  # many lanes: quicker, a few percent larger
_LANE_SYMBOLS = 256
_LANE_SYMBOLS_WIDE = 64
_MOST_LANES = 8192


def lanes_for(count: int, flags: int) -> int:
    """Lanes of a stream of `count` symbols."""
    each = _LANE_SYMBOLS_WIDE if flags & FLAG_WIDE else _LANE_SYMBOLS
    return min(_MOST_LANES, max(1, count // each))


def encode(changes: places.ClassChanges, *, wide: bool) -> tuple[int, bytes]:
    """(flags, body) of `changes`. wide: many lanes."""
    itemsize = changes.steps.dtype.itemsize
    flags = (FLAG_WIDE if wide else 0) | (places.FLAG_PARTITION if changes.mask else 0)
    coder = Coder(changes.gaps(), changes.steps, changes.sizes, changes.moved, 8 * itemsize)
    return flags, changes.header(itemsize) + coder.models + coder.coded(flags)


class Coder:
    """Changes class after class as bytes: their `models`, and under these the changes themselves.

    gaps, steps: of each change, integers. sizes, moved: elements of each class, and those that change.
    """

    def __init__(
        self, gaps: np.ndarray, steps: np.ndarray, sizes: np.ndarray, moved: np.ndarray, bits: int
    ) -> None:
        self._values = np.concatenate([gaps, steps], dtype=np.int64)
        self._symbols = symbols.symbols_of(self._values)
        self._moved = moved
        self._tables: list[np.ndarray] = []
        models_of = bytearray()
        first = 0
        for count, changed in zip(sizes.tolist(), moved.tolist(), strict=True):
            if not changed:
                models_of += varint(0)
                continue
            here = self._symbols[first : first + changed]
            there = self._symbols[gaps.size + first : gaps.size + first + changed]
            first += changed
            gap_table, gap_bytes = _gap_model(here, count, changed)
            step_table, step_bytes = _step_model(there, bits)
            models_of += varint(2 * changed + bool(gap_bytes)) + gap_bytes + step_bytes
            self._tables += [gap_table, step_table]
        self.models = bytes(models_of)

    def coded(self, flags: int) -> bytes:
        """The changes; of `flags`, FLAG_WIDE matters."""
        extra = symbols.pack_extra(self._values, self._symbols)
        lanes = lanes_for(self._symbols.size, flags)
        inside = lanes * rans.PAYLOAD_BYTES  # the first extra bits travel in the coder's initial states
        payload = extra[:inside].ljust(inside, b"\0")
        rows = _table_rows(self._moved)
        coded = rans.encode(self._symbols, rows, np.stack(self._tables), lanes=lanes, payload=payload)
        return coded + extra[inside:]


def decode(flags: int, body: bytes, old: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(ascending indices int64, new values) of each class of an `encode` body for the flat array `old`.

    DeltaError on any damage.
    """
    if flags & ~(places.FLAG_PARTITION | FLAG_WIDE):
        raise DeltaError(f"flags {flags:#x} are not of this version of the codec; upgrade the reader")
    bits = old.dtype.itemsize * 8
    reader = Reader(body)
    directory = places.read_directory(reader, old, partitioned=bool(flags & places.FLAG_PARTITION))
    moved, tables = read_models(reader, directory.sizes, bits)
    gaps, step_values = read_coded(reader, moved, tables, flags, bits)
    ends = np.cumsum(moved)[:-1]
    indices = places.find(directory, np.split(gaps, ends))
    steps = np.split(step_values.astype(old.dtype), ends)
    return indices, [symbols.apply_steps(old[part], step) for part, step in zip(indices, steps, strict=True)]


def read_models(reader: Reader, sizes: np.ndarray, bits: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """(changes int64 of each class of `sizes` elements, tables) of `Coder.models`. DeltaError on damage."""
    moved = np.zeros(sizes.size, np.int64)
    tables: list[np.ndarray] = []
    for k, count in enumerate(sizes.tolist()):
        changed, explicit = divmod(reader.varint(), 2)
        if changed > count:
            raise DeltaError(
                f"{changed} elements change in a class of {count}; the blob is of another array, or damaged"
            )
        moved[k] = changed
        if not changed:
            continue
        if explicit:
            codes = _take_table(reader)
            tables.append(models.read_explicit(codes, symbols.alphabet_size(count - 1)))
        else:
            tables.append(models.geometric(count, changed))
        tables.append(_read_step_model(reader, bits))
    return moved, tables


def read_coded(
    reader: Reader, moved: np.ndarray, tables: list[np.ndarray], flags: int, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """(gaps, steps) int64 of `Coder.coded`, to the end of the blob. DeltaError on damage."""
    if not tables:
        reader.end()
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows = _table_rows(moved)
    try:
        decoded = rans.decode(reader.rest(), rows, np.stack(tables), lanes=lanes_for(rows.size, flags))
    except rans.CorruptStream as error:
        raise DeltaError(f"the coded symbols are damaged: {error}") from error
    reader.take(decoded.size)
    extra_size = symbols.extra_size(decoded.symbols)
    inside, filler = decoded.payload[:extra_size], decoded.payload[extra_size:]
    if filler.strip(b"\0"):
        raise DeltaError("the coded symbols are damaged: bits are set past the end of the update")
    values = symbols.unpack_extra(inside + reader.take(extra_size - len(inside)), decoded.symbols)
    reader.end()
    total = int(moved.sum())
    gaps, steps = values[:total], values[total:]
    if steps.max() >= 1 << bits:
        raise DeltaError("a decoded step is out of range; the blob is damaged")
    return gaps, steps


def _table_rows(moved: np.ndarray) -> np.ndarray:
    """Table of each symbol: each class that changes has two, for gaps and for steps."""
    present = moved[moved > 0]
    gap_rows = 2 * np.arange(present.size, dtype=np.uint8)
    return np.concatenate([np.repeat(gap_rows, present), np.repeat(gap_rows + 1, present)])


def _gap_model(coded: np.ndarray, count: int, changed: int) -> tuple[np.ndarray, bytes]:
    size = symbols.alphabet_size(count - 1)
    histogram = np.bincount(coded, minlength=models.ALPHABET)
    parametric = models.geometric(count, changed)
    description = models.describe(histogram)
    explicit = models.read_explicit(description[1:], size)
    gain = models.cost(histogram, parametric) - models.cost(histogram, explicit)
    return (explicit, description) if gain > 8 * len(description) else (parametric, b"")


def _step_model(coded: np.ndarray, bits: int) -> tuple[np.ndarray, bytes]:
    histogram = np.bincount(coded, minlength=models.ALPHABET)
    used = np.flatnonzero(histogram)
    costs = models.step_costs(bits)[:, used] @ histogram[used]
    family = int(np.argmin(costs))
    description = models.describe(histogram)
    explicit = models.read_explicit(description[1:], symbols.alphabet_size((1 << bits) - 1))
    if float(costs[family]) - models.cost(histogram, explicit) > 8 * len(description):
        return explicit, bytes([models.EXPLICIT]) + description
    return models.step_families(bits)[family], bytes([family])


def _take_table(reader: Reader) -> bytes:
    length = reader.byte()
    if length > models.ALPHABET:
        raise DeltaError(f"a table of {length} symbols, at most {models.ALPHABET} exist; the blob is damaged")
    return reader.take(length)


def _read_step_model(reader: Reader, bits: int) -> np.ndarray:
    family = reader.byte()
    if family == models.EXPLICIT:
        return models.read_explicit(_take_table(reader), symbols.alphabet_size((1 << bits) - 1))
    families = models.step_families(bits)
    if family >= len(families):
        raise DeltaError(f"step family {family} is not one of {len(families)}; the blob is damaged")
    return families[family]
