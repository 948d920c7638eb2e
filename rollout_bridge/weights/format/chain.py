"""Reading the weight chain: the head, the manifests that lead to it, and the changes their blobs hold.

Everything is checked before use: manifests by SHA-256, blobs by hash and length, tensors by digest. A damaged
version raises `BrokenVersion`; a store that cannot be reached raises `StoreError`.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from rollout_bridge import delta
from rollout_bridge.quantization import digest
from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights.format.blobs import ChangeDecoder, PieceSource
from rollout_bridge.weights.format.manifest import (
    LATEST_KEY,
    BrokenVersion,
    Kind,
    Latest,
    Manifest,
    ManifestRef,
    Piece,
)
from rollout_bridge.weights.format.run import RunInfo

logger = logging.getLogger(__name__)

# Bits of NaN and infinity (E4M3 has no infinity, and one NaN of either sign).
_NOT_FINITE = {"F8_E4M3": 0x7F, "BF16": 0x7F80, "F32": 0x7F800000}


def parse_latest(store: Store, data: bytes) -> Latest:
    """`weights/latest` from its bytes. Raises `StoreError` if they are not a pointer."""
    try:
        return Latest.model_validate_json(data)
    except ValidationError as error:
        raise StoreError(
            f"store {store.url}: {LATEST_KEY} is not a pointer to a version: {str(error)[:300]}. Only the "
            "trainer writes it; find the other program that did"
        ) from error


def read_latest(store: Store) -> Latest | None:
    """The head of the chain, None before a trainer has owned the run."""
    data = store.read(LATEST_KEY)
    return None if data is None else parse_latest(store, data)


def read_manifest(store: Store, ref: ManifestRef, run: RunInfo) -> Manifest:
    """The manifest `ref` names, checked to be of `run`. Raises `BrokenVersion`."""
    data = store.read(ref.key)
    if data is None:
        raise BrokenVersion(ref, ref.key, "missing")
    manifest = Manifest.from_bytes(data, ref)
    if manifest.run_id != run.run_id:
        raise BrokenVersion(ref, ref.key, f"is of run {manifest.run_id}, this is {run.run_id}")
    specs = run.tensors
    if {name: entry.spec for name, entry in manifest.tensors.items()} != specs:
        different = next(
            name
            for name in sorted(specs.keys() | manifest.tensors.keys())
            if name not in manifest.tensors or manifest.tensors[name].spec != specs.get(name)
        )
        raise BrokenVersion(ref, ref.key, f"tensor {different} is not as run.json has it")
    return manifest


@dataclass(frozen=True)
class TensorChange:
    """Elements of tensor `name` at flat `indices` (ascending) take the bits `values`."""

    name: str
    indices: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Link:
    """One version of the chain, read either `whole` or as the change from its parent."""

    ref: ManifestRef
    manifest: Manifest
    whole: bool

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """The pieces of tensor `name` that have to be read."""
        entry = self.manifest.tensors[name]
        return entry.blobs if self.whole or self.manifest.kind is Kind.DELTA else entry.change

    @property
    def nbytes(self) -> int:
        stats = self.manifest.stats
        return stats.full_bytes if self.whole else stats.delta_bytes


def walk(
    store: Store,
    head: ManifestRef,
    run: RunInfo,
    *,
    held: ManifestRef | None,
    cache: dict[ManifestRef, Manifest],
    avoid: Container[ManifestRef] = (),
) -> list[Link]:
    """Versions that lead to `head`, oldest first: from the one after `held`, or from a full version.

    Of these two ways it takes the one with fewer bytes. It goes past the newest full version only if every
    manifest is there and none is in `avoid`.
    cache: manifests already read, kept by the caller. Raises `BrokenVersion` naming one that cannot be read.
    """
    links: list[Link] = []
    from_full: list[Link] | None = None
    ref: ManifestRef | None = head
    while ref is not None and ref != held:
        if from_full is not None and (ref in avoid or (held is not None and ref.version <= held.version)):
            return from_full
        try:
            if ref not in cache:
                cache[ref] = read_manifest(store, ref, run)
        except BrokenVersion as error:
            if from_full is None:
                raise
            logger.info("from the full version %d: %s", from_full[0].ref.version, error)
            return from_full
        manifest = cache[ref]
        if manifest.kind is Kind.FULL:
            from_full = from_full or [Link(ref, manifest, whole=True), *links[::-1]]
            if held is None or held.version >= ref.version or not manifest.follows:
                return from_full
        links.append(Link(ref, manifest, whole=False))
        if from_full is not None and _nbytes(links) > _nbytes(from_full):
            return from_full
        ref = manifest.parent
    return links[::-1]


def _nbytes(links: Iterable[Link]) -> int:
    return sum(link.nbytes for link in links)


def fold(
    links: Sequence[Link], changes: ChangeDecoder, name: str, old: np.ndarray, old_digest: int
) -> TensorChange:
    """All the deltas `links` (oldest first) of tensor `name`, as one change of `old`.

    The digest after each delta is checked. Raises `BrokenVersion` naming the first that does not fit.
    """
    current_digest = old_digest
    only = only_piece(links, name) is not None  # then nothing is read that was changed before
    current = old
    touched: list[TensorChange] = []
    for link in links:
        ref, entry = link.ref, link.manifest.tensors[name]
        for piece in link.pieces(name):
            if current is old and not only:
                current = old.copy()
            before = np.ascontiguousarray(current[piece.slices])
            try:
                decoded = changes.change(ref, piece, before)
            except delta.DeltaError as error:
                raise BrokenVersion(ref, ref.directory + piece.key, f"tensor {name}: {error}") from error
            local, values = _as_sparse(decoded, before)
            indices = flat_indices(local, piece.rectangle, entry.shape)
            _check_finite(ref, name, entry.dtype, values)
            current_digest = digest.update(current_digest, indices, before.reshape(-1)[local], values)
            if not only:
                current.reshape(-1)[indices] = values
            touched.append(TensorChange(name, indices, values))
        _check_digest(ref, name, current_digest, entry.digest_value)
    if not touched:
        return TensorChange(name, np.empty(0, np.int64), np.empty(0, old.dtype))
    if only:
        return touched[0]
    indices = np.unique(np.concatenate([change.indices for change in touched]))
    return TensorChange(name, indices, current.reshape(-1)[indices])


def only_piece(links: Sequence[Link], name: str) -> tuple[ManifestRef, Piece] | None:
    """The piece by which `links` change tensor `name` and its version, if there is exactly one."""
    pieces = [(link.ref, piece) for link in links for piece in link.pieces(name)]
    return pieces[0] if len(pieces) == 1 else None


def fill(link: Link, blobs: PieceSource, name: str, target: np.ndarray) -> None:
    """Writes tensor `name` of a full version into `target` and checks its digest. Raises `BrokenVersion`."""
    ref, entry = link.ref, link.manifest.tensors[name]
    for piece in entry.blobs:
        try:
            content = delta.decode_full(blobs.piece(ref, piece), piece.shape, target.dtype)
        except delta.DeltaError as error:
            raise BrokenVersion(ref, ref.directory + piece.key, f"tensor {name}: {error}") from error
        _check_finite(ref, name, entry.dtype, content)
        target[piece.slices] = content
    _check_digest(ref, name, digest.digest(target), entry.digest_value)


def replay(
    links: Sequence[Link], blobs: PieceSource, changes: ChangeDecoder, name: str
) -> Iterator[np.ndarray]:
    """Tensor `name` as each of `links` leaves it, from the full version that comes first.

    Every digest is checked, of a full version that follows its parent both ways. The array may be changed by
    the next link. Raises `BrokenVersion`.
    """
    spec = links[0].manifest.tensors[name].spec
    current = np.empty(spec.shape, spec.bits)
    current_digest = 0
    for number, link in enumerate(links):
        if link.manifest.kind is Kind.FULL:
            whole = np.empty(spec.shape, spec.bits)
            fill(link, blobs, name, whole)
            yield whole
            if number == 0 or not link.manifest.follows:
                current, current_digest = whole, link.manifest.tensors[name].digest_value
                continue
        step = Link(link.ref, link.manifest, whole=False)
        change = fold([step], changes, name, current, current_digest)
        current.reshape(-1)[change.indices] = change.values
        current_digest = link.manifest.tensors[name].digest_value
        yield current


def flat_indices(
    local: np.ndarray, rectangle: tuple[tuple[int, int], ...], shape: tuple[int, ...]
) -> np.ndarray:
    """Flat indices into a tensor of `shape` of flat indices into one of its rectangles; order is kept."""
    local = local.astype(np.int64, copy=False)
    if all(bounds == (0, size) for bounds, size in zip(rectangle, shape, strict=True)):
        return local
    if len(shape) == 1:
        return local + rectangle[0][0]
    (row_start, _), (column_start, column_stop) = rectangle
    rows, columns = np.divmod(local, column_stop - column_start)
    return (rows + row_start) * shape[1] + columns + column_start


def objects_of(links: Iterable[Link], name: str) -> list[str]:
    """Keys of the objects that hold pieces of tensor `name`."""
    return [link.ref.directory + piece.key for link in links for piece in link.pieces(name)]


def digests_of(manifest: Manifest) -> dict[str, int]:
    """Digest of every tensor after this version."""
    return {name: entry.digest_value for name, entry in manifest.tensors.items()}


def _as_sparse(
    decoded: delta.SparseChange | delta.DenseChange, before: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(decoded, delta.SparseChange):
        return decoded.indices, decoded.values
    values = decoded.values.reshape(-1)
    local = np.flatnonzero(values != before.reshape(-1))
    return local, values[local]


def _check_finite(ref: ManifestRef, name: str, dtype: str, bits: np.ndarray) -> None:
    """No trainer publishes NaN or infinity: such bits are damage even if the digest is right."""
    mask = bits.dtype.type(_NOT_FINITE[dtype])
    bad = np.count_nonzero((bits & mask) == mask)
    if bad:
        raise BrokenVersion(ref, f"tensor {name}", f"{bad} of its new values are NaN or infinite")


def _check_digest(ref: ManifestRef, name: str, found: int, expected: int) -> None:
    if found != expected:
        raise BrokenVersion(ref, f"tensor {name}", f"digest {found:016x}, expected {expected:016x}")
