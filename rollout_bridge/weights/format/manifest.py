"""The manifest of one version of the weights, and the pointer `weights/latest` that names the head.

Another machine wrote these bytes, so every field is checked before use.
"""

from __future__ import annotations

import hashlib
import math
import re
from enum import StrEnum
from typing import Annotated, Literal

import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollout_bridge.errors import ExpectedError
from rollout_bridge.weights.format.canonical import BITS, TensorSpec

LATEST_KEY = "weights/latest"
VERSIONS_PREFIX = "weights/versions/"
QUARANTINE_PREFIX = "weights/quarantine/"

_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class BrokenVersion(ExpectedError, ValueError):
    """A manifest or blob is missing or damaged. `ref` names the version, `what` the object."""

    def __init__(self, ref: ManifestRef, what: str, reason: str) -> None:
        super().__init__(f"version {ref.version} (incarnation {ref.incarnation}): {what}: {reason}")
        self.ref = ref
        self.what = what
        self.reason = reason

    def __reduce__(self) -> tuple[type[BrokenVersion], tuple[ManifestRef, str, str]]:
        return BrokenVersion, (self.ref, self.what, self.reason)


class Kind(StrEnum):
    FULL = "full"
    DELTA = "delta"


class _ManifestRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal records are equal bytes."""
        return self.model_dump_json(exclude_none=True).encode()


class ManifestRef(_ManifestRecord):
    """A manifest, named by its version, incarnation and the SHA-256 of its bytes."""

    version: Annotated[int, Field(ge=1, lt=2**53)]
    incarnation: _Count
    hash: _Sha256

    @property
    def directory(self) -> str:
        """Key prefix of the manifest and its blobs."""
        return version_directory(self.version, self.incarnation)

    @property
    def key(self) -> str:
        return self.directory + "manifest.json"


class Latest(_ManifestRecord):
    """`weights/latest`. Version 0 without a manifest: the run has an owner and has published nothing.

    incarnation: of the trainer that owns the run; the manifest may be of an earlier one.
    full: the newest full version, which a reader takes when the chain to `manifest` is broken.
    owner: host and process of the trainer, for messages.
    """

    version: _Count
    incarnation: _Count
    step: _Count
    manifest: ManifestRef | None = None
    full: ManifestRef | None = None
    owner: str = ""

    @property
    def manifest_hash(self) -> str | None:
        return self.manifest.hash if self.manifest else None

    @model_validator(mode="after")
    def _consistent(self) -> Latest:
        if (self.manifest.version if self.manifest else 0) != self.version:
            raise ValueError(f"version {self.version} and its manifest {self.manifest} disagree")
        if (self.full is None) != (self.manifest is None):
            raise ValueError("a head has a full version it starts from")
        return self


def piece_hash(data: bytes) -> str:
    """The first 128 bits of BLAKE3, hex.

    Whoever may not write manifests cannot make other bytes with this hash. Whoever may write to the store can
    publish a version: manifests are not signed.
    """
    return blake3.blake3(data).hexdigest(length=16)


class Piece(_ManifestRecord):
    """One encoded rectangle of a tensor: `length` bytes at `offset` of the object `key` of this version.

    hash: of those bytes, see `piece_hash`. rectangle: [start, stop) on each axis of the Hugging Face tensor.
    member: its number in a blob that several pieces share; None: the blob holds this piece alone.
    """

    key: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*\.blob$")]
    offset: _Count
    length: _Count
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    rectangle: tuple[tuple[_Count, _Count], ...]
    member: _Count | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.rectangle)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.rectangle)


class TensorEntry(_ManifestRecord):
    """A tensor after this version. Without blobs it did not change, and its digest is the old one.

    change: in a full version that `follows` its parent, the pieces of the change since the parent.
    changed: how many elements changed since the parent; all of them in a full version that does not follow.
    """

    dtype: str
    shape: tuple[_Count, ...]
    digest: _Digest
    blobs: tuple[Piece, ...] = ()
    change: tuple[Piece, ...] = ()
    changed: _Count = 0

    @property
    def digest_value(self) -> int:
        return int(self.digest, 16)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape)


class Stats(_ManifestRecord):
    """Sizes of the blobs in bytes, without the manifest. 0: the version does not have that form.

    delta_bytes: of the change since the parent. full_bytes: of all bits. reference_bytes: order-0 conditional
        entropy of the change. full_bytes_bf16: of the checkpoint, uncompressed.
    changed_fraction: of all elements. update_rms: of the master weights since the version before, if known.
    """

    delta_bytes: _Count
    full_bytes: _Count = 0
    reference_bytes: _Finite
    full_bytes_bf16: _Count
    changed_fraction: _Finite
    update_rms: _Finite | None = None


class Manifest(_ManifestRecord):
    """One version of the weights, written last: a reader that sees it can read every blob it names.

    format_version: 3 since the hashes of pieces are BLAKE3.
    follows: a full version that also lists the change from its parent, for readers that hold the parent.
    time: unix seconds when it was made, by the clock of process 0.
    """

    format_version: Literal[3] = 3
    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    version: Annotated[int, Field(ge=1, lt=2**53)]
    incarnation: _Count
    step: _Count
    kind: Kind
    follows: bool = False
    time: _Finite = 0.0
    parent: ManifestRef | None = None
    tensors: dict[str, TensorEntry]
    stats: Stats
    attempt: str = ""

    @classmethod
    def from_bytes(cls, data: bytes, ref: ManifestRef) -> Manifest:
        """The manifest that `ref` names. Raises `BrokenVersion` if these bytes are not it."""
        found = hashlib.sha256(data).hexdigest()
        if found != ref.hash:
            raise BrokenVersion(ref, ref.key, f"SHA-256 {found}, expected {ref.hash}")
        try:
            manifest = cls.model_validate_json(data)
        except ValidationError as error:
            raise BrokenVersion(ref, ref.key, f"not a manifest: {str(error)[:500]}") from error
        if (manifest.version, manifest.incarnation) != (ref.version, ref.incarnation):
            raise BrokenVersion(
                ref, ref.key, f"says version {manifest.version}, incarnation {manifest.incarnation}"
            )
        return manifest

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if (self.kind is Kind.DELTA or self.follows) and self.parent is None:
            raise ValueError("a delta names the version it is a delta on")
        if self.follows and self.kind is Kind.DELTA:
            raise ValueError("only a full version can also list the change from its parent")
        if self.parent is not None and self.parent.version != self.version - 1:
            raise ValueError(f"parent of version {self.version} is version {self.parent.version}")
        for name, entry in self.tensors.items():
            _check_entry(name, entry, entry.blobs, whole=self.kind is Kind.FULL)
            _check_entry(name, entry, entry.change if self.follows else (), whole=False)
        return self

    @property
    def ref(self) -> ManifestRef:
        return ManifestRef(
            version=self.version,
            incarnation=self.incarnation,
            hash=hashlib.sha256(self.to_bytes()).hexdigest(),
        )


def version_directory(version: int, incarnation: int) -> str:
    """Key prefix of everything of one version, ending in a slash. Zero-padded, so listings are in order."""
    return f"{VERSIONS_PREFIX}{version:08d}/{incarnation:06d}/"


def parse_version_key(key: str) -> tuple[int, int] | None:
    """(version, incarnation) of a key below `weights/versions/`, None for anything else."""
    match = re.match(re.escape(VERSIONS_PREFIX) + r"(\d{8,})/(\d{6,})/", key)
    return (int(match[1]), int(match[2])) if match else None


def quarantine_key(ref: ManifestRef) -> str:
    """Key of the record that a reader found `ref` broken."""
    return f"{QUARANTINE_PREFIX}{ref.version:08d}-{ref.incarnation:06d}.json"


def parse_quarantine_key(key: str) -> tuple[int, int] | None:
    """(version, incarnation) of a quarantine record, None for any other key."""
    match = re.fullmatch(re.escape(QUARANTINE_PREFIX) + r"(\d{8,})-(\d{6,})\.json", key)
    return (int(match[1]), int(match[2])) if match else None


def _check_entry(name: str, entry: TensorEntry, pieces: tuple[Piece, ...], *, whole: bool) -> None:
    if entry.dtype not in BITS:
        raise ValueError(f"tensor {name}: dtype {entry.dtype!r} is not one of {sorted(BITS)}")
    covered = 0
    for piece in pieces:
        inside = len(piece.rectangle) == len(entry.shape) and all(
            start < stop <= size for (start, stop), size in zip(piece.rectangle, entry.shape, strict=True)
        )
        if not inside:
            raise ValueError(f"tensor {name}: rectangle {piece.rectangle} does not lie in {entry.shape}")
        covered += math.prod(piece.shape)
    size = math.prod(entry.shape)
    if covered > size or (whole and covered != size):
        raise ValueError(f"tensor {name}: its rectangles hold {covered} elements, the tensor has {size}")
