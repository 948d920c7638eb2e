"""Decoding some tensors of a mirror file, in a decoding process or in the calling one.

A batch carries all it needs: its part of the manifests, and its pieces, already fetched and checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout_bridge.quantization import digest
from rollout_bridge.weights.format import chain
from rollout_bridge.weights.format.blobs import ChangeDecoder, HeldPieces, PieceSource
from rollout_bridge.weights.format.canonical import TensorSpec
from rollout_bridge.weights.format.chain import Link, TensorChange
from rollout_bridge.weights.format.manifest import ManifestRef, Piece
from rollout_bridge.weights.read import parts
from rollout_bridge.weights.read.parts import JournalPart

_WORKING_BYTES = 6  # of memory a byte of the tensor that is decoded: the codec's, and what it finds
_WINDOW_BYTES = 1 << 22  # of small tensors decoded at once


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """Tensor `name` at `offset` of a mirror file. before: the digest of its bits there."""

    name: str
    spec: TensorSpec
    offset: int
    before: int


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """Tensors of `file`, and the versions to apply to them, oldest first."""

    file: Path
    places: tuple[TensorPlace, ...]
    links: tuple[Link, ...] = ()
    contents: HeldPieces = dataclasses.field(default_factory=lambda: HeldPieces({}))

    @classmethod
    def of(
        cls, file: Path, places: Sequence[TensorPlace], links: Sequence[Link], blobs: PieceSource
    ) -> DecodeBatch:
        """Waits for the pieces of `places`. Raises `BrokenVersion`."""
        names = [place.name for place in places]
        wanted = [(link.ref, piece) for link in links for name in names for piece in link.pieces(name)]
        parts = []
        for link in links:
            tensors = {name: link.manifest.tensors[name] for name in names}
            manifest = link.manifest.model_copy(update={"tensors": tensors})
            parts.append(dataclasses.replace(link, manifest=manifest))
        return cls(file=file, places=tuple(places), links=tuple(parts), contents=HeldPieces.of(blobs, wanted))

    @property
    def working_bytes(self) -> int:
        """About the memory that a process needs: the pieces, and a tensor or a window of small ones."""
        largest = max((place.spec.nbytes for place in self.places), default=0)
        return _WORKING_BYTES * max(largest, _WINDOW_BYTES) + sum(map(len, self.contents.held.values()))


def fold(batch: DecodeBatch) -> Iterator[TensorChange]:
    """The change of each tensor; the file is only read. Raises `BrokenVersion`."""
    data = np.memmap(batch.file, mode="r", dtype=np.uint8)
    changes = ChangeDecoder(batch.contents)
    for places in filled(batch.places, _WINDOW_BYTES):
        changes.decode_ahead(_only_pieces(batch.links, data, places))
        for place in places:
            change = chain.fold(batch.links, changes, place.name, _tensor(data, place), place.before)
            yield dataclasses.replace(change, indices=_narrow(change.indices))


@dataclass(frozen=True)
class Folding:
    """`batch`, and the `path` of the journal part that its changes are written to."""

    batch: DecodeBatch
    path: Path


def fold_into(folding: Folding) -> JournalPart:
    """`fold`, with the changes written to a part of the journal."""
    offsets = {place.name: (place.offset, place.offset + place.spec.nbytes) for place in folding.batch.places}
    return parts.write(folding.path, offsets, fold(folding.batch))


def fill(batch: DecodeBatch) -> None:
    """Writes each tensor of the first link, a full version, and applies the other links to it."""
    data = np.memmap(batch.file, mode="r+", dtype=np.uint8)
    changes = ChangeDecoder(batch.contents)
    full, deltas = batch.links[0], batch.links[1:]
    for place in batch.places:
        target = _tensor(data, place)
        chain.fill(full, batch.contents, place.name, target)
        start = full.manifest.tensors[place.name].digest_value
        change = chain.fold(deltas, changes, place.name, target, start)
        target.reshape(-1)[change.indices] = change.values


def digests(batch: DecodeBatch) -> list[int]:
    """The digest of each tensor as it is in the file."""
    data = np.memmap(batch.file, mode="r", dtype=np.uint8)
    return [digest.digest(_tensor(data, place)) for place in batch.places]


def filled(places: Iterable[TensorPlace], limit: int) -> Iterator[list[TensorPlace]]:
    """Neighbours of at most `limit` bytes together, or one that is larger."""
    batch: list[TensorPlace] = []
    nbytes = 0
    for place in places:
        if batch and nbytes + place.spec.nbytes > limit:
            yield batch
            batch, nbytes = [], 0
        batch.append(place)
        nbytes += place.spec.nbytes
    if batch:
        yield batch


def _only_pieces(
    links: Sequence[Link], data: np.ndarray, places: Sequence[TensorPlace]
) -> Iterator[tuple[ManifestRef, Piece, np.ndarray]]:
    """The piece of each tensor that only one piece changes, and the bits before."""
    for place in places:
        found = chain.only_piece(links, place.name)
        if found is not None:
            ref, piece = found
            yield ref, piece, np.ascontiguousarray(_tensor(data, place)[piece.slices])


def _tensor(data: np.ndarray, place: TensorPlace) -> np.ndarray:
    part = np.asarray(data[place.offset : place.offset + place.spec.nbytes])
    return part.view(place.spec.bits).reshape(place.spec.shape)


def _narrow(indices: np.ndarray) -> np.ndarray:
    """As uint32 where that suffices, which is what the journal writes."""
    return indices.astype(np.uint32) if indices.size and int(indices[-1]) < 2**32 else indices
