"""The quantisation plan against vLLM's own checks: a layer is FP8 exactly where vLLM takes it in 128-blocks.

The slices handed to vLLM are computed here the way its layers do: query heads split, key and value heads
repeated past their number, merged layers by part, experts by `FusedMoEParallelConfig.make`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.distributed
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    validate_fp8_block_shape,
    validate_fp8_block_shape_moe,
)

from rollout_bridge import architectures
from rollout_bridge.quantization.plan import BLOCK, Format, QuantizationPlan, ServingLayout, plan_for

pytestmark = pytest.mark.vllm

COMMON = {
    "model_type": "glm4_moe", "vocab_size": 151552, "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "num_key_value_heads": 8, "num_attention_heads": 96, "head_dim": 128, "n_shared_experts": 1,
    "attention_bias": True, "num_experts_per_tok": 4, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
}  # fmt: skip
# Two layers of the published config.json of each; four of their 160 and 128 experts.
MODELS = {
    "GLM-4.5": COMMON
    | {
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "n_routed_experts": 4, "use_qk_norm": True,
    },
    "GLM-4.5-Air": COMMON
    | {
        "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 4, "use_qk_norm": False,
    },
}  # fmt: skip
LAYOUTS = [
    ServingLayout(tensor_parallel=tp, data_parallel=dp, expert_parallel=ep)
    for tp in (1, 2, 4, 8, 16)
    for dp in (1, 2)
    for ep in (False, True)
]


def takes(layer_tp: int, rows: int, columns: int, columns_here: int, rows_here: list[int]) -> bool:
    layer: Any = torch.nn.Module()
    layer.tp_size = layer_tp
    try:
        validate_fp8_block_shape(layer, columns, rows, columns_here, rows_here, list(BLOCK))
    except ValueError:
        return False
    return True


def experts_take(size: int, serving: ServingLayout, monkeypatch: pytest.MonkeyPatch) -> bool:
    tp = serving.tensor_parallel
    monkeypatch.setattr(moe, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(moe, "get_dp_group", lambda: SimpleNamespace(rank_in_group=0))
    parallel: Any = SimpleNamespace(
        enable_expert_parallel=serving.expert_parallel, all2all_backend="", enable_eplb=False
    )
    slices = moe.FusedMoEParallelConfig.make(tp, 1, serving.data_parallel, 1, parallel).tp_size
    try:
        validate_fp8_block_shape_moe(size // slices, list(BLOCK))
    except ValueError:
        return False
    return size % slices == 0


def plan_of(config: dict, serving: ServingLayout) -> QuantizationPlan:
    return plan_for(architectures.tensors(config), serving=serving, head_dim=config["head_dim"])


def quantized(plan: QuantizationPlan, part: str) -> bool:
    """Whether the matrices whose name contains `part` are FP8: all of them or none."""
    found = {
        chosen is Format.fp8_block
        for name, chosen in plan.formats.items()
        if part in name and name.endswith("_proj.weight")
    }
    assert len(found) == 1, (part, found)
    return found.pop()


@pytest.mark.parametrize("serving", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_is_fp8_exactly_where_vllm_takes_it(model, serving, monkeypatch):
    config = MODELS[model]
    tp, hidden, head = serving.tensor_parallel, config["hidden_size"], config["head_dim"]
    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_world_size", lambda: tp)
    plan = plan_of(config, serving)
    query = config["num_attention_heads"] * head
    key = max(1, config["num_key_value_heads"] // tp) * head
    qkv = takes(tp, query + 2 * key * tp, hidden, hidden, [query // tp, key, key])
    for part in ("q_proj", "k_proj", "v_proj"):
        assert quantized(plan, f"layers.1.self_attn.{part}") == qkv
    assert quantized(plan, "layers.1.self_attn.o_proj") == takes(tp, hidden, query, query // tp, [hidden])
    for where, size in (
        ("layers.0.mlp", config["intermediate_size"]),
        ("layers.1.mlp.shared_experts", config["moe_intermediate_size"]),
    ):
        merged = takes(tp, 2 * size, hidden, hidden, 2 * [size // tp])
        assert quantized(plan, f"{where}.gate_proj") == quantized(plan, f"{where}.up_proj") == merged
        assert quantized(plan, f"{where}.down_proj") == takes(tp, hidden, size, size // tp, [hidden])
    experts = experts_take(config["moe_intermediate_size"], serving, monkeypatch)
    assert quantized(plan, "layers.1.mlp.experts.") == experts


def test_what_is_known_of_two_layouts():
    """192-row slices of GLM-4.5's experts at 8 ranks, 704-row ones of Air's at 2: neither is in blocks."""
    for model, ranks in (("GLM-4.5", 8), ("GLM-4.5-Air", 2)):
        plan = plan_of(MODELS[model], ServingLayout(ranks))
        assert not quantized(plan, "mlp.shared_experts.gate_proj")
        assert not quantized(plan, "mlp.experts.")
        assert quantized(plan, "self_attn.o_proj")
        assert "model.layers.1.mlp.shared_experts.gate_proj" in plan.modules_to_not_convert
