"""A report on a weight chain: versions, sizes, where they change, what each agent serves, and problems.

Reads the store and writes nothing to it. Everything returned is plain JSON.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from typing import Any

import numpy as np

from rollout_bridge.control import ACKS_PREFIX, Ack, readable
from rollout_bridge.store import Store
from rollout_bridge.weights.format import chain, run
from rollout_bridge.weights.format.blobs import Blobs, ChangeDecoder
from rollout_bridge.weights.format.chain import Link
from rollout_bridge.weights.format.manifest import (
    QUARANTINE_PREFIX,
    VERSIONS_PREFIX,
    BrokenVersion,
    Kind,
    Manifest,
    parse_quarantine_key,
    parse_version_key,
)
from rollout_bridge.weights.format.run import RunError, RunInfo

# The first that matches the name of a tensor.
_KINDS = (
    ("scales", r"_scale_inv$"),
    ("router", r"\.mlp\.gate\."),
    ("routed experts", r"\.experts\.\d+\."),
    ("shared experts", r"\.shared_experts\."),
    ("norms", r"norm\.weight$"),
    ("attention", r"\.self_attn\."),
    ("dense mlp", r"\.mlp\."),
    ("embedding", r"embed_tokens"),
    ("head", r"lm_head"),
)


def inspect_weights(store: Store, *, verify: bool = False, now: float | None = None) -> dict[str, Any]:
    """`run`, `head`, `versions` (oldest first), `sparsity`, `agents`, `health` of the chain in `store`.

    verify: also replays the chain from its oldest full version and checks every digest on the way.
    Raises `RunError` if the store holds no run, `StoreError` if it fails.
    """
    joined, latest = run.load(store), chain.read_latest(store)
    if joined is None:
        raise RunError(f"{store.url}{run.RUN_KEY}: missing: no trainer has started this run")
    now = time.time() if now is None else now
    links, problem = _links(store, joined)
    problems = [problem] if problem else []
    head = latest and {name: getattr(latest, name) for name in ("version", "incarnation", "step", "owner")}
    found = {
        "url": store.url,
        "run": {"run_id": joined.run_id, "incarnation": joined.incarnation, "tensors": len(joined.tensors)},
        "head": head,
        "versions": [_version(link, now) for link in links],
        "sparsity": _sparsity([link.manifest for link in links]),
        "agents": _agents(store, latest.version if latest else 0, now),
        "verified": _verify(store, links, problems) if verify else None,
    }
    return found | {"health": _health(store, links, latest.version if latest else 0, problems)}


def _links(store: Store, joined: RunInfo) -> tuple[list[Link], str]:
    """The chain as far back as it can be read, oldest first; the problem if no full version was reached."""
    latest = chain.read_latest(store)
    ref = latest.manifest if latest else None
    links: list[Link] = []
    while ref is not None:
        try:
            manifest = chain.read_manifest(store, ref, joined)
        except BrokenVersion as error:
            # Old versions are removed. The rest is sound if it contains a full version.
            full = any(link.manifest.kind is Kind.FULL for link in links)
            return links[::-1], "" if full and error.reason == "missing" else str(error)
        links.append(Link(ref, manifest, whole=manifest.kind is Kind.FULL))
        ref = manifest.parent
    return links[::-1], ""


def _version(link: Link, now: float) -> dict[str, Any]:
    manifest, stats = link.manifest, link.manifest.stats
    ratio = stats.delta_bytes / stats.reference_bytes if stats.reference_bytes else None
    return {
        "version": manifest.version,
        "incarnation": manifest.incarnation,
        "step": manifest.step,
        "kind": manifest.kind.value,
        "follows": manifest.follows or manifest.kind is Kind.DELTA,
        "age_seconds": round(now - manifest.time, 1),
        "full_bytes": stats.full_bytes,
        "delta_bytes": stats.delta_bytes,
        "manifest_bytes": len(manifest.to_bytes()),
        "delta_over_entropy": ratio and round(ratio, 3),
        "changed_fraction": stats.changed_fraction,
        "changed_tensors": sum(entry.changed > 0 for entry in manifest.tensors.values()),
        "update_rms": stats.update_rms,
    }


def _sparsity(manifests: list[Manifest]) -> dict[str, dict[str, float]]:
    """Mean fraction of elements that a version changes, by kind and by layer, of the changes still stored."""
    changes = [m for m in manifests if m.kind is Kind.DELTA or m.follows]
    sums: dict[str, dict[str, list[int]]] = {
        table: defaultdict(lambda: [0, 0]) for table in ("by_kind", "by_layer")
    }
    for manifest in changes:
        for name, entry in manifest.tensors.items():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            groups = [("by_kind", kind_of(name))] + ([("by_layer", layer[1])] if layer else [])
            for table, group in groups:
                sums[table][group][0] += entry.changed
                sums[table][group][1] += entry.spec.size
    return {
        table: {group: changed / size for group, (changed, size) in groups.items() if size}
        for table, groups in sums.items()
    }


def kind_of(name: str) -> str:
    """The part of a model that a tensor belongs to."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "other")


def _agents(store: Store, head: int, now: float) -> list[dict[str, Any]]:
    return [
        {
            "agent": ack.agent,
            "version": ack.version,
            "behind": head - ack.version if ack.version is not None else None,
            "age_seconds": round(now - ack.time, 1),
            "pause_ms_median": float(np.median(ack.pause_ms)) if ack.pause_ms else None,
            **{name: getattr(ack, name) for name in ("updates", "errors", "fallbacks", "last_error")},
        }
        for ack in readable(store, Ack, ACKS_PREFIX)
    ]


def _health(store: Store, links: list[Link], head: int, problems: list[str]) -> dict[str, Any]:
    """`ok` or the problems; what is quarantined; versions of unfinished attempts, outside the chain."""
    quarantined = {}
    for key in store.list(QUARANTINE_PREFIX):
        if parse_quarantine_key(key) is not None:
            record: Any = store.read_json(key)
            quarantined[key.removeprefix(QUARANTINE_PREFIX).removesuffix(".json")] = record
    mine = {(link.ref.version, link.ref.incarnation) for link in links}
    places = {place for key in store.list(VERSIONS_PREFIX) if (place := parse_version_key(key))}
    fulls = [link.ref.version for link in links if link.manifest.kind is Kind.FULL]
    if head and not fulls:
        problems = [*problems, "no full version leads to the head: a new reader cannot start"]
    return {
        "ok": not problems,
        "problems": problems,
        "oldest_version": links[0].ref.version if links else None,
        "full_versions": fulls,
        "quarantined": quarantined,
        "beside_the_chain": sorted(places - mine),
    }


def _verify(store: Store, links: list[Link], problems: list[str]) -> dict[str, int]:
    """Replays each tensor from the oldest full version on; appends each problem to `problems`."""
    first = next((i for i, link in enumerate(links) if link.manifest.kind is Kind.FULL), len(links))
    links = links[first:]
    verified = 0
    broken: set[str] = set()
    blobs = Blobs(store)
    changes = ChangeDecoder(blobs)
    try:
        for name in links[0].manifest.tensors if links else ():
            try:
                for _ in chain.replay(links, blobs, changes, name):
                    verified += 1
            except BrokenVersion as error:
                broken.add(str(error))
    finally:
        blobs.close()
    problems.extend(sorted(broken))
    return {"versions": len(links), "digests": verified}
