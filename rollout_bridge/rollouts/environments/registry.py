"""Environments by reference: a name registered here or by an installed package, or `module:Name`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_bridge.options import OptionsError, read
from rollout_bridge.references import UnknownReference, resolve
from rollout_bridge.rollouts.environments.base import Environment, EnvironmentConfigError

# Imported on demand, so that a host installs only what it serves.
ENVIRONMENTS: dict[str, str] = {
    "reasoning_gym": "rollout_bridge.rollouts.environments.reasoning_gym:ReasoningGym"
}
GROUP = "jaxtrain.environments"
MEMBERS = ("task", "episode", "score")


@dataclass(frozen=True)
class NoOptions:
    """Options of an environment that declares none."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """A description from which every process of a run builds the same environment.

    name: a registered name or `module:Name`. options: as the config gives them. seed: of its tasks.
    """

    name: str
    options: Mapping[str, Any]
    seed: int

    def create(self, *, where: str = "environment") -> Environment:
        """The training split. `where`: path of the section in the config, for errors.

        Raises `EnvironmentConfigError` for an unknown name, wrong options, or a missing library.
        """
        try:
            kind: Any = resolve(self.name, group=GROUP, builtin=ENVIRONMENTS, kind="environment")
        except UnknownReference as error:
            raise EnvironmentConfigError(f"{where}.name: {error}") from error
        if missing := [name for name in MEMBERS if not hasattr(kind, name)]:
            raise EnvironmentConfigError(
                f"{where}.name: {self.name!r} has no {', '.join(missing)}, which an environment needs"
            )
        try:
            options = read(getattr(kind, "Options", NoOptions), self.options, where=where)
        except OptionsError as error:
            raise EnvironmentConfigError(str(error)) from error
        except TypeError as error:
            raise EnvironmentConfigError(f"{where}.name: {self.name!r}: {error}") from error
        try:
            return kind(options, seed=self.seed)
        except (TypeError, ValueError, ImportError, OSError) as error:
            field = str(error).partition(":")[0].split(".")[0]
            path = f"{where}." if field in vars(options) else f"{where}: "
            raise EnvironmentConfigError(f"{path}{error}") from error
