"""The environment a config names, built before anything heavy is: a wrong task or option fails at once."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.commands.common import WRONG_CONFIG, fail
from jaxtrain.config.schema import ExperimentConfig
from rollout_bridge.rollouts.environments.base import Environment, EnvironmentConfigError
from rollout_bridge.rollouts.environments.registry import create


def environment_of(config: ExperimentConfig, *, source: Path) -> Environment:
    """The training split. Ends the command, naming `source`, if there is no such environment."""
    section = config.environment
    try:
        return create(section.name, section.arguments(seed=config.seed))
    except EnvironmentConfigError as error:
        fail(f"{source}: environment: {error}", status=WRONG_CONFIG)
