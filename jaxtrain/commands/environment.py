"""The environment a config names, built before anything heavy is: a wrong task or option fails at once."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.commands.common import WRONG_CONFIG, fail
from jaxtrain.config.schema import AsyncGrpoConfig, ExperimentConfig
from rollout_bridge.references import search_path
from rollout_bridge.rollouts.environments.base import Environment, EnvironmentConfigError
from rollout_bridge.rollouts.environments.registry import EnvironmentSpec


def environment_spec(config: ExperimentConfig) -> EnvironmentSpec:
    """What every process of the run builds its environment from."""
    section = config.environment
    return EnvironmentSpec(name=section.name, options=section.options, seed=config.seed)


def environment_of(config: ExperimentConfig, *, source: Path) -> Environment:
    """The training split. Ends the command, naming `source`, if there is no such environment.

    A module that the config names may be a file beside `source`.
    """
    search_path(source.parent)
    try:
        environment = environment_spec(config).create()
        if isinstance(config, AsyncGrpoConfig):
            _check_held_out(config, environment)
    except EnvironmentConfigError as error:
        fail(f"{source}: {error}", status=WRONG_CONFIG)
    return environment


def _check_held_out(config: AsyncGrpoConfig, environment: Environment) -> None:
    """Raises `EnvironmentConfigError` unless evaluations have enough tasks."""
    size = environment.held_out.size
    if config.evaluation.prompts > size:
        raise EnvironmentConfigError(
            f"evaluation.prompts: {config.evaluation.prompts} is more than the {size} tasks that environment "
            f"{config.environment.name!r} holds out; lower it, or hold out more "
            "(environment.held_out_prompts of reasoning_gym)"
        )
