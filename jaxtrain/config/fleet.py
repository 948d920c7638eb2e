"""Sections beside training: tokenizer, rollouts, trajectories, the weight chain, processes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jaxtrain.config.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Reference,
    Section,
    rejection,
    setting,
)
from rollout_bridge.engines import server_args


class TokenizerSection(Section):
    path: str | None = setting(
        None, "a Hugging Face tokenizer directory; None builds one from the environment's training prompts"
    )


class RolloutSection(Section):
    """How completions are made."""

    engine: Literal["embedded", "vllm"] = setting(
        "embedded", "the JAX engine needs nothing beyond this package"
    )
    workers: PositiveInt = setting(1, "worker processes on this machine", resumable=True)
    group_size: Annotated[int, Field(ge=2)] = setting(
        8, "completions of one prompt, the baseline of each other"
    )
    temperature: PositiveFloat = setting(
        1.0, "sampling from the policy itself, as the importance ratio assumes"
    )
    capture_routed_experts: bool = setting(
        False,
        "engines send each token's experts and the loss keeps those that are plausible (router replay); off: "
        "a trajectory is many times larger with them, and vLLM sends them from a GPU only",
    )
    max_tokens: PositiveInt = setting(64, "generated tokens of one turn, end-of-sequence included")
    max_turns: PositiveInt = setting(
        8, "turns of the policy in one episode; an environment of one turn never has a second"
    )
    episode_timeout_s: PositiveFloat = setting(
        3600.0, "one episode, tools included; past it the trajectory is not trained on", resumable=True
    )
    task_tries: PositiveInt = setting(
        3, "of a task or an episode that fails, before it is recorded as failed", resumable=True
    )
    generate_timeout_s: PositiveFloat = setting(
        1800.0, "one call of the engine; more than the longest turn takes", resumable=True
    )
    abort_retries: NonNegativeInt = setting(
        3, "of a turn that the engine aborted, as update_mode abort does", resumable=True
    )
    update_timeout_s: PositiveFloat = setting(
        600.0, "one update of a vLLM server; past it the server is started again", resumable=True
    )
    engine_timeout_s: PositiveFloat = setting(
        900.0, "an engine may fail or start this long before its worker ends", resumable=True
    )
    idle_timeout_s: PositiveFloat = setting(
        7200.0,
        "a worker without anything to do ends after this; a trainer may compile for long",
        resumable=True,
    )
    scoring_processes: PositiveInt = setting(
        2, "processes of a worker that score answers and run tools, each with the environment", resumable=True
    )
    scoring_memory_mb: PositiveInt = setting(
        2048, "memory that scores may allocate in one process, beside the environment", resumable=True
    )
    score_timeout_s: PositiveFloat = setting(
        10.0,
        "one score or tool call; past it its process is killed and the answer is a timeout",
        resumable=True,
    )
    slots: PositiveInt = setting(32, "sequences an engine decodes at once", resumable=True)
    outstanding_groups: PositiveInt = setting(
        32, "credits: groups that may be claimed but not yet trained; bounds the lag", resumable=True
    )
    segment_groups: PositiveInt = setting(4, "groups in one segment before it is written", resumable=True)
    flush_seconds: PositiveFloat = setting(2.0, "a segment is written at least this often", resumable=True)
    lease_seconds: PositiveFloat = setting(
        60.0, "an unrenewed claim is reissued after this; a few times the longest completion", resumable=True
    )
    kv_policy: Literal["keep_kv", "recompute_kv"] = setting(
        "keep_kv", "requests keep their cache across an update: shorter pauses, slightly off-policy keys"
    )
    update_mode: Literal["in_flight", "drain", "abort"] = setting(
        "in_flight",
        "requests go on across an update of vLLM; drain lets them end first, abort asks for them again",
        resumable=True,
    )
    server_port: Annotated[int, Field(ge=1, le=65535)] = setting(
        8000, "loopback port of the vLLM server, of several the first", resumable=True
    )
    servers: PositiveInt = setting(1, "vLLM servers of a host, of one agent", resumable=True)
    servers_at_once: PositiveInt = setting(
        1,
        "servers an update may stop at a time; of several never all, so that tokens are always made",
        resumable=True,
    )
    server_args: list[str] = Field(
        default_factory=list,
        description="further arguments of `vllm serve`, one a list item; no shell reads them",
        json_schema_extra={"resumable": True},
    )

    @model_validator(mode="after")
    def _arguments_are_free(self) -> Self:
        if problem := server_args.problem(self.server_args):
            raise rejection("server_args", problem)
        return self


class TrajectorySection(Section):
    """Which trajectories a step trains on."""

    max_lag: NonNegativeInt = setting(8, "optimizer steps a token may lag; staler ones are masked")
    min_fresh_fraction: Fraction = setting(
        0.5, "a trajectory with less of its trainable tokens fresh is dropped (published value unknown)"
    )
    length_bins: PositiveInt = setting(
        4, "bins drawn from evenly, oldest first, so long ones are not starved"
    )
    min_valid_fraction: Fraction = setting(0.5, "share of usable members that saves a group")
    boundary: Literal["inclusive", "exclusive"] = setting(
        "inclusive", "whether exactly min_valid_fraction saves a group; the sources differ"
    )
    filters: list[Reference] = setting(
        [Reference(name="no_signal")],
        "rules that drop members of groups, besides those of this section",
        reference="filter",
    )
    plans_ahead: Annotated[int, Field(ge=0, le=1)] = setting(
        1, "1 plans a step while the one before it computes; 0 waits for the newest version", resumable=True
    )
    wait_timeout_s: PositiveFloat = setting(
        900.0, "how long a step waits for trajectories, a server's start included", resumable=True
    )


class WeightSection(Section):
    """The chain of policy versions."""

    full_every: PositiveInt = setting(
        50, "versions between full ones: bounds the replay of a late subscriber"
    )
    full_fraction: PositiveFloat = setting(
        1.0,
        "full again once the deltas since add up to this much of one: a new reader fetches twice one at most",
    )
    publish_every: PositiveInt = setting(1, "optimizer steps between versions")
    preset: Literal["small", "fast"] = setting(
        "small",
        "of the delta codec: fast takes 1.2 to 1.4 times the bytes and decodes 3 times as fast, for models "
        "that take seconds to decode",
        resumable=True,
    )
    tensor_parallel: PositiveInt = setting(
        1, "ranks of each engine: layers whose slices they cannot take in 128-blocks are not quantised"
    )
    data_parallel: PositiveInt = setting(
        1, "engines that share routed experts, cut among all their ranks unless expert_parallel"
    )
    expert_parallel: bool = setting(
        True, "of several ranks, experts whole on one each: cut into slices, most of them could not be FP8"
    )
    min_fp8_share: Fraction = setting(
        0.0, "a run whose layout leaves a smaller part of the parameters in FP8 is refused"
    )
    retention_versions: NonNegativeInt = setting(
        200, "an agent this far behind still finds its deltas; beyond, it takes a full one", resumable=True
    )
    retention_s: NonNegativeFloat = setting(
        600.0,
        "a version stays this long after the next one came, for readers that acknowledge nothing",
        resumable=True,
    )

    @property
    def experts_whole(self) -> bool:
        """Whether an engine of several ranks gives each expert to one of them."""
        return self.expert_parallel and self.tensor_parallel * self.data_parallel > 1


class ProcessSection(Section):
    """How `jaxtrain quickstart` runs the parts on one machine."""

    pin_cores: bool = setting(
        False,
        "disjoint cores a process; two free cores trained 1.3 times faster than one pinned",
        resumable=True,
    )
    trainer_cores: NonNegativeInt = setting(
        0, "cores of the trainer when pinned; 0 takes half", resumable=True
    )
    stop_timeout_s: PositiveFloat = setting(
        30.0, "after SIGTERM a process has this long to save and leave before SIGKILL", resumable=True
    )
