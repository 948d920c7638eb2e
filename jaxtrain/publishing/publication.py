"""When the trainer publishes. A restart continues the chain instead of forking it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxtrain.config.fleet import WeightSection
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.training.progress import Progress
from jaxtrain.training.run import Run
from jaxtrain.training.state import TrainState
from rollout_bridge import architectures
from rollout_bridge.quantization.plan import ServingLayout, fp8_share, plan_for
from rollout_bridge.store import Store, StoreError
from rollout_bridge.waiting import Interrupted, wait_for
from rollout_bridge.weights.format.chain import read_manifest
from rollout_bridge.weights.format.manifest import BrokenVersion, Latest
from rollout_bridge.weights.format.run import RunInfo, create_or_join
from rollout_bridge.weights.write.publisher import (
    NothingToCompare,
    Publication,
    Publisher,
    Retention,
    WriterSettings,
)
from sharding import processes

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

# Longer than the store may be away while a version is written, by default, and another process late.
PUBLISH_SECONDS = 2 * 3600.0

RL = "rl"  # the phase whose steps the policy counts


@dataclass(frozen=True)
class Published:
    """A version and its optimizer step; step -1 before the first."""

    version: int
    step: int


@dataclass
class PublishPolicy:
    """When a version is published (contract 1): none until the head's step is passed, then head + 1.

    head: of the chain at the start. last: the version of the trainer's current weights, published or being
    written; while a restart repeats steps, the head's.
    rl_begins: optimizer step at which RL began.
    steps: optimizer step of each version, down to one that is too old to train on.
    """

    publisher: Publisher
    section: WeightSection
    head: Latest
    last: Published
    rl_begins: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    _publication: Publication | None = None

    @property
    def version(self) -> int:
        return self.last.version

    def lag(self, version: int, rl_step: int) -> int:
        """Optimizer steps from the weights of `version` to those that RL step `rl_step` trains.

        At least so many for a version older than the known ones; below 0 for one that is not published.
        For any thread.
        """
        if version > self.version:
            return self.version - version
        now, missing = self.rl_begins + rl_step, 0
        while version + missing not in self.steps and version + missing < self.version:
            missing += 1
        return max(0, now - self.steps.get(version + missing, now) + missing)

    def follow(self, state: TrainState, progress: Progress, *, update_rms: float | None = None) -> None:
        """Publishes `state` if its step is past the last published one and due.

        At the head's step, checks the repeated step. While a publication is written, the next one waits and
        replaces one that waits already; the trainer does not wait.
        """
        self.rl_begins = progress.step - progress.of(RL).steps
        redone = self.head.version and progress.step == self.last.step and self._publication is None
        if redone:
            self._check_redo(state.model, progress)
        elif self._due(progress):
            self._publish(state.model, progress, update_rms)

    def _check_redo(self, params: dict[str, jax.Array], progress: Progress) -> None:
        """Logs whether training the head's step again gave the same bits."""
        try:
            same = self.publisher.verify_head(params)
        except NothingToCompare as nothing:
            log.warning("the redo of step %d is not checked: %s", progress.step, nothing)
            return
        if same:
            log.info("the redo of step %d reproduced version %d exactly", progress.step, self.head.version)
        else:
            log.warning(
                "the redo of step %d differs from version %d (another mesh or machine?); the chain goes on "
                "from the published version",
                progress.step,
                self.head.version,
            )

    def _due(self, progress: Progress) -> bool:
        """Whether a multiple of `publish_every` RL steps lies after the last published one, up to this."""
        last, every = self.last, self.section.publish_every
        return last.step < 0 or progress.of(RL).steps // every > (last.step - self.rl_begins) // every

    def _publish(self, params: dict[str, jax.Array], progress: Progress, update_rms: float | None) -> None:
        rms = update_rms if self.section.publish_every == 1 else None  # of one step
        self._publication = self.publisher.publish(params, step=progress.step, update_rms=rms)
        self.last = Published(self._publication.version, progress.step)
        self.steps[self.last.version] = self.last.step

    def settle(self, check_stop: Callable[[], None]) -> None:
        """With several processes, returns when nothing is in flight: `follow` would wait for it."""
        if processes.process_count() > 1:
            self._wait(check_stop)

    def finish(self, state: TrainState, progress: Progress, check_stop: Callable[[], None]) -> int:
        """Publishes the last weights if they are not yet; returns their version once it is durable."""
        if progress.step > self.last.step:
            self._publish(state.model, progress, None)
        self._wait(check_stop)
        if self._publication is not None:
            self._publication.result()
        return self.version

    def _wait(self, check_stop: Callable[[], None]) -> None:
        """Until the publication made last is whole or has failed. `check_stop` is called between looks."""

        def look() -> bool | None:
            if self._publication is None or self._publication.done():
                return True
            check_stop()
            return None

        wait_for(
            look,
            lambda: f"version {self.version} to be whole in the store; see the logs of all trainer processes",
            timeout=PUBLISH_SECONDS,
            poll=0.01,
            slowest=0.25,
            error=StoreError,
        )

    def metrics(self) -> dict[str, float]:
        """Version of the current weights, counts so far, and sizes of the version committed last, if any."""
        counters = self.publisher.counters
        values: dict[str, float] = {
            "version": self.version,
            "incarnation": self.publisher.head.incarnation,
            "versions_overtaken": counters["overtaken"],
            "versions_removed": counters["removed"],
            "removal_failures": counters["removal_failures"],
        }
        if self.publisher.last is None:
            return values
        stats = self.publisher.last.stats
        return values | {
            "delta_bytes": stats.delta_bytes or stats.full_bytes,
            "delta_reference_bytes": stats.reference_bytes,
            "full_bytes_bf16": stats.full_bytes_bf16,
            "changed_fraction": stats.changed_fraction,
            "manifest_bytes": counters["manifest_bytes"],
            "publish_milliseconds": counters["publish_milliseconds"],
        }


@contextmanager
def open_publishing(run: Run, store: Store) -> Iterator[PublishPolicy]:
    """Creates or joins the run in the store and takes it over, which fences any earlier trainer of it.

    Closes the publisher at the end.
    """
    config, hf_config = run.config, run.start.hf_config
    assert isinstance(config, AsyncGrpoConfig)
    model = run.trainable.definition.config
    sources, weights = architectures.tensors(model), config.weights
    serving = ServingLayout(
        tensor_parallel=weights.tensor_parallel,
        data_parallel=weights.data_parallel,
        expert_parallel=weights.experts_whole,
    )
    plan = plan_for(sources, serving=serving, head_dim=model.head_dim)
    share = fp8_share(sources, plan, serving)
    share.check(weights.min_fp8_share, field="weights.min_fp8_share")
    log.info("%s", share)
    mine = RunInfo.new(hf_config, plan, tokenizer=tokenizer_files(run.start.tokenizer_dir))
    first = processes.process_index() == 0
    if first:
        create_or_join(store, mine)
    processes.barrier("run.json")
    publisher = Publisher(
        store,
        run=create_or_join(store, mine),
        full_every=config.weights.full_every,
        settings=writer_settings(config.weights),
        retention=Retention(
            versions=config.weights.retention_versions,
            seconds=config.weights.retention_s,
            every=config.weights.full_every,
        ),
    )
    try:
        found = publisher.take_over().model_dump(mode="json") if first else None
        head = Latest.model_validate(processes.broadcast_json(found, name="weights/latest"))
        if not first:
            publisher.join(head)
        log.info("took over at version %d, incarnation %d", head.version, head.incarnation)
        last = Published(head.version, head.step if head.manifest is not None else -1)
        steps = known_steps(store, head, publisher.run, back=config.trajectories.max_lag) if first else {}
        yield PublishPolicy(publisher, config.weights, head, last, steps=steps)
    finally:
        try:
            publisher.close()
        except Interrupted:
            log.warning("the version on its way is given up; the next start makes it again")


def known_steps(store: Store, head: Latest, run: RunInfo, *, back: int) -> dict[int, int]:
    """Optimizer steps of the newest versions, down to one more than `back` steps before the head's.

    Fewer where the chain cannot be read.
    """
    steps: dict[int, int] = {}
    ref = head.manifest
    while ref is not None and (not steps or head.step - min(steps.values()) <= back):
        try:
            manifest = read_manifest(store, ref, run)
        except BrokenVersion as error:
            log.warning("steps of versions up to %d are not known: %s", ref.version, error)
            break
        steps[ref.version], ref = manifest.step, manifest.parent
    return steps


def writer_settings(section: WeightSection) -> WriterSettings:
    """How this process writes its part of a version."""
    return WriterSettings(
        preset=section.preset,
        max_chain_fraction=section.full_fraction,
        process=processes.process_index(),
        processes=processes.process_count(),
    )


def tokenizer_files(directory: Path) -> dict[str, str]:
    """The small text files that make the tokenizer, by name."""
    present = [directory / name for name in TOKENIZER_FILES if (directory / name).exists()]
    return {path.name: path.read_text(encoding="utf-8") for path in present}
