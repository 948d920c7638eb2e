"""Plans of GLM sources: what stays BF16, and which layouts vLLM 0.32 refuses (its rule, worked by hand)."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from jaxtrain.config.model import ModelSection
from jaxtrain.config.presets import PRESET_ALIASES, PUBLISHED_VOCABULARIES
from rollout_bridge import architectures
from rollout_bridge.architectures import TensorSource
from rollout_bridge.quantization.plan import (
    Format,
    Fp8ShareError,
    QuantizationPlan,
    ServingLayout,
    fp8_share,
    plan_for,
)


def _sources(
    *,
    model: int = 4096,
    heads: int = 96,
    kv_heads: int = 8,
    head_dim: int = 128,
    dense: int = 10944,
    expert: int = 1408,
) -> tuple[TensorSource, ...]:
    """Two layers of GLM-4.5-Air by default: one dense, one of two routed experts and a shared one."""
    return architectures.tensors(
        {
            "model_type": "glm4_moe",
            "vocab_size": 151552,
            "hidden_size": model,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": dense,
            "moe_intermediate_size": expert,
            "n_routed_experts": 2,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
        }
    )


def _refused(
    sources: Iterable[TensorSource], serving: ServingLayout | None, head_dim: int | None = None
) -> set[str]:
    """Modules that are BF16 although they are neither embedding, head nor router."""
    plan = plan_for(sources, serving=serving, head_dim=head_dim)
    always = {"model.embed_tokens", "lm_head", "model.layers.1.mlp.gate"}
    assert always <= set(plan.modules_to_not_convert)
    return set(plan.modules_to_not_convert) - always


def test_formats_of_a_layout_that_takes_everything() -> None:
    sources = _sources(dense=10880)  # 85 blocks
    plan = plan_for(sources, serving=ServingLayout())
    by_format = {f: {n for n, chosen in plan.formats.items() if chosen is f} for f in Format}
    assert by_format[Format.f32] == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert by_format[Format.fp8_block] == {s.name for s in sources if s.name.endswith("_proj.weight")}
    assert plan.modules_to_not_convert == ("lm_head", "model.embed_tokens", "model.layers.1.mlp.gate")


def test_glm_4_5_air_at_two_ranks() -> None:
    """1408 / 2 = 704 = 5.5 blocks, routed and shared; 10944 / 2 = 5472 = 42.75 blocks. Attention splits."""
    dense = {f"model.layers.0.mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")}
    shared = {f"model.layers.1.mlp.shared_experts.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")}
    assert _refused(_sources(), ServingLayout(2)) == dense | shared | {"model.layers.1.mlp.experts"}
    assert _refused(_sources(), ServingLayout(2, expert_parallel=True)) == dense | shared


def test_glm_4_5_shared_expert_at_eight_ranks() -> None:
    """1536 / 8 = 192 rows: one block and a half."""
    sources = _sources(model=5120, dense=12288, expert=1536)
    assert not _refused(sources, ServingLayout(4))
    shared = {f"model.layers.1.mlp.shared_experts.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")}
    assert _refused(sources, ServingLayout(8)) == shared | {"model.layers.1.mlp.experts"}


def test_key_and_value_heads_are_replicated_past_their_number() -> None:
    """8 heads of 128 on 16 ranks: a whole head each; not 64 rows, which would refuse the merged layer."""
    sources = _sources(dense=12288, expert=2048)
    qkv = {f"model.layers.{n}.self_attn.{leaf}_proj" for n in (0, 1) for leaf in "qkv"}
    assert not _refused(sources, ServingLayout(16), head_dim=128)
    assert _refused(sources, ServingLayout(16)) == qkv


def test_one_rank_may_end_a_merged_layer_in_a_partial_block() -> None:
    """vLLM checks all parts but the last of a merged layer, and no layer that is neither merged nor split."""
    sources = _sources(heads=2, kv_heads=1, head_dim=128, dense=192, expert=128)
    assert _refused(sources, ServingLayout(1)) == {
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    }


def test_engines_given_bf16_refuse_nothing() -> None:
    assert not _refused(_sources(model=96, head_dim=24, dense=100, expert=20), None)


def test_data_parallel_engines_slice_experts_among_all_their_ranks() -> None:
    """1536 on 2 x 4 ranks: 192 rows, refused; spread whole, taken. Nothing else depends on the engines."""
    sources = _sources(model=5120, dense=12288, expert=1536)
    assert not _refused(sources, ServingLayout(4))
    assert _refused(sources, ServingLayout(4, data_parallel=2)) == {"model.layers.1.mlp.experts"}
    assert not _refused(sources, ServingLayout(4, data_parallel=2, expert_parallel=True))


def test_a_layout_that_no_engine_loads_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel=5.*cannot share the 96 heads of .*q_proj\.weight"):
        plan_for(_sources(), serving=ServingLayout(5), head_dim=128)
    with pytest.raises(ValueError, match=r"12 ranks cannot share the 8 heads of .*k_proj\.weight"):
        plan_for(_sources(), serving=ServingLayout(12), head_dim=128)
    with pytest.raises(ValueError, match="data_parallel: 0 is not a positive number"):
        ServingLayout(data_parallel=0)


def test_unquantised_plans_list_every_matrix() -> None:
    sources = _sources()
    plan = plan_for(sources, serving=ServingLayout(), quantize=False)
    assert Format.fp8_block not in plan.formats.values()
    assert plan.formats["model.layers.1.mlp.gate.e_score_correction_bias"] is Format.f32
    assert len(plan.modules_to_not_convert) == sum(len(source.shape) == 2 for source in sources)


def test_json_round_trip_and_fingerprint() -> None:
    plan = plan_for(_sources(), serving=ServingLayout(2))
    again = QuantizationPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    shuffled = QuantizationPlan(dict(reversed(plan.formats.items())), plan.block, plan.modules_to_not_convert)
    assert shuffled.fingerprint() == again.fingerprint() == plan.fingerprint()
    other = plan_for(_sources(), serving=ServingLayout(1))
    assert other.fingerprint() != plan.fingerprint()


def test_config_json_speaks_to_engines() -> None:
    config = plan_for(_sources(), serving=None).hf_quantization_config()
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == [128, 128]
    assert config["activation_scheme"] == "dynamic"
    assert "lm_head" in config["modules_to_not_convert"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"formats": {"w": "F16"}}, "F16"),
        ({"block": [64, 64]}, r"\[64, 64\]"),
        ({"modules_to_not_convert": None}, "not a quantization plan"),
        ({"formats": [1]}, "not a quantization plan"),
    ],
)
def test_plans_that_mean_nothing_are_refused(damage: dict[str, object], message: str) -> None:
    data = plan_for(_sources(), serving=None).to_json() | damage
    with pytest.raises(ValueError, match=message):
        QuantizationPlan.from_json(data)


def test_what_no_engine_has_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"experts\.weight: shape \[2, 3, 4\]"):
        plan_for([TensorSource("experts.weight", "experts", (), False, (2, 3, 4))], serving=None)
    with pytest.raises(ValueError, match="tensor_parallel: 0"):
        ServingLayout(0)


# Shares of all parameters that vLLM 0.32 would hold in FP8, as its own rule was measured to give them.
@pytest.mark.parametrize(
    ("preset", "serving", "share"),
    [
        ("glm-4.5-air", ServingLayout(), 0.987),
        ("glm-4.5-air", ServingLayout(2), 0.047),
        ("glm-4.5-air", ServingLayout(8), 0.047),
        ("glm-4.5-air", ServingLayout(2, expert_parallel=True), 0.980),
        ("glm-4.5", ServingLayout(8), 0.037),
        ("glm-4.5", ServingLayout(8, expert_parallel=True), 0.989),
        ("qwen3-30b-a3b", ServingLayout(4), 0.030),
    ],
)
def test_the_share_in_fp8_is_said_with_what_stays_out_and_why(preset, serving, share):
    decoder = ModelSection.model_validate({"preset": preset}).decoder(
        vocab_size=PUBLISHED_VOCABULARIES[PRESET_ALIASES[preset]]
    )
    sources = architectures.tensors(decoder)
    found = fp8_share(sources, plan_for(sources, serving=serving, head_dim=decoder.head_dim), serving)
    assert found.share == pytest.approx(share, abs=5e-4)
    assert ("expert parallelism keeps experts whole" in str(found)) == (
        serving.tensor_parallel > 1 and not serving.expert_parallel
    )
    assert ("experts.down_proj" in found.refused) == (share < 0.1)
    found.check(found.share - 1e-6, field="x")
    with pytest.raises(Fp8ShareError, match=r"weights.min_fp8_share: 0.999 is more than .* in FP8"):
        found.check(0.999, field="weights.min_fp8_share")
