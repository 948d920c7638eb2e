"""The steps of one phase and one shape: compiled programs, and what each step reports about itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import jax

from jaxtrain.config.optimization import Phase
from jaxtrain.data.batch import Batch
from jaxtrain.models.definition import Definition
from jaxtrain.models.flops import Flops, training_flops
from jaxtrain.training.context import Context
from jaxtrain.training.phases import ScheduledValues
from jaxtrain.training.step import LossFunction, TrainState
from jaxtrain.training.throughput import peak, throughput
from jaxtrain.training.trainer import Placement, Programs, StepReport, compile_programs, train_step


@dataclass
class PhaseTrainer:
    """Programs with what their steps are measured against.

    device_peak: operations a second, None where unknown. recompilations: programs compiled by steps after
    the first; more than 0 says that something changed a shape, a dtype or a sharding.
    """

    programs: Programs
    placement: Placement
    flops: Flops
    device_peak: float | None
    recompilations: int = 0
    steps: int = 0

    def step(self, state: TrainState, batch: Batch, values: ScheduledValues) -> tuple[TrainState, StepReport]:
        """One optimizer step; the old state is donated.

        The report adds to the loss's values the scheduled ones, throughput (see there), recompilations.
        """
        state, report = train_step(self.programs, self.placement, state, batch, **asdict(values))
        self.recompilations += report.compilations if self.steps else 0
        self.steps += 1
        speed = throughput(
            batch,
            self.flops,
            seconds=report.seconds,
            devices=self.placement.mesh.size,
            device_peak=self.device_peak,
        )
        scheduled = {"learning_rate": values.learning_rate, "router_bias_rate": values.router_bias_rate}
        own = {"recompilations": self.recompilations}
        return state, replace(report, values={**report.values, **scheduled, **speed, **own})


def open_trainer(
    context: Context,
    phase: Phase,
    definition: Definition,
    *,
    loss_function: LossFunction,
    metric_names: tuple[str, ...],
) -> PhaseTrainer:
    """Programs that compile at their first step.

    definition: the context's, or one that differs in the rotary base alone.
    """
    return PhaseTrainer(
        programs=compile_programs(
            definition,
            context.optimizer,
            context.placement,
            loss_function=loss_function,
            metric_names=metric_names,
            step=context.step,
            measure_noise=phase.measure_noise,
        ),
        placement=context.placement,
        flops=training_flops(definition),
        device_peak=peak(jax.local_devices()[0]),
    )
