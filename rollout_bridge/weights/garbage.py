"""What of the weight chain may go: everything no reader can need again.

Kept: the newest full version (a new reader starts there), what leads to an evaluation still wanted, and the
chain from the oldest version an agent has acknowledged, as long as that is within `retention` versions of the
head; an agent further behind takes the newest full version.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from rollout_bridge.store import Store
from rollout_bridge.weights import chain, run
from rollout_bridge.weights.chain import Link
from rollout_bridge.weights.manifest import (
    ACKS_PREFIX,
    QUARANTINE_PREFIX,
    VERSIONS_PREFIX,
    Kind,
    ManifestRef,
    parse_version_key,
)
from rollout_bridge.weights.pins import active_pins

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collected:
    """Versions removed (version, incarnation), and the oldest that is kept."""

    removed: tuple[tuple[int, int], ...]
    oldest_kept: int


def collect(store: Store, *, retention: int, now: float | None = None) -> Collected:
    """Removes versions nobody can need: those before the oldest kept, and unfinished ones beside the chain.

    retention: versions behind the head up to which an acknowledgement keeps the chain. now: unix seconds.
    Only the owner of the run may call it, with no publication in flight. Raises `BrokenVersion` if the chain
    cannot be read: then nothing is removed.
    """
    if retention < 0:
        raise ValueError(f"retention: {retention} is negative")
    joined, latest = run.load(store), chain.read_latest(store)
    if joined is None or latest is None or latest.manifest is None or latest.full is None:
        return Collected((), 0)
    now = time.time() if now is None else now
    pins = [pin.version for pin in active_pins(store, now=now) if pin.version <= latest.version]
    acknowledged = [version for version in _acknowledged(store) if version >= latest.version - retention]
    start = min([latest.full.version, *pins, *(version + 1 for version in acknowledged)])
    links = _chain_from(store, latest.manifest, joined, start, reach_full=min([latest.version, *pins]))
    oldest = links[0].manifest.version
    kept = {(link.ref.version, link.ref.incarnation) for link in links}
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
        if int(key.removeprefix(QUARANTINE_PREFIX).split("-")[0]) < oldest:
            store.delete(key)
    if keys:
        logger.info("removed %d versions, oldest kept %d", len(keys), oldest)
    return Collected(tuple(sorted(keys)), oldest)


def _chain_from(
    store: Store, head: ManifestRef, joined: run.RunInfo, start: int, *, reach_full: int
) -> list[Link]:
    """The chain, oldest first, from `start` or before: a full version at or before `reach_full` is in it."""
    links: list[Link] = []
    ref: ManifestRef | None = head
    full_seen = False
    while ref is not None and not (ref.version < start and full_seen):
        manifest = chain.read_manifest(store, ref, joined)
        links.append(Link(ref, manifest))
        full_seen |= manifest.kind is Kind.FULL and ref.version <= reach_full
        ref = manifest.parent
    return links[::-1]


def _acknowledged(store: Store) -> list[int]:
    versions = []
    for key in store.list(ACKS_PREFIX):
        ack: Any = store.read_json(key)
        version = ack.get("version") if isinstance(ack, dict) else None
        if isinstance(version, int):
            versions.append(version)
        elif version is not None or not isinstance(ack, dict):
            logger.warning("%s%s: no version in it; ignored", store.url, key)
    return versions
