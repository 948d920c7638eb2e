"""`jaxtrain train`: the trainer of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxtrain.commands.common import (
    STOPPED,
    WRONG_CONFIG,
    Check,
    ConfigPath,
    Name,
    Overrides,
    fail,
    load,
    log_to_stderr,
    naming,
)
from rollout_bridge.lifetime import follow_parent


def train(
    config: ConfigPath,
    name: Name = None,
    check: Check = False,
    discard_plans_after: Annotated[
        int | None,
        typer.Option(
            "--discard-plans-after",
            metavar="STEP",
            min=-1,
            help="Delete the plans of later RL steps, to recover from a plan that cannot be trained.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="STEP",
            min=0,
            help="Go on from the checkpoint of this step; later ones are renamed.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Run the trainer of an experiment, or resume one that stopped.

    Everything a run needs to resume is in its directory and store: the same command again resumes where it
    stopped. An async_grpo trainer waits for trajectories; `jaxtrain rollout` makes them.
    """
    experiment = load(config, name, overrides)
    from jaxtrain.commands.environment import check_named
    from jaxtrain.config.errors import ConfigError
    from jaxtrain.config.resume import claim_run
    from jaxtrain.config.schema import AsyncGrpoConfig

    check_named(experiment, source=config, overrides=overrides)
    if check:
        print(f"{config}: ok ({experiment.recipe}, run {experiment.name!r} in {experiment.run_dir})")
        return
    options = {}
    if discard_plans_after is not None:
        if not isinstance(experiment, AsyncGrpoConfig):
            fail(f"--discard-plans-after: recipe {experiment.recipe!r} has no plans", status=WRONG_CONFIG)
        options["discard_plans_after_step"] = discard_plans_after
    from rollout_bridge.store import Store

    if isinstance(experiment, AsyncGrpoConfig) and experiment.store is not None:
        with naming():  # before jax starts, and before the run is bound to a store that cannot be opened
            Store.open(experiment.store)
    try:
        run_dir = claim_run(experiment)
    except ConfigError as error:
        fail(str(error), status=WRONG_CONFIG)
    log_to_stderr()
    if step is not None:
        go_on_from(run_dir / "checkpoints", step)
    follow_parent()

    from importlib import import_module

    from jaxtrain.quickstart.next_steps import ending
    from jaxtrain.training.run import Stopped
    from sharding.errors import ShardingError

    try:
        with naming(ShardingError):
            module, _, function = experiment.program.partition(":")
            getattr(import_module(module), function)(experiment, run_dir, **options)
            print(ending(experiment))
    except Stopped as stopped:
        fail(str(stopped), status=STOPPED)


def go_on_from(checkpoints: Path, step: int) -> None:
    """Renames later checkpoints, or fails with the steps that are there."""
    from jaxtrain.training.steps import rename_later, saved_steps

    found = saved_steps(checkpoints)
    if step not in found:
        fail(f"--step: {checkpoints} has no step {step}; it has {found or 'none'}", status=WRONG_CONFIG)
    rename_later(checkpoints, after=step)
