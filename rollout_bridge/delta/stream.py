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
from rollout_bridge.delta.errors import DeltaError
from rollout_bridge.delta.octets import Reader, varint

FLAG_PARTITION = 1  # there is more than one class
FLAG_WIDE = 2  # many lanes: quicker, a few percent larger
_LANE_SYMBOLS = 256
_LANE_SYMBOLS_WIDE = 64
_MOST_LANES = 8192


def lanes_for(count: int, flags: int) -> int:
    """Lanes of a stream of `count` symbols."""
    each = _LANE_SYMBOLS_WIDE if flags & FLAG_WIDE else _LANE_SYMBOLS
    return min(_MOST_LANES, max(1, count // each))


def encode(
    changes: places.Places, old_values: np.ndarray, new_values: np.ndarray, *, wide: bool
) -> tuple[int, bytes]:
    """(flags, body) of `changes`, whose values go from `old_values` to `new_values` (in ascending order).

    wide: many lanes.
    """
    bits = old_values.dtype.itemsize * 8
    step_values = symbols.steps_between(old_values, new_values)[changes.order]
    step_symbols = symbols.symbols_of(step_values)
    gaps = changes.gaps()
    gap_symbols = symbols.symbols_of(gaps)
    flags = (FLAG_WIDE if wide else 0) | (FLAG_PARTITION if changes.mask else 0)
    header = bytearray(changes.header(old_values.dtype.itemsize))
    firsts = np.concatenate([[0], np.cumsum(changes.moved)])
    tables: list[np.ndarray] = []
    for k, (count, changed) in enumerate(zip(changes.sizes.tolist(), changes.moved.tolist(), strict=True)):
        here = slice(firsts[k], firsts[k + 1])
        if not changed:
            header += varint(0)
            continue
        gap_table, gap_bytes = _gap_model(gap_symbols[here], count, changed)
        step_table, step_bytes = _step_model(step_symbols[here], bits)
        header += varint(2 * changed + bool(gap_bytes)) + gap_bytes + step_bytes
        tables += [gap_table, step_table]
    all_symbols = np.concatenate([gap_symbols, step_symbols])
    rows = _table_rows(changes.moved)
    extra = symbols.pack_extra(np.concatenate([gaps, step_values.astype(np.int64)]), all_symbols)
    lanes = lanes_for(all_symbols.size, flags)
    inside = lanes * rans.PAYLOAD_BYTES  # the first extra bits travel in the coder's initial states
    payload = extra[:inside].ljust(inside, b"\0")
    coded = rans.encode(all_symbols, rows, np.stack(tables), lanes=lanes, payload=payload)
    return flags, bytes(header) + coded + extra[inside:]


def decode(flags: int, body: bytes, old: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(ascending indices int64, new values) of each class of an `encode` body for the flat array `old`.

    DeltaError on any damage.
    """
    if flags & ~(FLAG_PARTITION | FLAG_WIDE):
        raise DeltaError(f"flags {flags:#x} are not of this version of the codec; upgrade the reader")
    bits = old.dtype.itemsize * 8
    reader = Reader(body)
    directory = places.read_directory(reader, old, partitioned=bool(flags & FLAG_PARTITION))
    sizes = directory.sizes
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
    if not tables:
        reader.end()
        return [np.empty(0, np.int64)], [np.empty(0, old.dtype)]
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
    gaps, step_values = values[:total], values[total:]
    if step_values.max() >= 1 << bits:
        raise DeltaError("a decoded step is out of range; the blob is damaged")
    ends = np.cumsum(moved)[:-1]
    indices = places.find(directory, np.split(gaps, ends))
    steps = np.split(step_values.astype(old.dtype), ends)
    return indices, [symbols.apply_steps(old[part], step) for part, step in zip(indices, steps, strict=True)]


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
