"""The environment of a config."""

from __future__ import annotations

from typing import Any

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.schema import ExperimentConfig
from rollout_bridge.rollouts.environments import registry
from rollout_bridge.rollouts.environments.base import Environment


def open_environment(config: ExperimentConfig, **options: Any) -> Environment:
    """The training split of the config's environment, with `options` in place of the config's.

    Raises `ConfigError` where the recipe has no environment, `EnvironmentConfigError` for options it refuses.
    """
    section = getattr(config, "environment", None)
    if section is None:
        raise ConfigError([f"environment: recipe {config.recipe!r} has none; name a source that needs none"])
    arguments = section.arguments(seed=config.seed) | options
    return registry.create(section.name, arguments)
