"""The environment a config names, built before anything heavy is: a wrong task or option fails at once."""

from __future__ import annotations

from jaxtrain.commands.common import WRONG_CONFIG, fail
from jaxtrain.config.schema import ExperimentConfig
from rollout_bridge.rollouts.environments.base import Environment, EnvironmentConfigError
from rollout_bridge.rollouts.environments.registry import create


def environment_of(config: ExperimentConfig) -> Environment:
    """The training split; `held_out` of it is what evaluations use. Ends the command if there is none."""
    section = config.environment
    try:
        return create(section.name, section.arguments(seed=config.seed))
    except EnvironmentConfigError as error:
        fail(f"environment: {error}", status=WRONG_CONFIG)
