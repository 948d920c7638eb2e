"""What to do with a run that has ended: commands that exist, ready to copy."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from jaxtrain.config.load import SAVED
from jaxtrain.config.schema import AsyncGrpoConfig, ExperimentConfig
from jaxtrain.training.steps import saved_steps


def next_steps(config: ExperimentConfig) -> list[str]:
    """Three commands."""
    run_dir = shown(config.run_dir)
    target = run_dir + "-exported"
    commands = [["inspect", run_dir], ["export", run_dir, target, "--format", "bf16"]]
    if isinstance(config, AsyncGrpoConfig):
        commands[:1] = [
            ["report", "--config", f"{run_dir}/{SAVED}"],
            ["inspect", "weights", config.store_url],
        ]
    else:
        commands.append(["inspect", "model", run_dir])
    return [shlex.join(["jaxtrain", *command]) for command in commands]


def ending(config: ExperimentConfig) -> str:
    """What a run has made, and the commands."""
    steps = saved_steps(config.run_dir / "checkpoints")
    made = f"checkpoints of steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
    lines = [f"Run {config.name!r} is in {shown(config.run_dir)}: {made}. To go on:"]
    return "\n".join([*lines, *(f"  {command}" for command in next_steps(config))])


def shown(path: Path) -> str:
    """Relative to the working directory where it is inside."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
