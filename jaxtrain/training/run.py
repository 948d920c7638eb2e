"""A run: its directory, what it trains, its checkpoints and metrics, and how it stops."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from jaxtrain.config.division import undivided
from jaxtrain.config.errors import ConfigError
from jaxtrain.config.schema import ExperimentConfig
from jaxtrain.data.environments import open_environment
from jaxtrain.data.sources.base import SourceTools
from jaxtrain.data.tokenizer import prompts_of
from jaxtrain.huggingface.layout import write_config
from jaxtrain.models.config import ModelConfig
from jaxtrain.training.build import Trainable, mesh_of, trainable_of
from jaxtrain.training.checkpoint import Checkpointer
from jaxtrain.training.lock import locked
from jaxtrain.training.metrics import MetricsWriter
from jaxtrain.training.progress import Progress
from jaxtrain.training.start import Start, Texts, open_start
from jaxtrain.training.state import TrainState, state_of
from jaxtrain.training.stopping import stop_event
from rollout_bridge.errors import ExpectedError
from rollout_bridge.store import Patience, Store
from rollout_bridge.waiting import Interrupted
from sharding import processes

log = logging.getLogger(__name__)

T = TypeVar("T")
# For all processes to come to the end of their waits, which have shorter timeouts. When one has died, jax
# ends the others in minutes.
AGREE_SECONDS = 6 * 3600.0
# After a signal, for a version on its way: less than processes.stop_timeout_s, then SIGKILL comes. Of several
# processes one may wait for another that has ended; they stop in 10 s.
GRACE_SECONDS, GRACE_OF_SEVERAL = 20.0, 3.0


class Stopped(Exception):
    """A signal asked the run to stop; everything trained so far is in a checkpoint."""


class TooManyNonFinite(ExpectedError):
    """More steps in a row than failure.max_nonfinite_steps had a non-finite loss or gradient."""


@dataclass(frozen=True)
class Run:
    """stop: set by SIGTERM and SIGINT, of this process or another."""

    config: ExperimentConfig
    directory: Path
    start: Start
    trainable: Trainable
    checkpoints: Checkpointer
    metrics: MetricsWriter
    stop: threading.Event

    @property
    def tools(self) -> SourceTools:
        """For data sources. The environment is opened only if a source opens it."""
        return SourceTools(
            self.start.tokenizer, self.config.seed, lambda **options: open_environment(self.config, **options)
        )

    def restore_or_initialize(self) -> tuple[TrainState, Progress]:
        """The newest checkpoint that can be read, or the weights of `model.checkpoint`, or random ones.

        Checkpoints that cannot be read are renamed. All processes call it.
        """
        trainable = self.trainable
        if (newest := self.checkpoints.latest()) is not None:
            restored = self.checkpoints.restore_newest(trainable.restorable)
            if restored.step != newest:
                self.metrics.restored(restored.step)
            log.info("restored step %d from %s", restored.step, self.checkpoints.directory)
            return restored.arrays, Progress.from_json(restored.data)
        weights = self.start.weights
        if weights is not None:
            values = weights.load(trainable.definition.shapes, trainable.placement.state.model)
            log.info("starting from the weights in %s", weights.source)
            return state_of(values, trainable.optimizer, trainable.placement), Progress()
        return trainable.initial_state(seed=self.config.seed), Progress()

    def save(self, state: TrainState, progress: Progress, *, force: bool = False) -> None:
        """Saves a checkpoint if one is due by the interval. force: in any case."""
        self.checkpoints.save(progress.step, state, progress.to_json(), force=force)

    def patient(self, store: Store) -> Store:
        """`store` with the config's patience; a signal ends its waits."""
        grace = GRACE_SECONDS if processes.process_count() == 1 else GRACE_OF_SEVERAL
        seconds = self.config.failure.store_patience_s
        return store.patient(Patience(seconds=seconds, grace=grace, interrupted=self.stop.is_set))

    def wait(self, work: Callable[[], T], state: TrainState, progress: Progress) -> T:
        """`work()`, which may wait. Raises `Stopped` after a last checkpoint if any process is to stop.

        All processes call it, at the same step, so one that waits here leaves no other in a collective.
        `work` may raise `Interrupted` once `stop` is set.
        """
        found: list[T] = []
        with suppress(Interrupted):
            found.append(work())
        if self._any(self.stop.is_set() or not found):
            self.stop_now(state, progress)
        return found[0]

    def all_done(self, work: Callable[[], object]) -> bool:
        """Whether `work()` has come to its end in all processes, which call it at the same step."""
        interrupted = True
        with suppress(Interrupted):
            work()
            interrupted = False
        return not self._any(interrupted)

    def _any(self, stops: bool) -> bool:
        return processes.any_of(stops, name="stop", timeout=AGREE_SECONDS)

    def check_stop(self) -> None:
        """Raises `Interrupted` once `stop` is set."""
        if self.stop.is_set():
            raise Interrupted

    def stop_now(self, state: TrainState, progress: Progress) -> NoReturn:
        """Raises `Stopped` after a last checkpoint. All processes call it, at the same step."""
        self.save(state, progress, force=True)
        self.checkpoints.wait()
        raise Stopped(f"stopped after step {progress.step}; the same command resumes there")

    def check_finite(self, progress: Progress, *, finite: bool) -> None:
        """Raises `TooManyNonFinite` past the limit. finite: whether the last step was."""
        if finite:
            return
        limit = self.config.failure.max_nonfinite_steps
        log.warning("step %d skipped: its loss or gradient is not finite", progress.step)
        if progress.nonfinite > limit:
            raise TooManyNonFinite(
                f"step {progress.step}: {progress.nonfinite} steps in a row had a non-finite loss or "
                f"gradient, more than failure.max_nonfinite_steps {limit}; lower the learning rate, or "
                "look at the data of this step"
            )


def _prompts(config: ExperimentConfig) -> Texts | None:
    """Of the config's environment, if it has one."""
    has_one = getattr(config, "environment", None) is not None
    return (lambda: prompts_of(open_environment(config))) if has_one else None


@contextmanager
def open_run(config: ExperimentConfig, run_dir: Path, *, texts: Texts | None = None) -> Iterator[Run]:
    """Opens everything; what cannot work fails here, before the first step. Closes it at the end.

    texts: what a tokenizer is built from where none is given; None: the prompts of an environment.
    """
    processes.initialize()
    with locked(run_dir):
        yield from _opened(config, run_dir, texts=texts)


def _opened(config: ExperimentConfig, run_dir: Path, *, texts: Texts | None) -> Iterator[Run]:
    mesh = mesh_of(config.mesh)
    processes.check_count()
    if problems := undivided(config.model, config.microbatches, mesh.shape):
        raise ConfigError([f"{field}: {problem}" for field, problem in problems])
    checkpoints = Checkpointer(
        run_dir / "checkpoints",
        keep=config.checkpoint.keep,
        save_interval_steps=config.checkpoint.every_steps,
    )
    try:
        restored = checkpoints.latest()
        start = open_start(config, run_dir, resumed=restored is not None, texts=texts or _prompts(config))
        model = ModelConfig.from_hf(start.hf_config, **config.model.numerics)
        trainable = trainable_of(config.optimizer, model, mesh)
        first = processes.process_index() == 0
        if first:
            write_config(run_dir, start.hf_config)  # what `jaxtrain export` reads beside the checkpoints
        with (
            stop_event() as stop,
            MetricsWriter(run_dir if first else None, restored_step=restored) as metrics,
        ):
            try:
                yield Run(config, run_dir, start, trainable, checkpoints, metrics, stop)
            except Interrupted as interrupted:
                raise Stopped("stopped between two steps; the same command resumes there") from interrupted
    finally:
        checkpoints.close()
