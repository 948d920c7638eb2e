"""The model and the mesh it is laid over."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import ValidationInfo, model_validator

from jaxtrain.config.base import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    rejection,
    required,
    section,
    setting,
)
from jaxtrain.config.checkpoint import fill_from_checkpoint
from jaxtrain.config.presets import MODEL_PRESETS, PRESET_ALIASES
from rollout_bridge import architectures
from rollout_bridge.architectures import ArchitectureError, DecoderConfig, rope
from rollout_bridge.errors import guess

DECODER = frozenset(item.name for item in dataclasses.fields(DecoderConfig))


class ModelSection(Section):
    """A decoder. Field names are those of a GLM-4.5 config.json; `architecture` says which of them it reads.

    `preset` fills in a model by name; fields given beside it override it. A field that the architecture does
    not read is null, and an error if given.
    """

    preset: str | None = setting(None, "a model by name; without one every field below is explicit")
    checkpoint: str | None = setting(
        None,
        "weights to start from: a Hugging Face directory, an imported model or runs/NAME, whose config.json "
        "gives every field of the architecture; None: random weights",
    )
    architecture: str = setting(
        "glm4_moe",
        "family: a Hugging Face model_type, or module:Name of a file beside the config; what the layers are, "
        "and the names of saved tensors",
    )
    hidden_size: PositiveInt = required("width D of the residual stream")
    num_hidden_layers: PositiveInt = required("dense and MoE layers together, MTP layers excluded")
    num_attention_heads: PositiveInt = required("query heads")
    num_key_value_heads: PositiveInt = required("key/value heads; divides the query heads")
    head_dim: PositiveInt = required("width of one head, independent of hidden_size")
    intermediate_size: PositiveInt | None = setting(None, "hidden width of the dense MLPs")
    # Of architectures with experts.
    first_k_dense_replace: NonNegativeInt | None = setting(None, "leading layers with a dense MLP")
    moe_intermediate_size: PositiveInt | None = setting(
        None, "hidden width of one expert, and of each shared expert"
    )
    n_routed_experts: PositiveInt | None = setting(None, "experts a router chooses among")
    num_experts_per_tok: PositiveInt | None = setting(None, "experts chosen for each token")
    n_shared_experts: NonNegativeInt | None = setting(None, "experts that see every token")
    routed_scaling_factor: PositiveFloat | None = setting(
        None, "multiplies the routed experts' output; glm4_moe: 1, the mixture as the router weighs it"
    )
    norm_topk_prob: bool | None = setting(None, "the chosen gates sum to one, as in every published model")
    num_nextn_predict_layers: NonNegativeInt | None = setting(
        None, "layers that predict further tokens (MTP) beyond num_hidden_layers; glm4_moe: none"
    )
    # Of all, with the architecture's usual value.
    rope_theta: PositiveFloat = required("base of the rotary embedding; by architecture")
    rope_scaling: dict[str, Any] | None = setting(
        None, "longer contexts than those trained on: rope_type (linear, llama3 or yarn) and its parameters"
    )
    rms_norm_eps: PositiveFloat = required("added to the mean square of a norm; by architecture")
    max_position_embeddings: PositiveInt = required("longest sequence; 4096 is GLM-4.5's in pre-training")
    initializer_range: PositiveFloat = required("standard deviation of new matrices; 0.02 as published")
    # Of some.
    partial_rotary_factor: Fraction | None = setting(
        None, "share of each head that is rotated; glm4_moe: half, elsewhere all"
    )
    use_qk_norm: bool | None = setting(
        None, "RMSNorm on queries and keys bounds attention logits; glm4_moe: as GLM-4.5 has it"
    )
    attention_bias: bool | None = setting(None, "bias on q, k, v only; glm4_moe: as GLM-4.5 has it")
    tie_word_embeddings: bool | None = setting(
        None, "the head is the embedding; qwen3 and llama: yes, as their small models do"
    )
    compute_dtype: Literal["float32", "bfloat16"] = setting(
        "bfloat16", "activations and matmuls; float32 is faster on CPUs without BF16 units"
    )
    expert_implementation: Literal["auto", "dense", "blocks", "ragged"] = setting(
        "auto", "how expert matmuls are grouped; auto picks by the device"
    )
    attention_implementation: Literal["auto", "xla", "chunked", "triton", "cudnn", "splash"] = setting(
        "auto",
        "triton on GPU (chunked in float32), splash on TPU; chunked needs memory linear in the sequence, "
        "anywhere; cudnn holds a bias [sequence, sequence]",
    )
    remat: Literal["none", "full", "dots"] = setting(
        "none", "what the backward pass recomputes: nothing, whole layers, or all but matmul outputs"
    )
    replay_threshold: PositiveFloat = setting(
        0.5,
        "an engine's expert is replayed if its gate is at least this share of the least gate that the router "
        "here would choose; the published rule has no number",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any, info: ValidationInfo) -> Any:
        """Preset, then what the architecture has when nothing is said.

        Weights are not looked into if the context says `weights_known`: every field is given then.
        """
        if not isinstance(values, dict):
            return values
        if values.get("checkpoint") is not None and not (info.context or {}).get("weights_known"):
            values = fill_from_checkpoint(values)
        if values.get("preset") is not None:
            values = _preset(values["preset"]) | values
        try:
            usual = architectures.usual(str(values.get("architecture", "glm4_moe")))
        except ArchitectureError as error:
            raise rejection("architecture", str(error)) from error
        missing = {key: value for key, value in usual.items() if values.get(key) is None}
        return values | missing

    @model_validator(mode="after")
    def _reads(self) -> Self:
        """Every field of the architecture is there, and none of another's."""
        own = {item.name for item in architectures.find(self.architecture).fields}
        names = (DECODER - {"architecture"}) & type(self).model_fields.keys()
        given = {name for name in names if getattr(self, name) is not None}
        stray = sorted(given - own)
        if stray:
            raise rejection(
                stray[0], f"architecture {self.architecture!r} does not read it; leave out {', '.join(stray)}"
            )
        missing = sorted((own - {"vocab_size", "rope_scaling"}) - given)
        if missing:
            raise rejection(
                missing[0], f"missing; architecture {self.architecture!r} needs {', '.join(missing)}"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.attention_implementation == "cudnn" and self.compute_dtype == "float32":
            raise rejection(
                "attention_implementation",
                "cudnn has no float32, and compute_dtype is float32; set compute_dtype: bfloat16, or choose "
                "auto, xla or chunked",
            )
        dense, experts, chosen = self.first_k_dense_replace, self.n_routed_experts, self.num_experts_per_tok
        if dense is not None and dense > self.num_hidden_layers:
            raise rejection(
                "first_k_dense_replace", f"{dense} is more than num_hidden_layers {self.num_hidden_layers}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise rejection(
                "num_key_value_heads",
                f"{self.num_key_value_heads} does not divide num_attention_heads {self.num_attention_heads}",
            )
        if experts is not None and chosen is not None and chosen > experts:
            raise rejection("num_experts_per_tok", f"{chosen} is more than n_routed_experts {experts}")
        factor = 1.0 if self.partial_rotary_factor is None else self.partial_rotary_factor
        rotated = self.head_dim * factor
        if rotated != int(rotated) or int(rotated) % 2:
            raise rejection(
                "head_dim" if self.partial_rotary_factor is None else "partial_rotary_factor",
                f"{factor} of head_dim {self.head_dim} rotates {rotated:g} components; "
                "an even number is needed",
            )
        scaling = self.rope_scaling or {}
        problems = rope.problems("rope_scaling", scaling) + self.decoder(vocab_size=1).problems()
        if problems:
            field, _, problem = problems[0].partition(": ")
            raise rejection(field, problem)
        return self

    def decoder(self, *, vocab_size: int) -> DecoderConfig:
        """The decoder for a vocabulary."""
        fields = architectures.find(self.architecture).fields
        own = {item.name: getattr(self, item.name) for item in fields if item.name != "vocab_size"}
        return architectures.complete(self.architecture, own | {"vocab_size": vocab_size})

    @property
    def numerics(self) -> dict[str, Any]:
        """How this section computes, for `ModelConfig.from_hf`."""
        names = type(self).model_fields.keys() - DECODER - {"preset", "checkpoint"}
        return {name: getattr(self, name) for name in names}

    def hf_config(
        self, *, vocab_size: int, eos_token_id: int | Sequence[int], pad_token_id: int | None
    ) -> dict[str, Any]:
        """config.json of this model, as transformers and vLLM load it."""
        return architectures.write(self.decoder(vocab_size=vocab_size)) | {
            "eos_token_id": eos_token_id if isinstance(eos_token_id, int) else list(eos_token_id),
            "pad_token_id": pad_token_id,
        }


def _preset(name: Any) -> dict[str, Any]:
    name = PRESET_ALIASES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in MODEL_PRESETS:
        known = [*MODEL_PRESETS, *PRESET_ALIASES]
        near = guess(str(name), known)
        raise rejection("preset", f"{name!r} is not one of {', '.join(known)}{near}")
    return MODEL_PRESETS[name]


class MeshAxes(Section):
    """Sizes of the mesh axes at one level of the network; -1, once at most: the devices that remain."""

    data: int = setting(1, "replicas of the parameters")
    fsdp: int = setting(1, "shards of parameters and optimizer state, gathered layer by layer")
    expert: int = setting(1, "groups of experts; rows are split over it as well")
    context: int = setting(1, "parts of each sequence; for sequences too long for one device")
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
