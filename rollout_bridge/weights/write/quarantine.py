"""Which quarantine records of readers are true.

A reader with a bad disk, network or memory finds every version broken. Each full version costs as much as
hundreds of deltas, so what a record names is read again before it is believed.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from rollout_bridge.store import Store
from rollout_bridge.weights.format import chain
from rollout_bridge.weights.format.blobs import Blobs, ChangeDecoder
from rollout_bridge.weights.format.chain import Link
from rollout_bridge.weights.format.manifest import (
    QUARANTINE_PREFIX,
    BrokenVersion,
    Latest,
    parse_quarantine_key,
)
from rollout_bridge.weights.format.run import RunInfo

logger = logging.getLogger(__name__)


def first_broken(store: Store, run: RunInfo, head: Latest) -> int | None:
    """The first version from the newest full one to `head` that a record names and that is broken.

    A record of a version that reads well is removed, so that its reader tries again. What is not a record of
    such a version stays. Raises `StoreError` if the store fails.
    """
    if head.manifest is None or head.full is None:
        return None
    records = {place: key for key in store.list(QUARANTINE_PREFIX) if (place := parse_quarantine_key(key))}
    if not any(head.full.version <= version <= head.version for version, _ in records):
        return None
    try:
        links = chain.walk(store, head.manifest, run, held=None, cache={})
    except BrokenVersion as error:
        logger.warning("a reader is right: %s", error)
        return error.ref.version
    for number, link in enumerate(links):
        key = records.get((link.ref.version, link.ref.incarnation))
        if key is None:
            continue
        try:
            _look(store, links[: number + 1], _named(store, key))
        except BrokenVersion as error:
            logger.warning("a reader is right: %s", error)
            return link.ref.version
        logger.warning("%s: removed: what it says is broken reads well here", key)
        store.delete(key)
    return None


def _named(store: Store, key: str) -> str:
    """What the record at `key` says is broken, "" if it is no record."""
    try:
        record: Any = json.loads(store.read(key) or b"")
    except ValueError:
        return ""
    return str(record.get("what", "")) if isinstance(record, dict) else ""


def _look(store: Store, links: list[Link], what: str) -> None:
    """Reads `what` of the last of `links`: an object, or a tensor from the full version on.

    Raises `BrokenVersion` if it is broken.
    """
    ref, manifest = links[-1].ref, links[-1].manifest
    blobs = Blobs(store, attempts=2)
    try:
        name = what.removeprefix("tensor ")
        if name != what and name in manifest.tensors:
            for _ in chain.replay(links, blobs, ChangeDecoder(blobs), name):
                pass
            return
        for entry in manifest.tensors.values():
            for piece in (*entry.blobs, *entry.change):
                if ref.directory + piece.key == what:
                    blobs.piece(ref, piece)
    finally:
        blobs.close()
