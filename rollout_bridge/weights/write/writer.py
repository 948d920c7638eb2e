"""Writing the weight chain in one trainer process, from taking a run over to moving the head.

No accelerator here: patches (bits on the host) go in, committed manifests come out. The caller keeps the
baseline and replaces it when the manifest is durable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights.format import chain
from rollout_bridge.weights.format.manifest import (
    BrokenVersion,
    Kind,
    Latest,
    Manifest,
    version_directory,
)
from rollout_bridge.weights.format.run import RunInfo
from rollout_bridge.weights.read.mirror import Mirror
from rollout_bridge.weights.read.mirror_view import MirrorView
from rollout_bridge.weights.read.subscriber import Subscriber
from rollout_bridge.weights.write import commit, encoder, quarantine
from rollout_bridge.weights.write.commit import Begin, ProcessPart
from rollout_bridge.weights.write.encoder import Patch, ReferenceSize
from rollout_bridge.weights.write.priority import yielding_pool, yielding_processes

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
Patches = Sequence[tuple[str, Patch]]  # each with the stacked array it belongs to


@dataclass(frozen=True, kw_only=True)
class WriterSettings:
    """How the chain is written.

    max_chain_fraction: a full version is also written when the deltas since the last one exceed this fraction
        of its size, so that a new reader fetches at most about (1 + fraction) of a full version.
    preset: of the codec. object_bytes: blobs are packed into objects of about this size.
    encoders: processes that encode blobs, and threads that find and count changes; by default one for two
        cores, up to 8. niceness: of both, so that the training step on the same cores comes first (Linux; 0:
        normal priority). apart_bytes: a smaller quantised model is encoded by the threads.
    scratch: local directory for rebuilding the head after a restart; needs the size of the quantised model.
    timeout: seconds to wait for other processes.
    process, processes: number of this writer, and how many there are; process 0 commits.
    """

    max_chain_fraction: float = 1.0
    preset: str = "small"
    object_bytes: int = 64 << 20
    encoders: int = field(default_factory=lambda: min(8, max(1, (os.cpu_count() or 1) // 2)))
    niceness: int = 5  # a quarter of a core that others keep busy, so that a version is not held up for long
    apart_bytes: int = 1 << 21
    scratch: str | Path | None = None
    timeout: float = 600.0
    process: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.process < self.processes:
            raise ValueError(f"process: {self.process} is not in [0, {self.processes})")
        if not 0 <= self.niceness <= 19:
            raise ValueError(f"niceness: {self.niceness} is not in [0, 19]")


class ChainWriter:
    """Writes one process's part of the chain. Not thread-safe: one publication at a time.

    full_every: a full version at least every so many versions.
    """

    def __init__(self, store: Store, run: RunInfo, settings: WriterSettings, *, full_every: int) -> None:
        if full_every < 1:
            raise ValueError(f"full_every: {full_every} is not a positive number of versions")
        self._full_every = full_every
        self.store = store
        self.run = run
        self.settings = settings
        self.replayed: MirrorView | None = None  # the head, rebuilt by `join`, until the caller has read it
        self._head: Latest | None = None
        self._digests: dict[str, int] = {}
        self._chain_bytes = 0
        self._full_bytes = 0
        self._reference = ReferenceSize()
        self._cleanup = contextlib.ExitStack()
        self._pool = yielding_pool(settings.encoders, "encode", niceness=settings.niceness)
        self._encoders: Executor = self._pool
        if sum(spec.nbytes for spec in run.tensors.values()) >= settings.apart_bytes:
            self._encoders = yielding_processes(settings.encoders, niceness=settings.niceness)
        self._order = {name: position for position, name in enumerate(run.tensors)}

    @property
    def head(self) -> Latest:
        """The head that the next version follows. Raises RuntimeError before `join`."""
        if self._head is None:
            raise RuntimeError("publisher: take_over() (process 0) or join(head) comes first")
        return self._head

    def join(self, head: Latest) -> None:
        """Continues from `head`, which is rebuilt from the chain on local disk and verified.

        If the chain is broken, that is logged and the next version is a full one.
        """
        self._head = head
        if head.manifest is None:
            return
        scratch = self._cleanup.enter_context(
            tempfile.TemporaryDirectory(prefix="jaxtrain-head-", dir=self.settings.scratch)
        )
        mirror = Mirror(scratch)
        self._cleanup.callback(mirror.close)
        subscriber = Subscriber(self.store, mirror, name=f"trainer-{self.settings.process}")
        self._cleanup.callback(subscriber.close)
        try:
            subscriber.advance(head.version)
            links = chain.walk(self.store, head.manifest, self.run, held=None, cache={})
            full_bytes = links[0].manifest.stats.full_bytes
        except BrokenVersion as error:
            logger.error("the head cannot be rebuilt, so the next version is a full one: %s", error)
            return
        if mirror.state is None or mirror.state.ref != head.manifest:
            logger.error("the chain is broken before version %d: the next one is a full one", head.version)
            return
        self.replayed = mirror.view
        self._digests = dict(mirror.view.state.digests)
        self._full_bytes = full_bytes
        self._chain_bytes = sum(link.nbytes for link in links[1:])

    def rebase(self, bits: Patches) -> None:
        """Counts the values of `bits`, which are those of `replayed`, and removes the scratch files."""
        self._reference = ReferenceSize()
        self._reference.add(bits)
        self._remove_scratch()

    def run_in_encoder(self, work: Callable[[], _Result]) -> _Result:
        """`work()` on a thread of low priority, so that computing does not slow the training step."""
        return self._pool.submit(work).result()

    def begin(self, attempt: str, *, can_delta: bool) -> Begin:
        """Full, delta, or both, as process 0 decides. Process 0 first checks that it still owns the run.

        can_delta: this process has the bits of the head. Raises `StoreError` if it has not and process 0 has.
        """
        head, settings = self.head, self.settings
        place = {"version": head.version + 1, "incarnation": head.incarnation}
        if settings.process > 0:
            begin = commit.wait_begin(self.store, **place, attempt=attempt, timeout=settings.timeout)
            if not can_delta and (begin.follows or begin.kind is Kind.DELTA):
                raise StoreError(
                    f"store {self.store.url}: process 0 writes a change since version {head.version}, which "
                    f"process {settings.process} could not rebuild (its log says why). Restart the trainer"
                )
            return begin
        commit.announce(self.store, head)  # also finishes a move whose answer was lost
        full = not can_delta or self._wants_full()
        begin = Begin(attempt=attempt, kind=Kind.FULL if full else Kind.DELTA, follows=full and can_delta)
        if settings.processes > 1:
            commit.put_begin(self.store, **place, begin=begin)
        return begin

    def write(self, begin: Begin, *, full: Patches | None, change: Patches | None) -> ProcessPart:
        """Encodes and writes the blobs of this process. full, change: the patches that `begin` requires."""
        head, settings = self.head, self.settings
        measured = None if change is None else self._pool.submit(self._reference.measure, change)
        # The attempt is in the names: a write of one that failed may arrive at any time later.
        names = begin.attempt
        changed = self._encode(change, f"{names}-change") if change is not None and full is not None else None
        written = self._encode(change if full is None else full, names)
        of_change = written if full is None else changed
        part = ProcessPart(
            attempt=begin.attempt,
            tensors=written.tensors,
            change=None if changed is None else changed.tensors,
            full_bytes=0 if full is None else written.nbytes,
            delta_bytes=0 if of_change is None else of_change.nbytes,
            reference_bytes=0.0 if measured is None else measured.result(),
            changed=(of_change or written).changed,
        )
        if settings.processes > 1:
            commit.put_part(
                self.store,
                version=head.version + 1,
                incarnation=head.incarnation,
                process=settings.process,
                part=part,
            )
        return part

    def commit(
        self,
        part: ProcessPart,
        begin: Begin,
        *,
        patches: Patches,
        step: int,
        update_rms: float | None,
        durable: Callable[[], None],
    ) -> Manifest:
        """Writes the manifest, calls `durable()`, then moves the head. Processes other than 0 wait for both.

        patches: the change if there is one, else all bits.
        """
        head, settings, kind = self.head, self.settings, begin.kind
        place = {"version": head.version + 1, "incarnation": head.incarnation}
        if settings.process > 0:
            latest = commit.wait_head(self.store, **place, timeout=settings.timeout)
            assert latest.manifest is not None
            manifest = chain.read_manifest(self.store, latest.manifest, self.run)
            if manifest.attempt != part.attempt:
                raise StoreError(
                    f"version {latest.version} is attempt {manifest.attempt} of process 0, this process made "
                    f"{part.attempt}: the processes are out of step. Restart the trainer"
                )
            self._moved(latest, manifest, patches)
            durable()
            return manifest
        parts = [part]
        if settings.processes > 1:
            parts = commit.wait_parts(
                self.store,
                **place,
                processes=settings.processes,
                attempt=part.attempt,
                timeout=settings.timeout,
            )
        manifest = self.run_in_encoder(
            lambda: commit.assemble(
                self.run,
                **place,
                step=step,
                kind=kind,
                parent=head.manifest,
                digests=self._digests,
                parts=parts,
                update_rms=update_rms,
                attempt=part.attempt,
            )
        )
        ref = commit.create_manifest(self.store, manifest)
        latest = Latest(
            **place, step=step, manifest=ref, full=ref if kind is Kind.FULL else head.full, owner=head.owner
        )
        self._moved(latest, manifest, patches)
        durable()
        commit.announce(self.store, latest)
        return manifest

    def close(self) -> None:
        """Ends the threads and removes the scratch files."""
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._remove_scratch()

    def _remove_scratch(self) -> None:
        self.replayed = None
        self._cleanup.close()

    def _encode(self, patches: Patches | None, label: str) -> encoder.WrittenBlobs:
        head, settings = self.head, self.settings
        try:
            return encoder.write(
                self.store,
                sorted((patch for _, patch in patches or ()), key=lambda patch: self._order[patch.name]),
                directory=version_directory(head.version + 1, head.incarnation),
                label=f"{label}-{settings.process:05d}",
                preset=settings.preset,
                pool=self._encoders,
                ahead=4 * settings.encoders,
                object_bytes=settings.object_bytes,
            )
        except BrokenProcessPool as error:
            self._encoders = yielding_processes(settings.encoders, niceness=settings.niceness)
            raise OSError(
                "an encoding process died: the kernel kills one when memory runs out (see dmesg). Others "
                "are started for the next publication; set fewer encoders if it happens again"
            ) from error

    def _wants_full(self) -> bool:
        head, settings = self.head, self.settings
        if head.full is None or head.version + 1 - head.full.version >= self._full_every:
            return True
        if self._chain_bytes > settings.max_chain_fraction * self._full_bytes:
            return True
        return quarantine.first_broken(self.store, self.run, head) is not None

    def _moved(self, latest: Latest, manifest: Manifest, patches: Patches) -> None:
        """The manifest is durable: from here on the next version follows it."""
        self._head = latest
        self._digests = chain.digests_of(manifest)
        if manifest.kind is Kind.FULL:
            self._full_bytes, self._chain_bytes = manifest.stats.full_bytes, 0
        else:
            self._chain_bytes += manifest.stats.delta_bytes
        if manifest.kind is Kind.FULL and not manifest.follows:
            self._reference = ReferenceSize()
        self.run_in_encoder(lambda: self._reference.add(patches))
