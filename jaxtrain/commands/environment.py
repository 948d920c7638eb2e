"""The code that a config names, built before anything heavy is: a wrong name or option fails at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxtrain.commands.common import WRONG_CONFIG, fail
from jaxtrain.config import references
from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import blamed
from jaxtrain.config.schema import AsyncGrpoConfig, ExperimentConfig
from jaxtrain.data.environments import open_environment
from rollout_bridge.rollouts.environments.base import Environment, EnvironmentConfigError


def check_named(config: ExperimentConfig, *, source: Path, overrides: Sequence[str] | None = None) -> None:
    """Ends the command, naming `source` or the command line, if code that the config names is missing or has
    wrong options.
    """
    if getattr(config, "environment", None) is not None:
        environment_of(config, source=source, overrides=overrides)
    try:
        references.check(config)
    except ConfigError as error:
        _refuse(error.problems, source, overrides)


def environment_of(
    config: ExperimentConfig, *, source: Path, overrides: Sequence[str] | None = None
) -> Environment:
    """The training split. Ends the command, as `check_named` does, if there is no such environment."""
    try:
        environment = open_environment(config)
        if isinstance(config, AsyncGrpoConfig):
            _check_held_out(config, environment)
    except EnvironmentConfigError as error:
        _refuse([str(error)], source, overrides)
    return environment


def _refuse(problems: Sequence[str], source: Path, overrides: Sequence[str] | None) -> NoReturn:
    fail("\n".join(blamed(problem, source, overrides or ()) for problem in problems), status=WRONG_CONFIG)


def _check_held_out(config: AsyncGrpoConfig, environment: Environment) -> None:
    """Raises `EnvironmentConfigError` unless evaluations have enough tasks."""
    size = environment.held_out.size
    if config.evaluation.prompts > size:
        raise EnvironmentConfigError(
            f"evaluation.prompts: {config.evaluation.prompts} is more than the {size} tasks that environment "
            f"{config.environment.name!r} holds out; lower it, or hold out more "
            "(environment.held_out_prompts of reasoning_gym)"
        )
