"""Supervised fine-tuning on an environment's worked answers."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.config.schema import SftConfig
from jaxtrain.recipes import supervised
from jaxtrain.training.context import open_context


def run(config: SftConfig, run_dir: Path) -> None:
    """Trains, checkpointing as it goes; run again to resume."""
    context = open_context(config, run_dir)
    try:
        state, progress = context.restore_or_initialize()
        state, progress = supervised.train(context, state, progress, config.sft, name="sft")
        context.save(state, progress, force=True)
    finally:
        context.close()
