"""`jaxtrain quickstart`: the whole ring on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxtrain.commands.common import (
    WRONG_CONFIG,
    Check,
    ConfigPath,
    Name,
    Overrides,
    fail,
    load_async,
    log_to_stderr,
    naming,
)


def quickstart(
    config: ConfigPath = Path("configs/quickstart.yaml"),
    name: Name = None,
    check: Check = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Stop a quickstart of this run that is running, and go on with it."),
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Train a small MoE by asynchronous RL on this machine, from nothing to a summary.

    Starts `jaxtrain train`, `jaxtrain rollout` and, with rollouts.engine=vllm, `jaxtrain serve` as processes
    of their own, and shows what they do. Ctrl-C stops them all cleanly; the same command again resumes. On a
    finished run it prints the summary.
    """
    experiment = load_async(config, name, overrides)
    from jaxtrain.commands.environment import check_named
    from jaxtrain.config.errors import ConfigError

    check_named(experiment, source=config, overrides=overrides)
    if check:
        print(f"{config}: ok ({experiment.recipe}, run {experiment.name!r} in {experiment.run_dir})")
        return
    log_to_stderr()
    from jaxtrain.quickstart.job import run

    with naming():
        try:
            status = run(experiment, replace=replace)
        except ConfigError as error:
            fail(str(error), status=WRONG_CONFIG)
    raise typer.Exit(status)
