"""The fleet's side of the weight chain: brings a mirror to a version, also past missed or broken ones.

The mirror changes only after every blob of the change is fetched and every digest agrees. Several processes
decode the tensors of a large model; each verifies what it decodes. A broken version is remembered and
reported below `weights/quarantine/`, and the trainer then publishes a full version. Until then the mirror
goes as far as the chain is good, or to the newest full version.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights.format import chain, run
from rollout_bridge.weights.format.blobs import Blobs
from rollout_bridge.weights.format.chain import Link
from rollout_bridge.weights.format.manifest import (
    BrokenVersion,
    Latest,
    Manifest,
    ManifestRef,
    quarantine_key,
)
from rollout_bridge.weights.format.run import RunError, RunInfo
from rollout_bridge.weights.read import decoding, mirror_view, parallel, parts
from rollout_bridge.weights.read.decoding import DecodeBatch, Folding, TensorPlace
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.mirror_view import TENSORS, MirrorError, MirrorState, MirrorView
from rollout_bridge.weights.read.update import Update

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_CACHED_MANIFESTS = 64
_BATCH_BYTES = 1 << 24  # of the tensors of one batch, if there are few tensors
_LARGE = 4  # times as much if there are many: sending a batch takes a millisecond
_TURNS = 8  # batches for each process, from which on there are many
_PREFETCHED = 2  # batches whose objects are fetched ahead


class Subscriber:
    """Follows one store into one mirror.

    name: of this reader, for quarantine records. attempts: to read a blob, before its version is broken.
    verify_bytes: after each update, digests are computed again from the mirror's file for up to this many
        bytes: changed tensors first, then those checked longest ago. Digests of a change always are.
    decoders: processes that decode, verify and digest; by default one for each core. The caller decodes
        tensors of less than `inline_bytes` in all itself, because a process takes a second to start.
    in_flight_bytes: about the memory they may use together; a tensor that needs more is decoded alone.
    """

    def __init__(
        self,
        store: Store,
        mirror: Mirror,
        *,
        name: str = "subscriber",
        attempts: int = 3,
        verify_bytes: int = 1 << 26,
        decoders: int | None = None,
        inline_bytes: int = 1 << 28,
        in_flight_bytes: int = 16 << 30,
    ) -> None:
        if decoders is not None and decoders < 1:
            raise ValueError(f"decoders: {decoders} is not a positive number of processes")
        self.store = store
        self.mirror = mirror
        self.name = name
        self.fallbacks = 0  # times a full version was taken because the chain was broken
        self.setbacks = 0  # times an engine was given an older version because the newest was out of reach
        self.broken: dict[ManifestRef, str] = {}
        self._unreported: dict[str, dict[str, Any]] = {}  # by key: records not in the store yet
        self._attempts = attempts
        self._verify_bytes = verify_bytes
        self._workers = parallel.Workers(decoders or parallel.default_count())
        self._inline_bytes = inline_bytes
        self._in_flight_bytes = in_flight_bytes
        self._turn: dict[str, int] = {}  # tensor -> number of the update its bytes were last digested in
        self._updates = 0
        self._manifests: dict[ManifestRef, Manifest] = {}
        self._related: tuple[ManifestRef, ManifestRef] | None = None  # held and head, of one chain
        self._run: RunInfo | None = None

    def close(self) -> None:
        """Ends the processes that decode. The caller closes the mirror."""
        self._workers.close()

    def join(self) -> RunInfo:
        """Reads the run of the store once and binds the mirror to it. Raises `RunError` if there is none."""
        if self._run is None:
            found = run.load(self.store)
            if found is None:
                raise RunError(f"{self.store.url}{run.RUN_KEY}: missing: no trainer has started this run")
            self.mirror.bind(found)
            self._run = found
        return self._run

    def latest(self) -> Latest | None:
        """The head of the chain, None before a trainer has owned the run."""
        return chain.read_latest(self.store)

    def current(self) -> Update | None:
        """The version the mirror holds, every tensor verified and listed as changed; None without one."""
        self.mirror.recover()
        if self.mirror.state is None:
            return None
        try:
            verified = sum(map(len, self._digested(self.mirror.view, list(self.mirror.view.specs))))
        except MirrorError as error:
            logger.error("%s", error)
            self.mirror.reset()
            return None
        return self._update(frozenset(self.mirror.view.specs), verified)

    def renew(self, version: int | None = None) -> Update | None:
        """`advance`, then all tensors of the mirror: for an engine that holds no valid version.

        If advancing fails and the mirror holds a version of this run, the error is logged and that version is
        returned; without one the error is raised. None if nothing is published.
        """
        try:
            self.advance(version)
        except (BrokenVersion, StoreError, RunError, OSError) as error:
            if self.mirror.state is None or self._run is None:
                raise  # nothing to serve, or maybe the version of another run
            self.setbacks += 1
            logger.warning("serving version %d, not the newest: %s", self.mirror.version, error)
        return self.current()

    def advance(self, version: int | None = None) -> Update | None:
        """Moves the mirror to `version` (the head by default) or as near before it as is published and good.

        Several missed deltas become one update. None if there is nothing newer, up to `version`.
        Raises `BrokenVersion` if something newer is published and none of it can be reached, `StoreError` if
        the store fails, `MirrorError` if the disk changed what was written to it.
        """
        joined = self.join()
        self._report()
        self.mirror.recover()
        self._forgive()
        failure: BrokenVersion | None = None
        for _ in range(_CACHED_MANIFESTS):
            latest = self.latest()
            if latest is None or latest.manifest is None:
                return None
            target = latest.version if version is None else min(version, latest.version)
            self._check_lineage(joined, latest, target)
            if target <= (self.mirror.version or 0):  # the first version is 1
                return None
            try:
                return self._move(joined, self._plan(joined, latest, target))
            except BrokenVersion as error:
                # Try again without the broken version, until a good way is found or none is left.
                if failure is not None and str(failure) == str(error):
                    raise
                failure = error
                self._check_held(error)
                self._quarantine(error)
        raise failure or RuntimeError("unreachable")

    def _check_lineage(self, joined: RunInfo, latest: Latest, target: int) -> None:
        """Empties the mirror if it has reached `target` on another chain than the one to the head.

        A copied or restored store goes on from an earlier version, with the same numbers for other weights.
        A head that is older than the mirror and leads to it is only stale.
        """
        state, head = self.mirror.state, latest.manifest
        if state is None or head is None or target > state.ref.version or (state.ref, head) == self._related:
            return
        stale = head.version < state.ref.version
        newer, older = (state.ref, head) if stale else (head, state.ref)
        try:
            ref: ManifestRef | None = newer
            while ref is not None and ref.version > older.version:
                if ref not in self._manifests:
                    self._cache(dict([(ref, chain.read_manifest(self.store, ref, joined))]))
                ref = self._manifests[ref].parent
        except BrokenVersion:
            ref = None if stale else older  # the way from the head may be damaged; what leads to it is there
        if ref == older:
            self._related = (state.ref, head)
            return
        logger.error(
            "mirror %s: version %d (incarnation %d) is of another chain than version %d (incarnation %d) of "
            "%s, as after the copy or the restoring of a store. It is fetched again",
            self.mirror.directory,
            state.ref.version,
            state.ref.incarnation,
            head.version,
            head.incarnation,
            self.store.url,
        )
        self.mirror.reset()

    def _plan(self, joined: RunInfo, latest: Latest, target: int) -> list[Link]:
        """Versions to apply, oldest first; ends at `target` or before the first broken one."""
        assert latest.manifest is not None and latest.full is not None
        held = self.mirror.state.ref if self.mirror.state else None
        held_version = held.version if held else 0
        try:
            links = self._walk(joined, latest.manifest, held)
        except BrokenVersion as error:
            if latest.full in self.broken or latest.full.version <= held_version:
                raise
            self._quarantine(error)
            links = self._walk(joined, latest.full, held)
        while True:
            good: list[Link] = []
            for link in links:
                if link.manifest.version > target or link.ref in self.broken:
                    break
                good.append(link)
            if good:
                return good
            # The chain begins with a full version that is broken or too new: try the versions before it.
            first = links[0]
            if first.manifest.parent is None or first.manifest.parent.version <= held_version:
                reason = self.broken.get(first.ref, f"leads past version {target}")
                raise BrokenVersion(first.ref, "nothing newer can be reached", reason)
            links = self._walk(joined, first.manifest.parent, held)

    def _walk(self, joined: RunInfo, head: ManifestRef, held: ManifestRef | None) -> list[Link]:
        links = chain.walk(
            self.store, head, joined, held=held, cache=self._manifests, avoid=self.broken.keys()
        )
        self._cache({})
        return links

    def _cache(self, read: dict[ManifestRef, Manifest]) -> None:
        """Keeps the manifests read last."""
        self._manifests = dict(list((self._manifests | read).items())[-_CACHED_MANIFESTS:])

    def _move(self, joined: RunInfo, links: list[Link]) -> Update:
        first, last = links[0], links[-1]
        state = MirrorState(last.ref, last.manifest.step, chain.digests_of(last.manifest))
        blobs = Blobs(self.store, attempts=self._attempts)
        started = time.monotonic()
        held = self.mirror.state
        try:
            if first.whole:
                changed = frozenset(state.digests)
                fill = functools.partial(self._fill, joined, links, blobs)
                self.mirror.replace(joined, state, fill)
                self.fallbacks += held is not None and any(r.version > held.ref.version for r in self.broken)
            else:
                names = [name for name in state.digests if chain.objects_of(links, name)]
                changed = frozenset(names)
                self._apply(state, links, blobs, names)
        finally:
            blobs.close()
        self._verify_bytes_of(changed)
        logger.info(
            "version %d: %d tensors, %d versions at once, %.2f s",
            last.manifest.version,
            len(changed),
            len(links),
            time.monotonic() - started,
        )
        return self._update(changed, len(state.digests))

    def _here(self, places: list[TensorPlace]) -> bool:
        """Whether it is too little work to start processes for."""
        return self._workers.count == 1 or sum(place.spec.nbytes for place in places) < self._inline_bytes

    def _fill(self, joined: RunInfo, links: list[Link], blobs: Blobs, file: Path) -> None:
        """Writes a full version and the deltas after it to the new file."""
        specs = joined.tensors
        offsets, _ = mirror_view.layout(specs)
        places = [TensorPlace(name=name, spec=specs[name], offset=offsets[name], before=0) for name in specs]
        batches = self._batches_of(file, places, links, blobs)
        for _ in self._decoded(decoding.fill, batches, here=self._here(places)):
            pass

    def _apply(self, state: MirrorState, links: list[Link], blobs: Blobs, names: list[str]) -> None:
        """Applies deltas through a journal. Decoding processes each write a part of it."""
        view, last = self.mirror.view, links[-1]
        for name in last.manifest.tensors.keys() - set(names):
            if last.manifest.tensors[name].digest_value != view.state.digests[name]:
                raise BrokenVersion(last.ref, f"tensor {name}", "its digest changed, but no blob changes it")
        places = _places(view, names)
        batches = self._batches_of(self.mirror.directory / TENSORS, places, links, blobs)
        if self._here(places):
            changes = itertools.chain.from_iterable(self._decoded(decoding.fold, batches, here=True))
            self.mirror.apply(state, changes)
            return
        foldings = (
            Folding(batch, self.mirror.directory / f"journal-{number:06d}{parts.SUFFIX}")
            for number, batch in enumerate(batches)
        )
        written = self._workers.in_order(
            decoding.fold_into,
            foldings,
            here=False,
            cost=lambda folding: folding.batch.working_bytes,
            limit=self._in_flight_bytes,
        )
        self.mirror.apply_parts(state, written, self._for_each)

    def _for_each(self, work: Callable[[Any], None], items: list[Any]) -> None:
        """`mirror.ForEach` by the decoding processes, several items a call."""
        share = max(1, len(items) // (_TURNS * self._workers.count))
        shares = [items[begin : begin + share] for begin in range(0, len(items), share)]
        each = functools.partial(parallel.each, work)
        for _ in self._workers.in_order(each, shares, here=False, cost=lambda items: 0, limit=0):
            pass

    def _decoded(
        self, work: Callable[[DecodeBatch], _Result], batches: Iterable[DecodeBatch], *, here: bool
    ) -> Iterator[_Result]:
        return self._workers.in_order(
            work, batches, here=here, cost=lambda batch: batch.working_bytes, limit=self._in_flight_bytes
        )

    def _batches_of(
        self, file: Path, places: list[TensorPlace], links: list[Link], blobs: Blobs
    ) -> Iterator[DecodeBatch]:
        """All of `places` in batches, while the objects of the next batches are fetched."""

        def where(place: TensorPlace) -> list[tuple[int, str, int]]:
            pieces = [(link, piece) for link in links for piece in link.pieces(place.name)]
            return [(link.ref.version, piece.key, piece.offset) for link, piece in pieces[:1]]

        batches = list(self._batches(sorted(places, key=where)))  # neighbours share blobs
        for number, batch in enumerate(batches):
            for coming in batches[number : number + _PREFETCHED]:
                for place in coming:
                    blobs.prefetch(chain.objects_of(links, place.name))
            yield DecodeBatch.of(file, batch, links, blobs)

    def _batches(self, places: list[TensorPlace]) -> Iterator[list[TensorPlace]]:
        """Splits `places` into batches of neighbours."""
        fair = sum(place.spec.nbytes for place in places) // (_TURNS * self._workers.count)
        limit = max(_BATCH_BYTES, min(fair, _LARGE * _BATCH_BYTES))
        return decoding.filled(places, limit)

    def _verify_bytes_of(self, changed: frozenset[str]) -> None:
        """Checks digests on disk within `verify_bytes`: changed tensors, then those checked longest ago."""
        view = self.mirror.view
        self._updates += 1
        budget = self._verify_bytes
        checked: list[str] = []
        for name in sorted(view.specs, key=lambda name: (name not in changed, self._turn.get(name, 0))):
            budget -= view.specs[name].nbytes
            if budget < 0:
                break
            checked.append(name)
        try:
            for names in self._digested(view, checked):
                self._turn |= dict.fromkeys(names, self._updates)
        except MirrorError:
            self.mirror.reset()
            raise

    def _digested(self, view: MirrorView, names: list[str]) -> Iterator[list[str]]:
        """Compares the bits of each tensor with its digest. Yields the names, batch by batch.

        Raises `MirrorError` naming the first wrong one.
        """
        places = _places(view, names)
        file = view.directory / TENSORS
        batches = [DecodeBatch(file=file, places=tuple(batch)) for batch in self._batches(places)]
        found = self._decoded(decoding.digests, batches, here=self._here(places))
        for batch, digests in zip(batches, found, strict=True):
            for place, digest in zip(batch.places, digests, strict=True):
                view.check(place.name, digest)
            yield [place.name for place in batch.places]

    def _quarantine(self, error: BrokenVersion) -> None:
        if error.ref in self.broken:
            return
        self.broken[error.ref] = str(error)
        logger.error("quarantined %s", error)
        record = {"agent": self.name, "what": error.what, "reason": error.reason, "time": time.time()}
        self._unreported[quarantine_key(error.ref)] = record
        self._report()

    def _report(self) -> None:
        """Writes the quarantine records to the store. What it refuses is tried again next time."""
        try:
            for key, record in list(self._unreported.items()):
                self.store.create_json(key, record)
                del self._unreported[key]
        except StoreError as error:
            logger.warning("%d broken versions are not reported yet: %s", len(self._unreported), error)

    def _forgive(self) -> None:
        """Forgets newer versions that seemed broken and whose record is gone: the trainer read them well."""
        for ref in list(self.broken):
            key = quarantine_key(ref)
            newer = ref.version > (self.mirror.version or 0)
            if newer and key not in self._unreported and self.store.read(key) is None:
                logger.warning("version %d is tried again: the trainer finds it good", ref.version)
                del self.broken[ref]

    def _check_held(self, error: BrokenVersion) -> None:
        """Raises `MirrorError` if the tensor that `error` names is wrong in the mirror, and empties that."""
        name = error.what.removeprefix("tensor ")
        if self.mirror.state is None or name == error.what or name not in self.mirror.view.specs:
            return
        try:
            self.mirror.view.verify([name])
        except MirrorError:
            self.mirror.reset()
            raise

    def _update(self, changed: frozenset[str], verified: int) -> Update:
        state = self.mirror.view.state
        return Update(
            version=state.ref.version,
            incarnation=state.ref.incarnation,
            step=state.step,
            changed=changed,
            tensor=self.mirror.tensor,
            mirror=self.mirror.directory,
            verified=verified,
        )


def _places(view: MirrorView, names: Iterable[str]) -> list[TensorPlace]:
    specs, offsets, digests = view.specs, view.offsets, view.state.digests
    return [TensorPlace(name=n, spec=specs[n], offset=offsets[n], before=digests[n]) for n in names]
