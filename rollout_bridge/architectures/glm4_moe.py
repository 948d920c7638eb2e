"""GLM-4.5 and its relatives: leading dense layers, sigmoid router with a correction bias, shared experts."""

from __future__ import annotations

from rollout_bridge.architectures.base import COMMON, Architecture, Field
from rollout_bridge.architectures.decoder import DecoderConfig, Scoring
from rollout_bridge.architectures.layers import next_token_prefix


def _duplicates(c: DecoderConfig) -> dict[str, str]:
    """Each layer that predicts further tokens (MTP) repeats embedding and head in published checkpoints.

    Engines use the originals in their place (vLLM 0.32, transformers 5), so they are not written.
    """
    found = {}
    for depth in range(c.num_nextn_predict_layers):
        prefix = next_token_prefix(c, depth)
        found[f"{prefix}.embed_tokens.weight"] = "model.embed_tokens.weight"
        found[f"{prefix}.shared_head.head.weight"] = "lm_head.weight"
    return found


ARCHITECTURE = Architecture(
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    fields=(
        *COMMON,
        Field(name="head_dim"),
        Field(name="first_k_dense_replace"),
        Field(name="intermediate_size"),
        Field(name="moe_intermediate_size"),
        Field(name="n_routed_experts"),
        Field(name="num_experts_per_tok"),
        Field(name="n_shared_experts"),
        # New models: the values of GLM-4.5, except a factor of 1, which does not scale the mixture.
        Field(name="routed_scaling_factor", new=1.0),
        Field(name="norm_topk_prob", new=True),
        Field(name="partial_rotary_factor", absent=0.5, new=0.5),
        Field(name="rope_theta", new=10_000.0),
        Field(name="use_qk_norm", absent=False, new=True),
        Field(name="attention_bias", absent=False, new=True),
        Field(name="rms_norm_eps", new=1e-5),
        Field(name="num_nextn_predict_layers", absent=0, new=0),
    ),
    implied={"router_scoring": Scoring.SIGMOID, "correction_bias": True, "tie_word_embeddings": False},
    expected={"n_group": 1, "topk_group": 1, "tie_word_embeddings": False},
    written={"n_group": 1, "topk_group": 1},
    duplicates=_duplicates,
)
