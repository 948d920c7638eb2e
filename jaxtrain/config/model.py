"""The model and the mesh it is laid over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from jaxtrain.config.base import (
    Fraction,
    PositiveFloat,
    PositiveInt,
    Section,
    rejection,
    required,
    section,
    setting,
)
from jaxtrain.config.presets import MODEL_PRESETS


class ModelSection(Section):
    """A decoder of the GLM-4.5 family. Field names are those of its Hugging Face config.json.

    `preset` fills in an architecture by name; fields given beside it override it.
    """

    preset: str | None = setting(None, "an architecture by name; without one every field below is explicit")
    hidden_size: PositiveInt = required("width D of the residual stream")
    num_hidden_layers: PositiveInt = required("dense and MoE layers together, MTP layers excluded")
    first_k_dense_replace: int = Field(ge=0, description="leading layers with a dense MLP")
    intermediate_size: PositiveInt = required("hidden width of the dense MLPs")
    moe_intermediate_size: PositiveInt = required("hidden width of one expert, and of each shared expert")
    num_attention_heads: PositiveInt = required("query heads")
    num_key_value_heads: PositiveInt = required("key/value heads; divides the query heads")
    head_dim: PositiveInt = required("width of one head, independent of hidden_size")
    n_routed_experts: PositiveInt = required("experts a router chooses among")
    num_experts_per_tok: PositiveInt = required("experts chosen for each token")
    n_shared_experts: int = Field(ge=0, description="experts that see every token")
    routed_scaling_factor: PositiveFloat = setting(
        1.0, "multiplies the routed experts' output; 1 leaves the mixture as the router weighs it"
    )
    norm_topk_prob: bool = setting(True, "the chosen gates sum to one, as in every GLM-4.5 model")
    partial_rotary_factor: Fraction = setting(0.5, "half of each head is rotated, as in GLM-4.5")
    rope_theta: PositiveFloat = setting(10_000.0, "the base GLM-4.5 pre-trains with at 4K tokens")
    use_qk_norm: bool = setting(True, "RMSNorm on queries and keys bounds attention logits; GLM-4.5 has it")
    attention_bias: bool = setting(True, "bias on q, k, v only, as in GLM-4.5")
    rms_norm_eps: PositiveFloat = setting(1e-5, "GLM-4.5's value")
    max_position_embeddings: PositiveInt = setting(
        4096, "longest sequence; the pre-training length of GLM-4.5"
    )
    compute_dtype: Literal["float32", "bfloat16"] = setting(
        "bfloat16", "activations and matmuls; float32 is faster on CPUs without BF16 units"
    )
    expert_implementation: Literal["auto", "dense", "blocks", "ragged"] = setting(
        "auto", "how expert matmuls are grouped; auto picks by the device"
    )
    remat: Literal["none", "full", "dots"] = setting(
        "none", "what the backward pass recomputes: nothing, whole layers, or all but matmul outputs"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("preset") is None:
            return values
        preset = MODEL_PRESETS.get(values["preset"]) if isinstance(values["preset"], str) else None
        if preset is None:
            raise rejection("preset", f"{values['preset']!r} is not one of {', '.join(MODEL_PRESETS)}")
        return preset | values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise rejection(
                "first_k_dense_replace",
                f"{self.first_k_dense_replace} is more than num_hidden_layers {self.num_hidden_layers}",
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise rejection(
                "num_key_value_heads",
                f"{self.num_key_value_heads} does not divide num_attention_heads {self.num_attention_heads}",
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise rejection(
                "num_experts_per_tok",
                f"{self.num_experts_per_tok} is more than n_routed_experts {self.n_routed_experts}",
            )
        rotated = self.head_dim * self.partial_rotary_factor
        if rotated != int(rotated) or int(rotated) % 2:
            raise rejection(
                "partial_rotary_factor",
                f"{self.partial_rotary_factor} of head_dim {self.head_dim} rotates {rotated:g} components; "
                "an even number is needed",
            )
        return self

    def hf_config(
        self, *, vocab_size: int, eos_token_id: int | Sequence[int], pad_token_id: int | None
    ) -> dict[str, Any]:
        """config.json of a `Glm4MoeForCausalLM` with this architecture, as transformers and vLLM load it."""
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "first_k_dense_replace": self.first_k_dense_replace,
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "n_routed_experts": self.n_routed_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "n_shared_experts": self.n_shared_experts,
            "routed_scaling_factor": self.routed_scaling_factor,
            "norm_topk_prob": self.norm_topk_prob,
            "n_group": 1,
            "topk_group": 1,
            "partial_rotary_factor": self.partial_rotary_factor,
            "rope_theta": self.rope_theta,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            },
            "use_qk_norm": self.use_qk_norm,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "num_nextn_predict_layers": 0,
            "tie_word_embeddings": False,
            "eos_token_id": eos_token_id if isinstance(eos_token_id, int) else list(eos_token_id),
            "pad_token_id": pad_token_id,
            "dtype": "bfloat16",
        }


class MeshAxes(Section):
    """Sizes of the mesh axes at one level of the network; -1, once at most: the devices that remain."""

    data: int = setting(1, "replicas of the parameters")
    fsdp: int = setting(1, "shards of parameters and optimizer state, gathered layer by layer")
    expert: int = setting(1, "groups of experts")
    tensor: int = setting(1, "shards of heads and MLP width")

    @model_validator(mode="after")
    def _one_rest(self) -> Self:
        sizes = {name: getattr(self, name) for name in type(self).model_fields}
        for name, size in sizes.items():
            if size != -1 and size < 1:
                raise rejection(name, f"{size} is neither a positive size nor -1 (the remaining devices)")
        rest = [name for name, size in sizes.items() if size == -1]
        if len(rest) > 1:
            raise rejection(
                rest[-1], f"-1 as well as {rest[0]}; one axis at most takes the remaining devices"
            )
        return self


class IciAxes(MeshAxes):
    """Within a slice or host: fast links."""

    fsdp: int = setting(-1, "all devices of a slice: saves most memory for least communication")


class DcnAxes(MeshAxes):
    """Between slices or hosts: slow links."""

    data: int = setting(1, "a single slice; with several, replicate: one gradient sum a step crosses them")


class MeshSection(Section):
    ici: IciAxes = section(IciAxes, "axes within a slice")
    dcn: DcnAxes = section(DcnAxes, "axes between slices")
