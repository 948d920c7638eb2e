"""The trainer's side of the weight chain: quantise on the accelerator, diff there, publish only what changed.

Invariants:
- parameters are read by programs dispatched before `publish` returns, so the next step may donate them;
  everything slower happens on a background thread, one publication at a time;
- the baseline is what the head decodes to, bit for bit, and moves only when the new manifest is durable;
- what computes there does so on threads that give way to the training step (`WriterSettings.niceness`);
- a trainer that another one has superseded moves nothing any more: `weights/latest` fences every commit;
- the background thread launches no collectives, which it could interleave with those of the training step.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from rollout_bridge.architectures.tensors import TensorSource
from rollout_bridge.quantization.plan import QuantizationPlan
from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights import commit, device_bits, garbage
from rollout_bridge.weights.commit import Superseded
from rollout_bridge.weights.device_bits import Bits, Compaction
from rollout_bridge.weights.garbage import Retention
from rollout_bridge.weights.manifest import BrokenVersion, Kind, Latest, Manifest, Stats
from rollout_bridge.weights.run import RunInfo
from rollout_bridge.weights.writer import ChainWriter, WriterSettings

__all__ = [
    "Compaction",
    "Overtaken",
    "Publication",
    "Publisher",
    "Retention",
    "Superseded",
    "WriterSettings",
]

logger = logging.getLogger(__name__)


class NothingToCompare(RuntimeError):
    """There is no head, or the chain to it cannot be read; the next version will be a full one."""


class Overtaken(RuntimeError):
    """The publication was still waiting when a newer one took its place and its version."""


class Publication:
    """One version on its way to the store. version: what it will be, if nothing before it fails."""

    def __init__(self, version: int, step: int) -> None:
        self.version = version
        self.step = step
        self._future: Future[Manifest] = Future()
        self._answered = False

    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Manifest:
        """The committed manifest. Raises what went wrong, `Superseded` and `Overtaken` included, or
        TimeoutError.
        """
        concurrent.futures.wait([self._future], timeout)
        self._answered = self._future.done()
        return self._future.result(0)

    def settle(self, timeout: float | None = None) -> None:
        """Waits for the end; raises what went wrong unless `result` has done so already."""
        if not self._answered:
            self.result(timeout)

    def stats(self, timeout: float | None = None) -> Stats:
        """Sizes of the committed version."""
        return self.result(timeout).stats

    @property
    def error(self) -> BaseException | None:
        """What went wrong, if it has ended so and `result` has not said it yet."""
        return self._future.exception() if self._future.done() and not self._answered else None


@dataclass(frozen=True)
class _Job:
    publication: Publication
    bits: Bits
    nonfinite: Bits
    update_rms: float | None
    attempt: str


class Publisher:
    """Publishes the parameters of one run. `take_over` (or `join`) comes before the first `publish`.

    run: as `create_or_join` returned it. full_every, settings: how the chain is written.
    sources, plan: those of the run, checked if given.
    retention: what the background thread leaves when it removes old versions; None: it removes nothing.
    devices: whose shards this process writes; its own by default. In a job of several processes all call the
    same methods in the same order.

    last: the manifest committed last. counters: "published", "overtaken", "removed" versions,
    "removal_failures"; of the last one "manifest_bytes" and "publish_milliseconds".
    """

    def __init__(
        self,
        store: Store,
        *,
        run: RunInfo,
        full_every: int,
        sources: Sequence[TensorSource] | None = None,
        plan: QuantizationPlan | None = None,
        settings: WriterSettings | None = None,
        retention: Retention | None = None,
        devices: Sequence[Any] | None = None,
        compaction: Compaction = Compaction.AUTO,
    ) -> None:
        if tuple(sources or run.sources) != run.sources or (plan or run.plan) != run.plan:
            raise ValueError("publisher: sources or plan are not those of the run; build the run from them")
        self._writer = ChainWriter(store, run, settings or WriterSettings(), full_every=full_every)
        self._derivation = device_bits.Derivation(run)
        self._extractor = device_bits.Extractor(
            self._derivation.stacks, devices=devices, compaction=compaction
        )
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self.last: Manifest | None = None
        self.counters: Counter[str] = Counter()
        self._retention = retention
        self._lock = threading.Lock()  # of the two below
        self._flight: Publication | None = None
        self._queued: _Job | None = None
        self._baseline: Bits | None = None
        self._attempts = 0
        self._failed: BaseException | None = None

    @property
    def run(self) -> RunInfo:
        return self._writer.run

    @property
    def settings(self) -> WriterSettings:
        return self._writer.settings

    @property
    def head(self) -> Latest:
        """The head this publisher goes on from; version 0 if nothing is published yet."""
        return self._writer.head

    def take_over(self) -> Latest:
        """Takes the run from whoever had it and rebuilds the head from the chain. Process 0 only.

        The result (version 0: nothing published yet) goes to the other processes, for `join`.
        Raises `Superseded` if another trainer takes over at the same moment.
        """
        owner = f"{socket.gethostname()} pid {os.getpid()} {uuid.uuid4().hex[:8]}"
        self.join(commit.take_over(self._writer.store, owner=owner))
        return self.head

    def join(self, head: Latest) -> None:
        """Goes on from the head that process 0 took over."""
        self._writer.join(head)

    def publish(
        self, params: Mapping[str, jax.Array], *, step: int, update_rms: float | None = None
    ) -> Publication:
        """Publishes `params` (path -> stacked float32 or bfloat16 array) as the version after the head.

        Returns when all reads of `params` are dispatched. While a publication is in flight the new one waits
        its turn, in place of one that was waiting already, whose `result` then raises `Overtaken`. Several
        processes must agree on what they publish, so there the call waits for the flight before.

        Raises the error of an earlier publication unless its `result` has done so already; before its
        manifest is written a failure leaves nothing behind, so that the next call may publish again.
        step: optimizer steps the parameters have seen. update_rms: of the master weights since the last
        publication, kept in the manifest.
        """
        flight = self._flight
        if flight is not None and (self._writer.settings.processes > 1 or flight.error):
            self._flight = None
            flight.settle()
        if self._failed is not None:
            raise RuntimeError("publisher: a publication failed; restart the trainer") from self._failed
        _ = self.head
        bits, nonfinite = self._derivation(params)
        self._attempts += 1
        attempt = f"{step}-{self._attempts}"
        with self._lock:
            flight = self._flight
            if flight is not None and flight.error:  # it failed while the programs were dispatched
                self._flight = None
                flight.settle()
            waits = flight is not None and not flight.done()
            before = flight.version if flight is not None and waits else self.head.version
            publication = Publication(1 + before, step)
            overtaken = self._queued
            rms = None if overtaken else update_rms  # it is of fewer steps than the change then
            job = _Job(publication, bits, nonfinite, rms, attempt)
            if waits:
                self._queued = job
            else:
                self._flight = publication
        if not waits:
            self._executor.submit(self._fly, job)
        elif overtaken is not None:
            self.counters["overtaken"] += 1
            overtaken.publication._future.set_exception(
                Overtaken(f"step {overtaken.publication.step} gave way to step {step} before its turn came")
            )
        return publication

    def verify_head(self, params: Mapping[str, jax.Array]) -> bool:
        """Whether `params` quantise to exactly what the head decodes to: the redo reproduced it.

        Raises `NothingToCompare` if there is no head, or its chain was too broken to rebuild.
        """
        self._settle(None)
        bits, _ = self._derivation(params)
        baseline = self._aligned_baseline(bits)
        if baseline is None:
            raise NothingToCompare(
                f"publisher: nothing to compare with at version {self.head.version}: nothing is published, "
                "or its chain is broken (the log says where), and the next version will be a full one"
            )
        return device_bits.equal(bits, baseline)

    def close(self, timeout: float | None = None) -> None:
        """Waits for what is in flight and what waits, raising an error nobody has seen; stops the thread."""
        try:
            self._settle(timeout)
        finally:
            self._executor.shutdown(wait=False)
            self._writer.close()

    def _settle(self, timeout: float | None) -> None:
        with self._lock:
            waiting = [self._flight, self._queued.publication if self._queued else None]
        for publication in waiting:
            if publication is not None:
                publication.settle(timeout)

    def _fly(self, job: _Job) -> None:
        """One publication on the background thread, then the one that waits; a failure ends that one too."""
        future = job.publication._future
        error: BaseException | None = None
        try:
            manifest = self._publish(job)
        except BaseException as caught:
            # Alone, a failure before the manifest leaves nothing behind and the next step may try again;
            # among several processes some may have moved on.
            error = caught
            if self._writer.settings.processes > 1 or isinstance(error, Superseded):
                self._failed = error
        with self._lock:
            following, self._queued = self._queued, None
            if following is not None and error is None:
                self._flight = following.publication
            if error is None:
                future.set_result(manifest)
            else:
                future.set_exception(error)
        if error is None:
            self._remove_old(manifest)
            if following is not None:
                self._executor.submit(self._fly, following)
        elif following is not None:
            following.publication._future.set_exception(error)

    def _publish(self, job: _Job) -> Manifest:
        started = time.monotonic()
        self._derivation.check_finite(job.nonfinite)
        baseline = self._aligned_baseline(job.bits)
        begin = self._writer.begin(job.attempt, can_delta=baseline is not None)
        full = list(self._extractor.full(job.bits)) if begin.kind is Kind.FULL else None
        change = None
        if baseline is not None and (full is None or begin.follows):
            change = self._writer.aside(lambda: list(self._extractor.changes(job.bits, baseline)))
        part = self._writer.write(begin, full=full, change=change)

        def durable() -> None:
            self._baseline = job.bits

        manifest = self._writer.commit(
            part,
            begin,
            patches=full or [] if change is None else change,
            step=job.publication.step,
            update_rms=job.update_rms,
            durable=durable,
        )
        seconds = time.monotonic() - started
        self.last = manifest
        self.counters["published"] += 1
        self.counters["manifest_bytes"] = len(manifest.to_bytes())
        self.counters["publish_milliseconds"] = round(1e3 * seconds)
        logger.info(
            "version %d (%s) of step %d: %d bytes whole, %d of change, %.2f s",
            manifest.version,
            manifest.kind.value,
            manifest.step,
            manifest.stats.full_bytes,
            manifest.stats.delta_bytes,
            seconds,
        )
        return manifest

    def _remove_old(self, manifest: Manifest) -> None:
        """Removes versions no reader can need, now and then. A failure leaves them for the next time."""
        retention, settings = self._retention, self._writer.settings
        if retention is None or settings.process != 0 or manifest.version % retention.every:
            return
        try:
            removed = garbage.collect(self._writer.store, retention=retention).removed
        except (BrokenVersion, StoreError) as error:
            self.counters["removal_failures"] += 1
            logger.warning("old versions are kept: %s", error)
        else:
            self.counters["removed"] += len(removed)

    def _aligned_baseline(self, bits: Bits) -> Bits | None:
        """The baseline, sharded as `bits`: from the device, or from the rebuilt head."""
        replayed = self._writer.replayed
        if self._baseline is None and replayed is not None:
            self._baseline = {
                key: device_bits.from_host(self._derivation.stacks[key], array, replayed.tensor)
                for key, array in bits.items()
            }
            self._writer.rebase(list(self._extractor.full(self._baseline)))
        if self._baseline is not None:
            for key, array in bits.items():
                if self._baseline[key].sharding != array.sharding:
                    self._baseline[key] = jax.device_put(self._baseline[key], array.sharding)
        return self._baseline
