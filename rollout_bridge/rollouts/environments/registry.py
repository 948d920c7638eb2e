"""Environments by name: a new one is a new file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from rollout_bridge.rollouts.environments.base import Environment, EnvironmentConfigError

# name -> (module, factory); imported when asked for, so that a host installs only what it serves.
ENVIRONMENTS: dict[str, tuple[str, str]] = {
    "reasoning_gym": ("rollout_bridge.rollouts.environments.reasoning_gym", "ReasoningGym"),
}


def create(name: str, options: Mapping[str, Any]) -> Environment:
    """The training split of environment `name` built from `options` (keyword arguments of its class).

    Raises `EnvironmentConfigError` for an unknown name, an option it does not have, or a missing library.
    """
    if name not in ENVIRONMENTS:
        raise EnvironmentConfigError(
            f"environment {name!r} is unknown; known ones: {', '.join(sorted(ENVIRONMENTS))}"
        )
    module, attribute = ENVIRONMENTS[name]
    factory: Callable[..., Environment] = getattr(import_module(module), attribute)
    try:
        return factory(**options)
    except TypeError as error:
        raise EnvironmentConfigError(
            f"environment {name!r} does not take options {dict(options)!r}: {error}"
        ) from error
