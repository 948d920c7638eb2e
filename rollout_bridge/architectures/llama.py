"""Llama and its relatives without biases (SmolLM2): dense, full rotary embedding, no QK-norm."""

from __future__ import annotations

from rollout_bridge.architectures.base import COMMON, DENSE, Architecture, Field

ARCHITECTURE = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    fields=(
        *(item for item in COMMON if item.name != "num_key_value_heads"),
        Field(name="num_key_value_heads", absent=lambda c: c["num_attention_heads"]),
        Field(name="head_dim", absent=lambda c: c["hidden_size"] // max(c["num_attention_heads"], 1)),
        Field(name="intermediate_size"),
        Field(name="rope_theta", absent=10_000.0, new=10_000.0),
        Field(name="rms_norm_eps", new=1e-5),
        Field(name="tie_word_embeddings", absent=False, new=True),
    ),
    implied=DENSE | {"partial_rotary_factor": 1.0, "use_qk_norm": False, "attention_bias": False},
    expected={"attention_bias": False, "mlp_bias": False, "rope_interleaved": False},
    written={"attention_bias": False, "mlp_bias": False},
)
