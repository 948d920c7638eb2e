"""Supervised training: next-token prediction, or another loss, on documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.optimization import SupervisedSection
from jaxtrain.config.references import build
from jaxtrain.config.schema import SftConfig
from jaxtrain.data.sources.documents import packed
from jaxtrain.training.loop import run_phase
from jaxtrain.training.phase import Phase, stages
from jaxtrain.training.progress import Progress
from jaxtrain.training.run import Run, open_run


def run(config: SftConfig, run_dir: Path) -> None:
    """Trains with checkpoints; run again to resume."""
    with open_run(config, run_dir) as opened:
        state, progress = opened.restore_or_initialize()
        state, progress = run_phase(opened, state, progress, supervised(opened, "sft", config.sft))
        opened.save(state, progress, force=True)


def supervised(
    run: Run,
    name: str,
    section: SupervisedSection,
    *,
    before: tuple[str, ...] = (),
    before_step: Callable[[Progress], None] = lambda progress: None,
) -> Phase:
    """The phase of a supervised section, the config's `name`; see `Phase`."""
    loss = build("loss", section.loss, where=f"{name}.loss")
    source = build("source", section.source, where=f"{name}.source")
    return Phase(
        name=name,
        section=section,
        loss=loss,
        batches=lambda spec: packed(
            source.open(run.tools), seed=run.config.seed, spec=spec, too_long=section.too_long
        ),
        columns=loss.columns,
        filled=source.columns,
        stages=stages(section.stages, run.config.batch, run.trainable.definition),
        before=before,
        before_step=before_step,
    )


def check_base(run: Run, progress: Progress) -> None:
    """Raises `ConfigError` if a phase without stages would use another RoPE base than the last step had."""
    trained, model = progress.rope_theta, run.trainable.definition.config.rope_theta
    if trained not in (None, model):
        raise ConfigError(
            [
                f"model.rope_theta: {model:g}, but the steps so far ended in a stage with the base "
                f"{trained:g}; take more steps, begin the last stage at fewer tokens, or set "
                "model.rope_theta to that base"
            ]
        )
