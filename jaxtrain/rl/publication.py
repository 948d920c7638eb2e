"""When the trainer publishes, and that a restart continues the chain instead of forking it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxtrain.config.fleet import WeightSection
from jaxtrain.config.schema import AsyncGrpoConfig
from jaxtrain.training.context import Context, Progress
from jaxtrain.training.step import TrainState
from rollout_bridge import architectures
from rollout_bridge.quantization.plan import ServingLayout, plan_for
from rollout_bridge.store import Store
from rollout_bridge.weights.manifest import Latest
from rollout_bridge.weights.publisher import (
    NothingToCompare,
    Publication,
    Publisher,
    Retention,
    WriterSettings,
)
from rollout_bridge.weights.run import RunInfo, create_or_join
from sharding import processes

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass
class Publications:
    """The publisher with the rule of contract 1: nothing until the head's step is passed, then head + 1.

    version: that the trainer's current weights correspond to, published or on its way; while a restart redoes
        steps, the head's.
    published_step: optimizer step of `version`, -1 before the first.
    """

    store: Store
    publisher: Publisher
    section: WeightSection
    head: Latest
    version: int
    published_step: int = -1
    _last: Publication | None = None

    @classmethod
    def open(cls, context: Context, store: Store) -> Publications:
        """Creates or joins the run and takes it over: any earlier trainer of it is fenced from here on."""
        config = context.config
        assert isinstance(config, AsyncGrpoConfig)
        plan = plan_for(
            architectures.tensors(context.definition.config),
            serving=ServingLayout(
                tensor_parallel=config.weights.tensor_parallel,
                data_parallel=config.weights.data_parallel,
                expert_parallel=config.weights.expert_parallel,
            ),
            head_dim=context.definition.config.head_dim,
        )
        mine = RunInfo.new(context.hf_config, plan, tokenizer=tokenizer_files(context.tokenizer_dir))
        if processes.process_index() == 0:
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
        head = publisher.take_over().model_dump(mode="json") if processes.process_index() == 0 else None
        head = Latest.model_validate(processes.broadcast_json(head, name="weights/latest"))
        if processes.process_index() != 0:
            publisher.join(head)
        log.info("took over at version %d, incarnation %d", head.version, head.incarnation)
        step = head.step if head.manifest is not None else -1
        return cls(store, publisher, config.weights, head, head.version, published_step=step)

    def follow(self, state: TrainState, progress: Progress, *, update_rms: float | None = None) -> None:
        """Publishes `state` if its step is past the last published one and due.

        At the head's step, checks the redo. While a publication is on its way the next one waits its turn, in
        place of one that waits already: the trainer goes on.
        """
        params = {**state.params, **state.buffers}
        if self.head.version and progress.step == self.published_step and self._last is None:
            self._check_redo(params, progress)
        elif self._due(progress):
            self._publish(params, progress, update_rms)

    def _check_redo(self, params: dict[str, jax.Array], progress: Progress) -> None:
        """The head's step was trained again: says whether it gave the same bits."""
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
        if self.published_step < 0:
            return True
        published = self.published_step - (progress.step - progress.rl_steps)
        every = self.section.publish_every
        return progress.rl_steps // every > published // every

    def _publish(self, params: dict[str, jax.Array], progress: Progress, update_rms: float | None) -> None:
        rms = update_rms if self.section.publish_every == 1 else None  # of one step
        self._last = self.publisher.publish(params, step=progress.step, update_rms=rms)
        self.published_step, self.version = progress.step, self._last.version

    def finish(self, state: TrainState, progress: Progress) -> int:
        """Publishes the last weights if they are not yet; returns their version once it is durable."""
        if progress.step > self.published_step:
            self._publish({**state.params, **state.buffers}, progress, None)
        if self._last is not None:
            self._last.result()
        return self.version

    def metrics(self) -> dict[str, float]:
        """Version of the current weights, counts so far, and sizes of the version committed last, if any."""
        counters = self.publisher.counters
        values = {
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

    def close(self) -> None:
        self.publisher.close()


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
