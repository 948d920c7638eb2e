"""Qwen3, dense: QK-norm without biases; small ones tie embedding and head."""

from __future__ import annotations

from rollout_bridge.architectures.base import COMMON, DENSE, Architecture, Field, Json


def _refusals(hf_config: Json) -> list[str]:
    kinds = sorted(set(hf_config.get("layer_types") or []) - {"full_attention"})
    return [f"layer_types: {kinds} are not supported, expected 'full_attention' only"] if kinds else []


ARCHITECTURE = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    fields=(
        *COMMON,
        Field(name="head_dim", absent=128),
        Field(name="intermediate_size"),
        Field(name="rope_theta", new=1_000_000.0),
        Field(name="rms_norm_eps", new=1e-6),
        Field(name="tie_word_embeddings", absent=False, new=True),
    ),
    implied=DENSE | {"partial_rotary_factor": 1.0, "use_qk_norm": True, "attention_bias": False},
    expected={"attention_bias": False, "use_sliding_window": False},
    written={"use_sliding_window": False, "attention_bias": False},
    refusals=_refusals,
)
