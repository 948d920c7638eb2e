"""Chains of known trees, and how they break."""

import contextlib
from collections.abc import Iterator
from typing import Any

from rollout_bridge.store import Store
from rollout_bridge.weights.format import chain
from rollout_bridge.weights.format.manifest import LATEST_KEY, Manifest
from rollout_bridge.weights.format.run import RunInfo
from rollout_bridge.weights.write.publisher import Publisher
from tests.rollout_bridge.weights import tiny

TREES = [tiny.params()]
for _number in range(1, 8):
    TREES.append(tiny.step(TREES[-1], _number))


def mortal(name: str) -> tiny.Mortal:
    tiny.open_store(name)
    return tiny.Mortal.open(f"memory://{name}", probe=False)


def publish(trainer: Publisher, number: int) -> Manifest:
    """Version `number` holds TREES[number]."""
    return trainer.publish(tiny.on_device(TREES[number]), step=number).result(300)


def chain_of(store: Store, versions: int, **options) -> Publisher:
    trainer = tiny.publisher(store, **options)
    trainer.take_over()
    for number in range(trainer.head.version + 1, versions + 1):
        publish(trainer, number)
    return trainer


def keys_of(store: Store, version: int, ending: str) -> list[str]:
    return [key for key in store.list(f"weights/versions/{version:08d}/") if key.endswith(ending)]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES = {
    "truncated blob": (".blob", lambda data: data[:-3]),
    "flipped bit in a blob": (".blob", flip),
    "missing blob": (".blob", None),
    "missing manifest": ("manifest.json", None),
    "flipped bit in a manifest": ("manifest.json", flip),
    "a manifest that is no JSON": ("manifest.json", lambda data: b"{"),
}


def damage(store: Store, version: int, what: str) -> None:
    ending, change = DAMAGES[what]
    key = keys_of(store, version, ending)[0]  # of a full version the bits, before its change
    data = store.read(key)
    assert data is not None
    if change is None:
        store.delete(key)
    else:
        store.put(key, change(data))


def manifests_from(store: Store, run: RunInfo, version: int) -> list[Manifest]:
    """The manifests of the chain, from that of `version` to the head."""
    latest = chain.read_latest(store)
    assert latest is not None
    ref, found = latest.manifest, []
    while ref is not None and ref.version >= version:
        found.append(chain.read_manifest(store, ref, run))
        ref = found[-1].parent
    return found[::-1]


def forge(store: Store, run: RunInfo, version: int, name: str, **changes: Any) -> None:
    """Changes what the manifest of `version` says of tensor `name`, and every hash that depends on it."""
    first, *others = manifests_from(store, run, version)
    entry = first.tensors[name].model_copy(update=changes)
    forged = first.model_copy(update={"tensors": first.tensors | {name: entry}})
    store.put(forged.ref.key, forged.to_bytes())
    for manifest in others:
        forged = manifest.model_copy(update={"parent": forged.ref})
        store.put(forged.ref.key, forged.to_bytes())
    latest = chain.read_latest(store)
    assert latest is not None
    store.put(LATEST_KEY, latest.model_copy(update={"manifest": forged.ref}).to_bytes())


@contextlib.contextmanager
def hidden(store: Store, version: int) -> Iterator[None]:
    """The manifest of `version` is away: past it leads only a later full version, taken whole."""
    (key,) = keys_of(store, version, "manifest.json")
    data = store.read(key)
    assert data is not None
    store.delete(key)
    yield
    store.put(key, data)
