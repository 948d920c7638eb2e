"""Numbers that define a decoder, read from a Hugging Face config.json.

They are checked before any device is used.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_bridge.errors import ExpectedError


class ExpertImplementation(enum.StrEnum):
    """How routed experts are computed; the mathematics is the same.

    AUTO picks per platform: BLOCKS on CPU (DENSE when few tokens), RAGGED elsewhere.
    DENSE runs every expert on every token and is the reference.
    BLOCKS sorts tokens by expert, a block of rows for each. RAGGED is `jax.lax.ragged_dot`.
    """

    AUTO = "auto"
    DENSE = "dense"
    BLOCKS = "blocks"
    RAGGED = "ragged"


class AttentionImplementation(enum.StrEnum):
    """How attention within packed documents is computed; the mathematics is the same.

    AUTO picks per platform: CUDNN on GPU, SPLASH on TPU, XLA elsewhere. XLA holds scores [S, S] and is the
    reference. CHUNKED is online softmax over chunks of keys, on any platform; a sequence split between
    devices always takes it. CUDNN is cuDNN's flash attention, SPLASH a Pallas kernel.
    """

    AUTO = "auto"
    XLA = "xla"
    CHUNKED = "chunked"
    CUDNN = "cudnn"
    SPLASH = "splash"


class Remat(enum.StrEnum):
    """What the backward pass recomputes: nothing, everything in a layer, or all but matrix products."""

    NONE = "none"
    FULL = "full"
    DOTS = "dots"


class Scoring(enum.StrEnum):
    """What a router makes of its logits, in float32: each by itself, or all together."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class ModelConfigError(ExpectedError, ValueError):
    """A model configuration that cannot be built; names each field, its value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder. Names and meanings follow `transformers.Glm4MoeConfig`.

    A decoder without experts has first_k_dense_replace = num_hidden_layers and 0 in the experts' fields.
    router_scoring, correction_bias: of the routers. num_nextn_predict_layers: layers that predict further
    tokens (MTP), beyond num_hidden_layers. replay_threshold: see `replay.choose`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    partial_rotary_factor: float
    rope_theta: float
    use_qk_norm: bool
    attention_bias: bool
    rms_norm_eps: float
    max_position_embeddings: int
    router_scoring: Scoring = Scoring.SIGMOID
    correction_bias: bool = True
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    initializer_range: float = 0.02
    compute_dtype: str = "bfloat16"
    expert_implementation: ExpertImplementation = ExpertImplementation.AUTO
    attention_implementation: AttentionImplementation = AttentionImplementation.AUTO
    remat: Remat = Remat.NONE
    replay_threshold: float = 0.5
    measure_max_logits: bool = False  # training reports each head's largest attention logit (`QkClip`)

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def num_routers(self) -> int:
        """Layers with experts, those of MTP included."""
        return self.num_moe_layers + self.num_nextn_predict_layers

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], **numerics: Any) -> ModelConfig:
        """Reads a Hugging Face config.json. numerics: fields of `NUMERICS`, as the caller computes with them.

        Raises `ModelConfigError` naming every problem at once.
        """
        # The architectures build ModelConfigs, so their registry cannot be imported above.
        from jaxtrain.models.architectures.registry import read_config

        return read_config(hf_config, **numerics)

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty when the decoder can be built."""
        found = []

        def check(ok: bool, line: str) -> None:
            if not ok:
                found.append(line)

        positive = [
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ]
        if self.first_k_dense_replace:
            positive.append("intermediate_size")
        if self.num_moe_layers > 0:
            positive += ["moe_intermediate_size", "n_routed_experts"]
        for name in positive:
            check(getattr(self, name) > 0, f"{name}: {getattr(self, name)} is not positive")
        check(
            self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_key_value_heads: {self.num_key_value_heads} does not divide "
            f"num_attention_heads {self.num_attention_heads}",
        )
        check(
            0 <= self.first_k_dense_replace <= self.num_hidden_layers,
            f"first_k_dense_replace: {self.first_k_dense_replace} is not in [0, {self.num_hidden_layers}]",
        )
        check(
            self.num_moe_layers < 1 or 1 <= self.num_experts_per_tok <= self.n_routed_experts,
            f"num_experts_per_tok: {self.num_experts_per_tok} is not in [1, {self.n_routed_experts}]",
        )
        check(
            self.rotary_dim % 2 == 0 and 0 < self.rotary_dim <= self.head_dim,
            f"partial_rotary_factor: {self.partial_rotary_factor} of head_dim {self.head_dim} gives "
            f"{self.rotary_dim} rotated channels, expected an even number in [2, {self.head_dim}]",
        )
        check(
            self.num_nextn_predict_layers == 0 or self.num_moe_layers > 0,
            f"num_nextn_predict_layers: {self.num_nextn_predict_layers}, but no layer of the decoder has "
            "experts, whose form they have",
        )
        return found


# Fields that say how to compute, not what: a config.json does not have them.
NUMERICS: dict[str, Callable[[Any], Any]] = {
    "compute_dtype": str,
    "expert_implementation": ExpertImplementation,
    "attention_implementation": AttentionImplementation,
    "remat": Remat,
    "replay_threshold": float,
}
