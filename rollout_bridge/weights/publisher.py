"""The trainer's side of the weight chain: quantise on the accelerator, diff there, publish only what changed.

Invariants:
- parameters are read by programs dispatched before `publish` returns, so the next step may donate them;
  everything slower happens on a background thread, one publication at a time;
- the baseline is what the head decodes to, bit for bit, and moves only when the new manifest is durable;
- a trainer that another one has superseded moves nothing any more: `weights/latest` fences every commit;
- the background thread launches no collectives, which it could interleave with those of the training step.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from rollout_bridge.names import TensorSource
from rollout_bridge.quantization.plan import QuantizationPlan
from rollout_bridge.store import Store
from rollout_bridge.weights import commit, device_bits
from rollout_bridge.weights.commit import Superseded
from rollout_bridge.weights.device_bits import Bits, Compaction
from rollout_bridge.weights.manifest import Kind, Latest, Manifest, Stats
from rollout_bridge.weights.run import RunInfo
from rollout_bridge.weights.writer import ChainWriter, WriterSettings

__all__ = ["Compaction", "Publication", "Publisher", "Superseded", "WriterSettings"]

logger = logging.getLogger(__name__)


class NothingToCompare(RuntimeError):
    """There is no head, or the chain to it cannot be read; the next version will be a full one."""


class Publication:
    """One version on its way to the store."""

    def __init__(self, version: int, step: int, future: Future[Manifest]) -> None:
        self.version = version
        self.step = step
        self._future = future
        self._answered = False

    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Manifest:
        """The committed manifest. Raises what went wrong, `Superseded` included, or TimeoutError."""
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


class Publisher:
    """Publishes the parameters of one run. `take_over` (or `join`) comes before the first `publish`.

    run: as `create_or_join` returned it. full_every, settings: how the chain is written.
    sources, plan: those of the run, checked if given.
    devices: whose shards this process writes; its own by default. In a job of several processes all call the
    same methods in the same order.
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
        self._flight: Publication | None = None
        self._baseline: Bits | None = None
        self._attempts = 0
        self._failed: BaseException | None = None

    @property
    def run(self) -> RunInfo:
        return self._writer.run

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

        Returns when all reads of `params` are dispatched. Waits for the publication before, and raises its
        error unless its `result` has done so already; before its manifest is written a failure leaves nothing
        behind, so that the next call may publish again.
        step: optimizer steps the parameters have seen. update_rms: of the master weights since the last
        publication, kept in the manifest.
        """
        if self._flight is not None:
            flight, self._flight = self._flight, None
            flight.settle()
        if self._failed is not None:
            raise RuntimeError("publisher: a publication failed; restart the trainer") from self._failed
        head = self.head
        bits, nonfinite = self._derivation(params)
        self._attempts += 1
        attempt = f"{step}-{self._attempts}"
        future = self._executor.submit(self._publish, bits, nonfinite, step, update_rms, attempt)
        self._flight = Publication(head.version + 1, step, future)
        return self._flight

    def verify_head(self, params: Mapping[str, jax.Array]) -> bool:
        """Whether `params` quantise to exactly what the head decodes to: the redo reproduced it.

        Raises `NothingToCompare` if there is no head, or its chain was too broken to rebuild.
        """
        if self._flight is not None:
            self._flight.settle()
        bits, _ = self._derivation(params)
        baseline = self._aligned_baseline(bits)
        if baseline is None:
            raise NothingToCompare(
                f"publisher: nothing to compare with at version {self.head.version}: nothing is published, "
                "or its chain is broken (the log says where), and the next version will be a full one"
            )
        return device_bits.equal(bits, baseline)

    def close(self, timeout: float | None = None) -> None:
        """Waits for the publication in flight, raising an error nobody has seen; then stops the thread."""
        try:
            if self._flight is not None:
                flight, self._flight = self._flight, None
                flight.settle(timeout)
        finally:
            self._executor.shutdown(wait=False)
            self._writer.close()

    def _publish(
        self,
        bits: Bits,
        nonfinite: Bits,
        step: int,
        update_rms: float | None,
        attempt: str,
    ) -> Manifest:
        started = time.monotonic()
        try:
            self._derivation.check_finite(nonfinite)
            baseline = self._aligned_baseline(bits)
            kind = self._writer.begin(attempt, can_delta=baseline is not None)
            if kind is Kind.FULL or baseline is None:
                patches = list(self._extractor.full(bits))
            else:
                patches = list(self._extractor.changes(bits, baseline))
            part = self._writer.write(patches, kind, attempt)

            def durable() -> None:
                self._baseline = bits

            manifest = self._writer.commit(
                part, kind, patches=patches, step=step, update_rms=update_rms, durable=durable
            )
        except BaseException as error:
            # Alone, a failure before the manifest leaves nothing behind and the next step may try again;
            # among several processes some may have moved on.
            if self._writer.settings.processes > 1 or isinstance(error, Superseded):
                self._failed = error
            raise
        logger.info(
            "version %d (%s) of step %d: %d bytes, %.2f s",
            manifest.version,
            kind.value,
            step,
            manifest.stats.delta_bytes,
            time.monotonic() - started,
        )
        return manifest

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
