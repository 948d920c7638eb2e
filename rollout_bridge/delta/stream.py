"""The sparse form of an update: changed positions and value steps, modelled by class and coded by rANS.

Layout, after what the caller keeps (mode, size, type): [exponent start, u8, if elements are wider than a
byte] [partition mask, u16, if flagged] then for each class a varint, 2 * changed + (1 if its gap table is
explicit), and if any changed [explicit gap table] [step family u8, or 255 and an explicit table]; then the
rANS states and words, then the extra bits.
Symbols: the gaps between the ranks of the changed elements class after class, then their value steps in the
  same order.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rollout_bridge.delta import classes, models, rans, symbols
from rollout_bridge.delta.errors import DeltaError
from rollout_bridge.delta.octets import Reader, varint

FLAG_PARTITION = 1  # there is more than one class
FLAG_WIDE = 2  # many lanes: quicker, a few percent larger
_LANE_SYMBOLS = 256
_LANE_SYMBOLS_WIDE = 64
_MOST_LANES = 8192
_MODEL_BITS = 18.0  # about what one more class costs, in bits


@dataclasses.dataclass(frozen=True)
class Options:
    """How hard to try: tell classes apart (needs the whole old array), and how many lanes to code in."""

    by_class: bool
    wide: bool


def lanes_for(count: int, flags: int) -> int:
    """Lanes of a stream of `count` symbols."""
    each = _LANE_SYMBOLS_WIDE if flags & FLAG_WIDE else _LANE_SYMBOLS
    return min(_MOST_LANES, max(1, count // each))


def encode(
    indices: np.ndarray,
    old_values: np.ndarray,
    new_values: np.ndarray,
    *,
    size: int,
    old: np.ndarray | None,
    ranks: classes.ClassRanks | None,
    options: Options,
) -> tuple[int, bytes]:
    """(flags, body) of the changes at ascending flat `indices`; `old` is the whole flat array, needed to tell
    classes apart.
    """
    bits = old_values.dtype.itemsize * 8
    step_values = symbols.steps_between(old_values, new_values)
    step_symbols = symbols.symbols_of(step_values)
    flags = FLAG_WIDE if options.wide else 0
    if ranks is not None:
        places = _places_of_ranks(old_values, ranks)
    elif options.by_class and old is not None:
        places = _places_by_class(indices, old_values, old, step_symbols)
    else:
        places = _Places(0, 0, np.array([size]), np.array([indices.size]), slice(None), indices)
    step_values, step_symbols = step_values[places.order], step_symbols[places.order]
    firsts = np.concatenate([[0], np.cumsum(places.moved)])
    gaps = np.diff(places.ranks, prepend=-1) - 1
    of_first = firsts[:-1][places.moved > 0]
    gaps[of_first] = places.ranks[of_first]
    gap_symbols = symbols.symbols_of(gaps)

    header = bytearray()
    if places.mask:
        flags |= FLAG_PARTITION
        header += bytes([places.start]) if bits > 8 else b""
        header += places.mask.to_bytes(2, "little")
    tables: list[np.ndarray] = []
    for k, (count, changed) in enumerate(zip(places.sizes.tolist(), places.moved.tolist(), strict=True)):
        here = slice(firsts[k], firsts[k + 1])
        if not changed:
            header += varint(0)
            continue
        gap_table, gap_bytes = _gap_model(gap_symbols[here], count, changed)
        step_table, step_bytes = _step_model(step_symbols[here], bits)
        header += varint(2 * changed + bool(gap_bytes)) + gap_bytes + step_bytes
        tables += [gap_table, step_table]
    all_symbols = np.concatenate([gap_symbols, step_symbols])
    rows = _table_rows(places.moved)
    extra = symbols.pack_extra(np.concatenate([gaps, step_values]), all_symbols)
    lanes = lanes_for(all_symbols.size, flags)
    inside = lanes * rans.PAYLOAD_BYTES  # the first extra bits travel in the coder's initial states
    payload = extra[:inside].ljust(inside, b"\0")
    coded = rans.encode(all_symbols, rows, np.stack(tables), lanes=lanes, payload=payload)
    return flags, bytes(header) + coded + extra[inside:]


def decode(flags: int, body: bytes, old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ascending indices int64, new values) of an `encode` body for the flat array `old`. DeltaError on any
    damage.
    """
    if flags & ~(FLAG_PARTITION | FLAG_WIDE):
        raise DeltaError(f"flags {flags:#x} are not of this version of the codec; upgrade the reader")
    bits = old.dtype.itemsize * 8
    reader = Reader(body)
    boundaries = np.empty(0, np.int64)
    if flags & FLAG_PARTITION:
        start = reader.byte() if bits > 8 else 0
        mask = reader.byte() | reader.byte() << 8
        if mask >> (classes.CLASSES - 1):
            raise DeltaError(f"partition {mask:#x} has boundaries past the last class; the blob is damaged")
        boundaries = classes.used_boundaries(mask, old.dtype.itemsize, start)
        boundaries = np.minimum(boundaries, np.iinfo(old.dtype).max)
    counts = classes.count_classes(old, boundaries)
    sizes = counts.sum(axis=0)
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
        return np.empty(0, np.int64), np.empty(0, old.dtype)
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
    if step_values.max() >= 1 << bits or gaps.max() >= old.size:
        raise DeltaError("a decoded step or gap is out of range; the blob is damaged")
    class_ranks, begin = [], 0
    for count, changed in zip(sizes.tolist(), moved.tolist(), strict=True):
        rank = np.cumsum(gaps[begin : begin + changed] + 1) - 1
        if changed and rank[-1] >= count:
            raise DeltaError(
                "a changed element lies past the end of its class; the blob is of another array, or damaged"
            )
        class_ranks.append(rank)
        begin += changed
    indices = np.concatenate(classes.positions(old, boundaries, counts, class_ranks))
    new_values = symbols.apply_steps(old[indices], step_values)
    if sum(1 for changed in moved if changed) > 1:
        order = np.argsort(indices)
        indices, new_values = indices[order], new_values[order]
    return indices, new_values


@dataclasses.dataclass(frozen=True)
class _Places:
    """Changed elements class after class: what describes the classes, their sizes and changed elements, the
    order that
    sorts the elements by class, and their ranks in that order."""

    start: int
    mask: int
    sizes: np.ndarray
    moved: np.ndarray
    order: np.ndarray | slice
    ranks: np.ndarray


def _places_of_ranks(old_values: np.ndarray, ranks: classes.ClassRanks) -> _Places:
    fine = classes.fine_classes(old_values, ranks.start).astype(np.uint8)
    order = np.argsort(fine, kind="stable")
    moved = np.bincount(fine, minlength=classes.CLASSES)
    return _Places(ranks.start, classes.ALL_CLASSES, ranks.sizes, moved, order, ranks.ranks[order])


def _places_by_class(
    indices: np.ndarray, old_values: np.ndarray, old: np.ndarray, step_symbols: np.ndarray
) -> _Places:
    start = classes.exponents_start(old)
    fine = classes.fine_classes(old_values, start)
    mask = _partition(old, start, fine, step_symbols, old.dtype.itemsize * 8)
    of_class = classes.merged_classes(fine, mask).astype(np.uint8)
    order = np.argsort(of_class, kind="stable")
    boundaries = classes.used_boundaries(mask, old.dtype.itemsize, start)
    counts = classes.count_classes(old, boundaries)
    moved = np.bincount(of_class, minlength=counts.shape[1])
    class_indices = np.split(indices[order], np.cumsum(moved)[:-1])
    ranks = np.concatenate(classes.ranks(old, boundaries, counts, class_indices))
    return _Places(start, mask, counts.sum(axis=0), moved, order, ranks)


def _partition(old: np.ndarray, start: int, fine: np.ndarray, step_symbols: np.ndarray, bits: int) -> int:
    joint = np.bincount(fine * models.ALPHABET + step_symbols, minlength=classes.CLASSES * models.ALPHABET)
    histograms = joint.reshape(classes.CLASSES, models.ALPHABET)
    changed = histograms.sum(axis=1)
    used = np.flatnonzero(histograms.any(axis=0))
    family_costs = histograms[:, used] @ models.step_costs(bits)[:, used].T
    sums = np.concatenate([np.zeros((1, family_costs.shape[1])), np.cumsum(family_costs, axis=0)])
    value_bits = (sums[None, 1:] - sums[:-1, None]).min(axis=-1)
    counts = classes.estimate_counts(old, start, changed)
    return classes.choose_partition(counts, changed, value_bits, _MODEL_BITS)


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
