"""Encodes the changes of one process's tensors to blobs in the store, and records what each holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from rollout_bridge import delta
from rollout_bridge.quantization import digest
from rollout_bridge.store import Store
from rollout_bridge.weights.format.chain import flat_indices
from rollout_bridge.weights.format.manifest import Piece, piece_hash
from rollout_bridge.weights.read import parallel
from rollout_bridge.weights.write.commit import ProcessTensor

_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One rectangle of tensor `name` (of `shape`): new bits, all of them or those that changed.

    values: in a full version, the rectangle's bits; in a delta, the new bits at `indices`.
    indices: ascending flat indices into the rectangle; None in a full version. old: the bits there before.
    before, ranks: the whole rectangle before, or the ranks of the changed elements in their classes; either
        makes the blob smaller.
    """

    name: str
    shape: tuple[int, ...]
    rectangle: tuple[tuple[int, int], ...]
    values: np.ndarray
    indices: np.ndarray | None = None
    old: np.ndarray | None = None
    before: np.ndarray | None = None
    ranks: delta.ClassRanks | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.rectangle)

    @property
    def changed(self) -> int:
        return self.values.size

    @property
    def change(self) -> delta.ArrayChange | None:
        """The change for the codec; None in a full version."""
        if self.indices is None or self.old is None:
            return None
        before = None if self.before is None else self.before.reshape(-1)
        size = math.prod(self.local_shape)
        return delta.ArrayChange(self.indices, self.old, self.values, size, before, self.ranks)


class Histogram:
    """How often each value occurs in an array that changes."""

    def __init__(self, bits: np.dtype) -> None:
        self._dense = np.zeros(1 << (8 * bits.itemsize), np.int64) if bits.itemsize <= 2 else None
        self._sparse: tuple[np.ndarray, np.ndarray] = (np.empty(0, bits), np.empty(0, np.int64))

    def add(self, values: np.ndarray, sign: int = 1) -> None:
        """Adds `values` to the counts (`sign` 1) or removes them (-1)."""
        flat = values.reshape(-1)
        if self._dense is not None and flat.size < self._dense.size:
            np.add.at(self._dense, flat, sign)
        elif self._dense is not None:
            for start in range(0, flat.size, _CHUNK):
                self._dense += sign * np.bincount(flat[start : start + _CHUNK], minlength=self._dense.size)
        else:
            found, counts = np.unique(flat, return_counts=True)
            merged, place = np.unique(np.concatenate([self._sparse[0], found]), return_inverse=True)
            total = np.zeros(merged.size, np.int64)
            np.add.at(total, place, np.concatenate([self._sparse[1], sign * counts]))
            self._sparse = (merged[total > 0], total[total > 0])

    @property
    def counts(self) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Counts by value, or (values, counts)."""
        return self._sparse if self._dense is None else self._dense


class ReferenceSize:
    """The reference size of deltas: order-0 conditional entropy, with statistics for each stacked array."""

    def __init__(self) -> None:
        self._histograms: dict[str, Histogram] = {}

    def measure(self, patches: Iterable[tuple[str, Patch]]) -> float:
        """Bytes of the changes `patches` (stacked array, patch) relative to what was added so far."""
        total = 0.0
        for key, mine in _grouped(patches).items():
            old = np.concatenate([patch.old for patch in mine if patch.old is not None])
            new = np.concatenate([patch.values for patch in mine])
            total += delta.conditional_entropy_bytes_sparse(self._histograms[key].counts, old, new)
        return total

    def add(self, patches: Iterable[tuple[str, Patch]]) -> None:
        """Adds the new values to the counts and removes the old ones."""
        for key, mine in _grouped(patches).items():
            if key not in self._histograms:
                self._histograms[key] = Histogram(mine[0].values.dtype)
            if all(patch.old is not None for patch in mine):  # as one: small tensors are many
                self._histograms[key].add(np.concatenate([patch.values for patch in mine]))
                self._histograms[key].add(np.concatenate([p.old for p in mine if p.old is not None]), -1)
                continue
            for patch in mine:
                self._histograms[key].add(patch.values)


def _grouped(patches: Iterable[tuple[str, Patch]]) -> dict[str, list[Patch]]:
    groups: dict[str, list[Patch]] = {}
    for key, patch in patches:
        groups.setdefault(key, []).append(patch)
    return groups


@dataclass
class WrittenBlobs:
    """Blobs in the store: pieces, bytes and changed elements of each tensor."""

    label: str
    tensors: dict[str, ProcessTensor] = field(default_factory=dict)
    objects: int = 0
    nbytes: int = 0
    changed: int = 0

    @property
    def next_object(self) -> str:
        return f"{self.label}-{self.objects:05d}.blob"


def write(
    store: Store,
    patches: Sequence[Patch],
    *,
    directory: str,
    label: str,
    preset: str,
    pool: Executor,
    ahead: int,
    object_bytes: int,
) -> WrittenBlobs:
    """Encodes `patches` and writes them in order, packed into objects of about `object_bytes`.

    Changes of small tensors share blobs, so that the cost depends on the elements and not on the tensors.
    label: prefix of the object names. pool: encodes up to `ahead` blobs before the one being written. On
    return every blob of the account is in the store.
    """
    account = WrittenBlobs(label)
    buffer = bytearray()
    # One loop keeps the order of blobs, so objects hold neighbouring tensors.
    for group, (blob, part_digests) in _in_order(pool, _groups(patches), preset, ahead=ahead):
        if buffer and len(buffer) + len(blob) > object_bytes:
            _flush(store, directory, account, buffer)
        blob_hash = piece_hash(blob)
        for member, (patch, part_digest) in enumerate(zip(group, part_digests, strict=True)):
            nothing = ProcessTensor(digest=f"{0:016x}", blobs=[], changed=0)
            entry = account.tensors.setdefault(patch.name, nothing)
            entry.blobs.append(
                Piece(
                    key=account.next_object,
                    offset=len(buffer),
                    length=len(blob),
                    hash=blob_hash,
                    rectangle=patch.rectangle,
                    member=member if len(group) > 1 else None,
                )
            )
            entry.digest = f"{digest.combine(int(entry.digest, 16), part_digest):016x}"
            entry.changed += patch.changed
            account.changed += patch.changed
        buffer += blob
    if buffer:
        _flush(store, directory, account, buffer)
    for entry in account.tensors.values():
        entry.blobs.sort(key=lambda piece: piece.rectangle)
    return account


def _groups(patches: Sequence[Patch]) -> Iterator[list[Patch]]:
    """Patches that share a blob, in the order of their first patch."""
    changes = [patch.change for patch in patches]
    sparse = [place for place, change in enumerate(changes) if change is not None]
    shared = {}
    for members in delta.together([change for change in changes if change is not None]):
        shared[sparse[members[0]]] = [patches[sparse[member]] for member in members]
    for place, change in enumerate(changes):
        if change is None:
            yield [patches[place]]
        elif place in shared:
            yield shared[place]


def _in_order(
    pool: Executor, groups: Iterable[list[Patch]], preset: str, *, ahead: int
) -> Iterator[tuple[list[Patch], tuple[bytes, list[int]]]]:
    waiting = []
    for group in groups:
        waiting.append((group, pool.submit(_encode, group, preset)))
        if len(waiting) > ahead:
            first, future = waiting.pop(0)
            yield first, parallel.result(pool, future)
    for first, future in waiting:
        yield first, parallel.result(pool, future)


def _encode(group: list[Patch], preset: str) -> tuple[bytes, list[int]]:
    """(blob, the part of each patch in the digest of its tensor)."""
    changes = [change for patch in group if (change := patch.change) is not None]
    if not changes:
        patch = group[0]
        origin = tuple(start for start, _ in patch.rectangle)
        values = np.ascontiguousarray(patch.values)
        part = digest.digest_rectangle(values, origin=origin, shape=patch.shape)
        return delta.encode_full(values, preset=preset), [part]
    indices = [
        flat_indices(change.indices, patch.rectangle, patch.shape)
        for change, patch in zip(changes, group, strict=True)
    ]
    parts = digest.updates(
        np.concatenate(indices),
        np.concatenate([change.old_values for change in changes]),
        np.concatenate([change.new_values for change in changes]),
        np.array([len(here) for here in indices]),
    )
    return delta.encode_group(changes, preset=preset), parts


def _flush(store: Store, directory: str, account: WrittenBlobs, buffer: bytearray) -> None:
    store.put(directory + account.next_object, bytes(buffer))
    account.nbytes += len(buffer)
    account.objects += 1
    buffer.clear()
