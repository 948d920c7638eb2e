"""The environment of a config; imports no jax."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.schema import AsyncGrpoConfig, ExperimentConfig
from jaxtrain.data.tokenizer import PROMPTS
from rollout_bridge import architectures
from rollout_bridge.rollouts.environments.base import REWARD_RANGE, Environment
from rollout_bridge.rollouts.environments.registry import EnvironmentSpec
from rollout_bridge.rollouts.transcript import prompt_ids
from rollout_bridge.trajectories.contract import Contract


def environment_spec(config: ExperimentConfig, **options: Any) -> EnvironmentSpec:
    """The environment that every process of the run builds, with `options` in place of the config's.

    Raises `ConfigError` where the recipe has no environment.
    """
    section = getattr(config, "environment", None)
    if section is None:
        raise ConfigError(["environment: missing; give one, or name a source that reads none"])
    return EnvironmentSpec(name=section.name, options=section.options | options, seed=config.seed)


def open_environment(config: ExperimentConfig, **options: Any) -> Environment:
    """The training split. Raises `EnvironmentConfigError` for invalid options."""
    return environment_spec(config, **options).create()


def contract_of(config: AsyncGrpoConfig, environment: Environment, hf_config: Mapping[str, Any]) -> Contract:
    """What every trajectory of the run keeps. hf_config: config.json of the run."""
    spec = environment_spec(config)
    low, high = getattr(environment, "reward_range", REWARD_RANGE)
    return Contract(
        environment={
            "name": spec.name,
            "options": json.loads(json.dumps(dict(spec.options), default=str)),
            "seed": spec.seed,
        },
        group_size=config.rollouts.group_size,
        temperature=config.rollouts.temperature,
        vocabulary=hf_config["vocab_size"],
        max_tokens=config.batch.sequence_length,
        num_experts=architectures.read(dict(hf_config)).n_routed_experts,
        reward_range=(float(low), float(high)),
    )


def check_prompts_fit(config: AsyncGrpoConfig, environment: Environment, tokenizer: Any) -> None:
    """Raises `ConfigError` if a prompt leaves no room for an answer in a row; looks at the first ones."""
    room = config.batch.sequence_length - config.rollouts.max_tokens
    count = min(environment.size, PROMPTS)
    longest = max(len(prompt_ids(tokenizer, environment.task(index))) for index in range(count))
    if longest > room:
        raise ConfigError(
            [
                f"batch.sequence_length: {config.batch.sequence_length} less rollouts.max_tokens "
                f"{config.rollouts.max_tokens} leaves {room} tokens for a prompt, one has {longest}; raise it"
            ]
        )
