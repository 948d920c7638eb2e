"""Removes versions of the weight chain that no reader needs.

Kept are the newest full version (a new reader starts there), the chain to each version that an open
evaluation needs, versions that were the head within the retention time, and the chain from the oldest version
that an agent has acknowledged within `Retention.versions` of the head. An agent further behind takes the
newest full version.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from rollout_bridge.control import ACKS_PREFIX, Ack, readable
from rollout_bridge.store import Store
from rollout_bridge.weights.format import chain, run
from rollout_bridge.weights.format.manifest import (
    QUARANTINE_PREFIX,
    VERSIONS_PREFIX,
    BrokenVersion,
    Kind,
    ManifestRef,
    parse_quarantine_key,
    parse_version_key,
)
from rollout_bridge.weights.format.pins import unanswered

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept. versions: an acknowledgement of this many versions behind the head still keeps the chain.

    seconds: a version is kept this long after the next one became the head.
    every: versions between two collections.
    """

    versions: int = 200
    seconds: float = 600.0
    every: int = 20

    def __post_init__(self) -> None:
        for name, least in (("versions", 0), ("seconds", 0), ("every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"retention: {name}: {getattr(self, name)} is less than {least}")


@dataclass(frozen=True)
class Collected:
    """Versions removed (version, incarnation), and the oldest that is kept."""

    removed: tuple[tuple[int, int], ...]
    oldest_kept: int


def collect(store: Store, *, retention: Retention, now: float | None = None) -> Collected:
    """Removes versions before the oldest kept one, and unfinished ones that are not in the chain.

    now: unix seconds. Only the owner of the run may call it, with no publication in flight. Raises
    `BrokenVersion`, and removes nothing, if the chain cannot be read back to a full version.
    """
    joined, latest = run.load(store), chain.read_latest(store)
    if joined is None or latest is None or latest.manifest is None or latest.full is None:
        return Collected((), 0)
    now = time.time() if now is None else now
    pins = [pin.version for pin in unanswered(store) if pin.version <= latest.version]
    acknowledged = [
        version for version in _acknowledged(store) if version >= latest.version - retention.versions
    ]
    start = min([latest.full.version, *pins, *(version + 1 for version in acknowledged)])
    kept = _chain_from(
        store,
        latest.manifest,
        joined,
        start,
        reach_full=min([latest.version, *pins]),
        reach_time=now - retention.seconds,
    )
    oldest = min(version for version, _ in kept)
    keys: dict[tuple[int, int], list[str]] = {}
    for key in store.list(VERSIONS_PREFIX):
        place = parse_version_key(key)
        if place is not None and place not in kept and place[0] <= latest.version:
            keys.setdefault(place, []).append(key)
    for place in sorted(keys):
        # The manifest first: a reader that still sees it can still read every blob it names.
        for key in sorted(keys[place], key=lambda key: not key.endswith("/manifest.json")):
            store.delete(key)
    for key in store.list(QUARANTINE_PREFIX):
        place = parse_quarantine_key(key)
        if place is not None and place[0] < oldest:
            store.delete(key)
    if keys:
        logger.info("removed %d versions, oldest kept %d", len(keys), oldest)
    return Collected(tuple(sorted(keys)), oldest)


def _chain_from(
    store: Store, head: ManifestRef, joined: run.RunInfo, start: int, *, reach_full: int, reach_time: float
) -> set[tuple[int, int]]:
    """The chain from `start` or earlier, as far as it can be read.

    It contains a full version at or before `reach_full` and every head after `reach_time`.
    """
    kept: set[tuple[int, int]] = set()
    ref: ManifestRef | None = head
    full_seen = False
    succeeded = float("inf")  # when the version after it became the head
    while ref is not None and not (ref.version < start and full_seen and succeeded < reach_time):
        try:
            manifest = chain.read_manifest(store, ref, joined)
        except BrokenVersion:
            if not full_seen:
                raise
            break
        kept.add((ref.version, ref.incarnation))
        full_seen |= manifest.kind is Kind.FULL and ref.version <= reach_full
        succeeded = manifest.time
        ref = manifest.parent
    return kept


def _acknowledged(store: Store) -> list[int]:
    return [ack.version for ack in readable(store, Ack, ACKS_PREFIX) if ack.version is not None]
