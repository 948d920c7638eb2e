"""Mixtral (arXiv 2401.04088): every layer has experts; a softmax router weighs those it chooses."""

from functools import partial

from rollout_bridge.architectures.base import COMMON, Architecture, Field
from rollout_bridge.architectures.decoder import Scoring
from rollout_bridge.architectures.layers import decoder

MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    # What models of the family differ in, and the name in config.json where it is another.
    fields=(
        *COMMON,
        Field(name="head_dim", absent=lambda c: c["hidden_size"] // max(c["num_attention_heads"], 1)),
        Field(name="moe_intermediate_size", keys=("intermediate_size",)),
        Field(name="n_routed_experts", keys=("num_local_experts",)),
        Field(name="num_experts_per_tok", absent=2),
        Field(name="rope_theta", new=1_000_000.0),
        Field(name="rms_norm_eps", new=1e-5),
        Field(name="tie_word_embeddings", absent=False, new=False),
    ),
    # What is the same in all of them.
    implied={
        "first_k_dense_replace": 0,
        "intermediate_size": 0,  # of dense layers, which there are none of
        "n_shared_experts": 0,
        "routed_scaling_factor": 1.0,
        "router_scoring": Scoring.SOFTMAX,
        "norm_topk_prob": True,
        "correction_bias": False,
        "partial_rotary_factor": 1.0,
        "use_qk_norm": False,
        "attention_bias": False,
    },
    # Fields of config.json that would change the computation, with the only value that is implemented.
    expected={"sliding_window": None, "router_jitter_noise": 0.0},
    written={"sliding_window": None},
    # model.layers.0.block_sparse_moe.experts.0.w1.weight, and so on.
    tensors=partial(decoder, moe="block_sparse_moe", expert=("w1", "w3", "w2")),
)
