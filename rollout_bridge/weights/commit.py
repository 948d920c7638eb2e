"""Committing a version: who owns the run, what each process wrote, the manifest, and the move of the head.

The order that keeps readers safe: blobs, then the manifest by conditional create, then `weights/latest` by
compare-and-swap. Whatever moment the trainer dies at, the head names a manifest whose blobs are all there.
"""

from __future__ import annotations

import logging
import time
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_bridge.errors import ExpectedError
from rollout_bridge.quantization import digest
from rollout_bridge.store import Store, StoreError
from rollout_bridge.waiting import wait_for
from rollout_bridge.weights import run
from rollout_bridge.weights.chain import parse_latest
from rollout_bridge.weights.manifest import (
    LATEST_KEY,
    Kind,
    Latest,
    Manifest,
    ManifestRef,
    Piece,
    Stats,
    TensorEntry,
    version_directory,
)
from rollout_bridge.weights.run import RunError, RunInfo

logger = logging.getLogger(__name__)

_SWAP_ATTEMPTS = 5
_Message = TypeVar("_Message", bound="Begin | Part")


class Superseded(ExpectedError):
    """Another trainer has taken the run over; this one must exit. `successor` is its pointer."""

    def __init__(self, successor: Latest, *, incarnation: int) -> None:
        super().__init__(
            f"incarnation {incarnation} of this run is superseded by incarnation "
            f"{successor.incarnation} ({successor.owner or 'owner unknown'}), head at version "
            f"{successor.version}. This trainer stops; start another only if that one is gone"
        )
        self.successor = successor


class Begin(BaseModel):
    """What process 0 tells the others about a publication."""

    model_config = ConfigDict(extra="forbid")
    attempt: str
    kind: Kind
    follows: bool = False


class PartTensor(BaseModel):
    """What one process wrote of a tensor. digest: its part of a full digest, or of the digest's change.

    changed: elements of it.
    """

    model_config = ConfigDict(extra="forbid")
    digest: str
    blobs: list[Piece]
    changed: int


class Part(BaseModel):
    """What one process wrote of a version.

    change: of a full version that follows its parent, what a delta has in `tensors`.
    """

    model_config = ConfigDict(extra="forbid")
    attempt: str
    tensors: dict[str, PartTensor]
    change: dict[str, PartTensor] | None = None
    full_bytes: int
    delta_bytes: int
    reference_bytes: float
    changed: int


def take_over(store: Store, *, owner: str) -> Latest:
    """Makes this trainer the owner: same version, incarnation + 1. The pointer it now owns.

    Raises `Superseded` if another trainer took over at the same moment, `RunError` if there is no run.
    """
    joined = run.load(store)
    if joined is None:
        raise RunError(f"{store.url}{run.RUN_KEY}: missing; create the run before taking it over")
    data, generation = store.read_with_generation(LATEST_KEY)
    if data is None:
        mine = Latest(version=0, incarnation=joined.incarnation + 1, step=0, owner=owner)
    else:
        current = parse_latest(store, data)
        incarnation = max(current.incarnation, joined.incarnation) + 1
        mine = current.model_copy(update={"incarnation": incarnation, "owner": owner})
    if not store.swap(LATEST_KEY, mine.to_bytes(), generation):
        winner = _read_pointer(store)[0]
        if winner != mine:
            raise Superseded(winner, incarnation=mine.incarnation)
    run.move_incarnation(store, mine.incarnation)
    return mine


def announce(store: Store, mine: Latest) -> None:
    """Moves the head to `mine`, from the version before it; nothing to do if it is there already.

    Raises `Superseded` if the run has another owner by now.
    """
    for _ in range(_SWAP_ATTEMPTS):
        current, generation = _read_pointer(store)
        if current == mine:
            return
        if current.incarnation != mine.incarnation:
            raise Superseded(current, incarnation=mine.incarnation)
        if current.version != mine.version - 1:
            raise StoreError(
                f"store {store.url}: {LATEST_KEY} is at version {current.version}, expected "
                f"{mine.version - 1}: another program moves it. Stop it, then restart the trainer"
            )
        if store.swap(LATEST_KEY, mine.to_bytes(), generation):
            return
    raise StoreError(
        f"store {store.url}: {LATEST_KEY} could not be moved to version {mine.version} in {_SWAP_ATTEMPTS} "
        "attempts, though nobody owns the run but this trainer. Check what else writes to the store"
    )


def create_manifest(store: Store, manifest: Manifest) -> ManifestRef:
    """Writes the manifest once. Raises `Superseded` or `StoreError` if another is in its place."""
    ref = manifest.ref
    data = manifest.to_bytes()
    # A refusal can also be the echo of this very write, retried below after its answer was lost.
    if not store.create(ref.key, data) and store.read(ref.key) != data:
        current, _ = _read_pointer(store)
        if current.incarnation != manifest.incarnation:
            raise Superseded(current, incarnation=manifest.incarnation)
        raise StoreError(
            f"store {store.url}: {ref.key} exists with other content though this trainer owns incarnation "
            f"{manifest.incarnation}. Restart the trainer: it goes on from the head under a new incarnation"
        )
    return ref


def assemble(
    joined: RunInfo,
    *,
    version: int,
    incarnation: int,
    step: int,
    kind: Kind,
    parent: ManifestRef | None,
    digests: dict[str, int],
    parts: list[Part],
    update_rms: float | None,
    attempt: str,
) -> Manifest:
    """The manifest of what all processes wrote. digests: of every tensor before a delta.

    Raises ValueError (of `Manifest`) if the parts of a full version do not cover a tensor, or if its change
    does not lead to it.
    """
    specs = joined.tensors
    changes = [part.change for part in parts if part.change is not None]
    follows = len(changes) == len(parts)
    entries = {}
    for name, spec in specs.items():
        start = 0 if kind is Kind.FULL else digests[name]
        value, blobs, changed = _merge(start, [part.tensors for part in parts], name)
        change: tuple[Piece, ...] = ()
        if follows:
            led_to, change, changed = _merge(digests[name], changes, name)
            if led_to != value:
                raise ValueError(
                    f"tensor {name}: its change since version {version - 1} leads to digest {led_to:016x}, "
                    f"its new bits have {value:016x}: the baseline is not what was published"
                )
        entries[name] = TensorEntry(
            dtype=spec.dtype,
            shape=spec.shape,
            digest=f"{value:016x}",
            blobs=blobs,
            change=change,
            changed=changed,
        )
    stats = Stats(
        delta_bytes=sum(part.delta_bytes for part in parts),
        full_bytes=sum(part.full_bytes for part in parts),
        reference_bytes=sum(part.reference_bytes for part in parts),
        full_bytes_bf16=2 * sum(specs[source.name].size for source in joined.sources),
        changed_fraction=sum(part.changed for part in parts) / sum(spec.size for spec in specs.values()),
        update_rms=update_rms,
    )
    return Manifest(
        run_id=joined.run_id,
        version=version,
        incarnation=incarnation,
        step=step,
        kind=kind,
        follows=follows,
        time=time.time(),
        parent=parent,
        tensors=entries,
        stats=stats,
        attempt=attempt,
    )


def _merge(start: int, parts: list[dict[str, PartTensor]], name: str) -> tuple[int, tuple[Piece, ...], int]:
    """(digest of a tensor, its pieces, elements in them) from what each process wrote of it."""
    mine = [part[name] for part in parts if name in part]
    value = digest.combine(start, *(int(part.digest, 16) for part in mine))
    pieces = tuple(piece for part in mine for piece in part.blobs)
    return value, pieces, sum(part.changed for part in mine)


def put_begin(store: Store, *, version: int, incarnation: int, begin: Begin) -> None:
    """Process 0 tells the others that a publication has begun, and of which kind."""
    store.put(_begin_key(version, incarnation), begin.model_dump_json().encode())


def wait_begin(store: Store, *, version: int, incarnation: int, attempt: str, timeout: float) -> Begin:
    """What process 0 decided. Raises `StoreError` after `timeout` seconds."""
    key = _begin_key(version, incarnation)
    return _wait(store, {key: 0}, Begin, attempt=attempt, timeout=timeout)[0]


def put_part(store: Store, *, version: int, incarnation: int, process: int, part: Part) -> None:
    """Says that the blobs of one process are all written, and where."""
    store.put(_part_key(version, incarnation, process), part.model_dump_json().encode())


def wait_parts(
    store: Store, *, version: int, incarnation: int, processes: int, attempt: str, timeout: float
) -> list[Part]:
    """The parts of all processes, in order. Raises `StoreError` naming those missing after `timeout` s."""
    keys = {_part_key(version, incarnation, process): process for process in range(processes)}
    return _wait(store, keys, Part, attempt=attempt, timeout=timeout)


def wait_head(store: Store, *, version: int, incarnation: int, timeout: float) -> Latest:
    """The pointer once process 0 has moved it to `version`. Raises `Superseded`, or `StoreError` in time."""

    def look() -> Latest | None:
        current, _ = _read_pointer(store)
        if current.incarnation != incarnation:
            raise Superseded(current, incarnation=incarnation)
        return current if current.version == version else None

    what = f"process 0 to commit version {version} to {store.url}; its log says why it did not"
    return wait_for(look, what, timeout=timeout, poll=0.05, error=StoreError)


def _wait(
    store: Store, keys: dict[str, int], kind: type[_Message], *, attempt: str, timeout: float
) -> list[_Message]:
    found: dict[str, _Message] = {}

    def look() -> list[_Message] | None:
        for key in keys.keys() - found.keys():
            data = store.read(key)
            if data is None:
                continue
            try:
                message = kind.model_validate_json(data)
            except ValidationError as error:
                raise StoreError(f"store {store.url}: {key} is damaged: {str(error)[:300]}") from error
            if message.attempt == attempt:  # others are left over from an attempt that failed
                found[key] = message
        return [found[key] for key in keys] if len(found) == len(keys) else None

    def missing() -> str:
        processes = sorted(keys[key] for key in keys.keys() - found.keys())
        return (
            f"the {kind.__name__.lower()} of attempt {attempt} by process(es) {processes} in {store.url}; "
            "look at their logs, then restart the trainer"
        )

    return wait_for(look, missing, timeout=timeout, poll=0.01, slowest=1.0, error=StoreError)


def _read_pointer(store: Store) -> tuple[Latest, bytes]:
    data, generation = store.read_with_generation(LATEST_KEY)
    if data is None:
        raise StoreError(
            f"store {store.url}: {LATEST_KEY} has disappeared. Somebody removes objects of this run; stop "
            "them and restart the trainer"
        )
    return parse_latest(store, data), generation


def _begin_key(version: int, incarnation: int) -> str:
    return version_directory(version, incarnation) + "begin.json"


def _part_key(version: int, incarnation: int, process: int) -> str:
    return version_directory(version, incarnation) + f"part-{process:05d}.json"
