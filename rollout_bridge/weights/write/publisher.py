"""The trainer's side of the weight chain: quantise and compare on the accelerator, publish what changed.

Invariants:
- parameters are read by programs dispatched before `publish` returns, so the next step may donate them;
  everything slower happens on a background thread, one publication at a time;
- the baseline is what the head decodes to, bit for bit, and moves only when the new manifest is durable;
- work on the host's cores runs at lower priority than the training step (`WriterSettings.niceness`);
- a superseded trainer commits nothing: `weights/latest` fences every commit;
- the background thread launches no collectives, which could interleave with those of the training step.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights.format.manifest import BrokenVersion, Kind, Latest, Manifest
from rollout_bridge.weights.format.run import RunInfo
from rollout_bridge.weights.write import commit, derivation, garbage
from rollout_bridge.weights.write.commit import Superseded
from rollout_bridge.weights.write.derivation import Bits, Derivation
from rollout_bridge.weights.write.extraction import Compaction, Extractor
from rollout_bridge.weights.write.garbage import Retention
from rollout_bridge.weights.write.latest_wins import LatestWins, Ticket
from rollout_bridge.weights.write.writer import ChainWriter, WriterSettings

__all__ = ["Compaction", "Overtaken", "Publication", "Publisher", "Retention", "Superseded", "WriterSettings"]

logger = logging.getLogger(__name__)


class NothingToCompare(RuntimeError):
    """There is no head, or its chain cannot be read. The next version will be a full one."""


class Overtaken(RuntimeError):
    """A newer publication replaced this one, with the same version number, before its turn came."""


@dataclass(frozen=True)
class Publication:
    """One version on its way to the store. version: what it will be, if the one before it succeeds."""

    version: int
    step: int
    ticket: Ticket[Manifest]

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self.ticket.done()

    def result(self, timeout: float | None = None) -> Manifest:
        """The committed manifest. Raises the error of the publication, or TimeoutError."""
        return self.ticket.result(timeout)


@dataclass(frozen=True)
class _Job:
    version: int
    step: int
    bits: Bits
    nonfinite: Bits
    update_rms: float | None
    attempt: str


class Publisher:
    """Publishes the parameters of one run. `take_over` (or `join`) comes before the first `publish`.

    run: as `create_or_join` returned it. full_every, settings: how the chain is written.
    retention: which old versions are kept; None: all of them.
    devices: this process writes their shards; by default its own devices. In a job of several processes all
    call the same methods in the same order.

    last: the manifest committed last. counters: "published", "overtaken", "removed" versions,
    "removal_failures"; of the last one "manifest_bytes" and "publish_milliseconds".
    """

    def __init__(
        self,
        store: Store,
        *,
        run: RunInfo,
        full_every: int,
        settings: WriterSettings | None = None,
        retention: Retention | None = None,
        devices: Sequence[Any] | None = None,
        compaction: Compaction = Compaction.AUTO,
    ) -> None:
        self._writer = ChainWriter(store, run, settings or WriterSettings(), full_every=full_every)
        self._derivation = Derivation(run)
        self._extractor = Extractor(self._derivation.stacks, devices=devices, compaction=compaction)
        self._slot = LatestWins(
            self._publish_one, after=self._remove_old, replaced=self._overtaken, name="publish"
        )
        self.last: Manifest | None = None
        self.counters: Counter[str] = Counter()
        self._retention = retention
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
        """The head that the next version follows; version 0 if nothing is published yet."""
        return self._writer.head

    def take_over(self) -> Latest:
        """Takes the run over from an earlier owner and rebuilds the head from the chain. Process 0 only.

        The other processes `join` with the result (version 0: nothing published yet).
        Raises `Superseded` if another trainer takes over at the same moment.
        """
        owner = f"{socket.gethostname()} pid {os.getpid()} {uuid.uuid4().hex[:8]}"
        self.join(commit.take_over(self._writer.store, owner=owner))
        return self.head

    def join(self, head: Latest) -> None:
        """Continues from the head that process 0 took over."""
        self._writer.join(head)

    def publish(
        self, params: Mapping[str, jax.Array], *, step: int, update_rms: float | None = None
    ) -> Publication:
        """Publishes `params` (path -> stacked float32 or bfloat16 array) as the version after the head.

        Returns when all reads of `params` are dispatched. While a publication is in flight the new one waits.
        It replaces one that waits already, whose `result` then raises `Overtaken`. Several processes must
        agree on what they publish, so with more than one the call waits for the publication in flight.

        Raises the error of an earlier publication unless its `result` has raised it. A failure before the
        manifest leaves nothing behind, so the next call may publish again.
        step: optimizer steps of the parameters. update_rms: of the master weights since the last publication,
        for the manifest.
        """
        if self._writer.settings.processes > 1:
            self._slot.settle()
        self._slot.raise_unreported()
        if self._failed is not None:
            raise RuntimeError("publisher: a publication failed; restart the trainer") from self._failed
        _ = self.head  # raises before `take_over`
        bits, nonfinite = self._derivation(params)
        self._attempts += 1
        version = 0

        def make(ahead: _Job | None, replaced: _Job | None) -> _Job:
            nonlocal version
            version = 1 + (ahead.version if ahead else self.head.version)
            return _Job(
                version=version,
                step=step,
                bits=bits,
                nonfinite=nonfinite,
                update_rms=None if replaced else update_rms,  # of fewer steps than the change is then
                attempt=f"{step}-{self._attempts}",
            )

        ticket = self._slot.put(make)
        return Publication(version, step, ticket)

    def verify_head(self, params: Mapping[str, jax.Array]) -> bool:
        """Whether `params` quantise to exactly the bits of the head: whether a redo reproduced it.

        Raises `NothingToCompare` if there is no head, or its chain cannot be rebuilt.
        """
        self._slot.settle()
        bits, _ = self._derivation(params)
        baseline = self._aligned_baseline(bits)
        if baseline is None:
            raise NothingToCompare(
                f"publisher: nothing to compare with at version {self.head.version}: nothing is published, "
                "or its chain is broken (the log says where), and the next version will be a full one"
            )
        return derivation.equal(bits, baseline)

    def close(self, timeout: float | None = None) -> None:
        """Waits for the publications in flight and waiting; ends the threads. Raises an unreported error."""
        try:
            self._slot.close(timeout)
        finally:
            self._writer.close()

    def _overtaken(self, waiting: _Job, newer: _Job) -> Exception:
        self.counters["overtaken"] += 1
        return Overtaken(f"step {waiting.step} was replaced by step {newer.step} before its turn came")

    def _publish_one(self, job: _Job) -> Manifest:
        """Publishes one version, on the background thread.

        A failure before the manifest leaves nothing behind and the next step may try again, unless the run
        has another owner, or there are other processes, some of which may have gone on.
        """
        try:
            return self._publish(job)
        except BaseException as error:
            if self._writer.settings.processes > 1 or isinstance(error, Superseded):
                self._failed = error
            raise

    def _publish(self, job: _Job) -> Manifest:
        started = time.monotonic()
        self._derivation.check_finite(job.nonfinite)
        baseline = self._aligned_baseline(job.bits)
        begin = self._writer.begin(job.attempt, can_delta=baseline is not None)
        full = list(self._extractor.full(job.bits)) if begin.kind is Kind.FULL else None
        change = None
        if baseline is not None and (full is None or begin.follows):
            change = self._writer.run_in_encoder(lambda: list(self._extractor.changes(job.bits, baseline)))
        part = self._writer.write(begin, full=full, change=change)

        def durable() -> None:
            self._baseline = job.bits

        manifest = self._writer.commit(
            part,
            begin,
            patches=full or [] if change is None else change,
            step=job.step,
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
        """Removes old versions, every `retention.every` versions. A failure is counted and logged."""
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
        """The bits of the head, sharded as `bits`: kept on the devices, or from the rebuilt head."""
        replayed = self._writer.replayed
        if self._baseline is None and replayed is not None:
            self._baseline = {
                key: derivation.from_host(self._derivation.stacks[key], array, replayed.tensor)
                for key, array in bits.items()
            }
            self._writer.rebase(list(self._extractor.full(self._baseline)))
        if self._baseline is not None:
            for key, array in bits.items():
                if self._baseline[key].sharding != array.sharding:
                    self._baseline[key] = jax.device_put(self._baseline[key], array.sharding)
        return self._baseline
