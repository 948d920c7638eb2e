"""The sizes and options of a decoder, independent of a family's names for them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rollout_bridge.architectures.rope import RopeScaling
from rollout_bridge.errors import ExpectedError


class Scoring(enum.StrEnum):
    """How a router computes scores from logits, in float32: each by itself, or all together."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class ArchitectureError(ExpectedError, ValueError):
    """A config.json, a family or a tensor that does not fit; names each field and its value."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder. Names and meanings follow `transformers.Glm4MoeConfig`.

    architecture: name or `module:Name` of its family, see `architectures.find`.
    first_k_dense_replace: layers with a dense MLP, which come first; all others have experts. A decoder
    without experts has num_hidden_layers of them and 0 in the experts' fields.
    router_scoring, correction_bias: of the routers. num_nextn_predict_layers: layers that predict further
    tokens (MTP), beyond num_hidden_layers.
    """

    architecture: str
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
    rope_scaling: RopeScaling | None = None

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
            "experts, and MTP layers have experts",
        )
        return found
