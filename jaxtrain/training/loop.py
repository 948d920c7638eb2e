"""The only training loop (contract 6): a phase's steps, one after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import jax

from jaxtrain.config.errors import ConfigError
from jaxtrain.data.sources.base import BatchSpec, Packed, prefetching
from jaxtrain.models.flops import Flops, training_flops
from jaxtrain.training.phase import Phase, Stage, scheduled_values, stage_at
from jaxtrain.training.programs import Programs, train_step
from jaxtrain.training.progress import Progress
from jaxtrain.training.run import Run
from jaxtrain.training.state import TrainState
from jaxtrain.training.throughput import peak, throughput
from rollout_bridge.waiting import Interrupted


def run_phase(run: Run, state: TrainState, progress: Progress, phase: Phase) -> tuple[TrainState, Progress]:
    """Runs the phase's remaining steps after `progress`. The old state is donated.

    Raises `Stopped` after a signal and a checkpoint, `TooManyNonFinite`, and errors of the data.
    """
    record, steps = progress.of(phase.name), phase.section.steps
    if record.steps >= steps:
        return state, progress
    for later in phase.before:
        if progress.of(later).steps:
            raise ConfigError(
                [
                    f"{phase.name}.steps: {steps} is more than the {record.steps} done before {later} began; "
                    "set it back, or start another run"
                ]
            )
    halt, values_at, staged = threading.Event(), scheduled_values(phase.section), None
    saving = 0.0
    spec = BatchSpec(
        shape_at=phase.shape_at,
        columns=phase.columns,
        steps=steps,
        interrupted=lambda: halt.is_set() or run.stop.is_set(),
    )
    with prefetching(phase.batches(spec), record.source, halt) as batches:
        while record.steps < steps:
            stage = stage_at(phase.stages, record.tokens)
            if staged is None or staged.stage is not stage:
                staged = _compile(run, phase, stage)
            started = time.perf_counter()
            packed = run.wait(partial(_next, phase, batches, progress), state, progress)
            waited, values = time.perf_counter() - started, values_at(record.tokens)
            state, report = train_step(staged.programs, run.trainable.placement, state, packed.batch, values)
            staged.recompilations += report.compilations if staged.steps else 0
            staged.steps += 1
            progress = progress.stepped(
                phase.name,
                tokens=packed.batch.valid_tokens(),
                source=batches.get_state(),
                finite=report.finite,
                rope_theta=stage.definition.config.rope_theta,
            )
            record = progress.of(phase.name)
            run.check_finite(progress, finite=report.finite)
            ended = time.perf_counter()
            after = _after(phase, state, progress, report.values)
            row = {
                **report.values,
                "learning_rate": values.learning_rate,
                "router_bias_rate": values.router_bias_rate,
                **throughput(
                    packed.batch,
                    staged.flops,
                    seconds=report.seconds,
                    devices=run.trainable.placement.mesh.size,
                    device_peak=peak(jax.local_devices()[0]),
                ),
                "recompilations": staged.recompilations,
                **packed.metrics,
                **after,
                "tokens_seen": progress.tokens_seen,
                "microbatches": int(packed.batch.tokens.shape[0]),
                "sequence_length": stage.sequence_length,
                "step_seconds": report.seconds,
                "wait_seconds": waited,
                "after_step_seconds": time.perf_counter() - ended,
                "checkpoint_seconds": saving,
            }
            run.metrics.write(progress.step, row, phase=phase.name)
            ended = time.perf_counter()
            run.save(state, progress)
            saving = time.perf_counter() - ended
    return state, progress


def _next(phase: Phase, batches: Iterator[Packed], progress: Progress) -> Packed:
    phase.before_step(progress)
    return next(batches)


def _after(
    phase: Phase, state: TrainState, progress: Progress, values: Mapping[str, float]
) -> Mapping[str, float]:
    """What follows a step. Where a stop ends a wait of it, the run stops before the next step."""
    try:
        return phase.after_step(state, progress, values)
    except Interrupted:
        return {}


@dataclass
class _Staged:
    """The programs of one stage.

    recompilations: programs compiled by steps after the first; above 0, a shape, dtype or sharding changed.
    """

    stage: Stage
    programs: Programs
    flops: Flops
    recompilations: int = 0
    steps: int = 0


def _compile(run: Run, phase: Phase, stage: Stage) -> _Staged:
    """Programs that compile at their first step."""
    programs = run.trainable.programs(
        phase.loss,
        rows=stage.rows,
        sequence_length=stage.sequence_length,
        columns=phase.columns,
        definition=stage.definition,
        measure_noise=phase.section.measure_noise,
    )
    return _Staged(stage, programs, training_flops(stage.definition))
