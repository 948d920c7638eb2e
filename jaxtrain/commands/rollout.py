"""`jaxtrain rollout`: a rollout worker."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxtrain.commands.common import ConfigPath, Name, Overrides, load_async, log_to_stderr, naming
from rollout_bridge.lifetime import follow_parent


def rollout(
    config: ConfigPath,
    name: Name = None,
    worker: Annotated[
        str, typer.Option("--worker", "-w", help="Name of this worker, unique among those of the run.")
    ] = "worker-0",
    overrides: Overrides = None,
) -> None:
    """Make trajectories for a run: claim prompts, generate, score, append.

    Any number of workers, on any hosts that reach the run's store, may come and go. With
    rollouts.engine=embedded the worker runs the model itself; with vllm it asks this host's `jaxtrain serve`.
    """
    experiment = load_async(config, name, overrides, fleet=True)
    from jaxtrain.commands.environment import environment_of

    environment = environment_of(experiment, source=config, overrides=overrides)
    log_to_stderr()
    follow_parent()

    import asyncio

    from jaxtrain.commands.fleet import run_worker

    with naming():
        asyncio.run(run_worker(experiment, environment, worker))
