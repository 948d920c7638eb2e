"""Values that are allowed: overrides, presets, defaults, and the Hugging Face config they become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from jaxtrain.config.errors import ConfigError, walk_fields
from jaxtrain.config.fleet import WeightSection
from jaxtrain.config.load import load_config, parse_override
from jaxtrain.config.model import ModelSection
from jaxtrain.config.presets import MODEL_PRESETS
from jaxtrain.config.resume import claim_run, differences
from jaxtrain.config.schema import RECIPES, AsyncGrpoConfig, as_plain
from jaxtrain.publishing.publication import writer_settings

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
FROM_WEIGHTS = ("smollm2_rl.yaml",)  # the weights are named on the command line


def quickstart(*overrides: str) -> AsyncGrpoConfig:
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    assert isinstance(config, AsyncGrpoConfig)
    return config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_shipped_is_valid(path: Path, tmp_path: Path) -> None:
    overrides = []
    if path.name in FROM_WEIGHTS:
        with pytest.raises(ConfigError):
            load_config(path)
        model = quickstart().model.hf_config(vocab_size=64, eos_token_id=0, pad_token_id=0)
        (tmp_path / "config.json").write_text(json.dumps(model))
        overrides = [f"model.checkpoint={tmp_path}"]
    assert load_config(path, overrides).recipe in RECIPES


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=1e-4", 1e-4), ("a=5", 5), ("a=null", None), ("a=[1, x]", [1, "x"]), ("a=x=y", "x=y"), ("a=", None)],
)
def test_override_values_are_yaml_with_plain_exponents(text: str, value: object) -> None:
    assert parse_override(text) == (("a",), value)


def test_the_last_override_wins_and_reaches_any_depth() -> None:
    config = quickstart("rl.steps=3", "rl.steps=4", "environment.options.min_word_len=2", "seed=7")
    assert (config.rl.steps, config.seed) == (4, 7)
    assert config.environment.name == "reasoning_gym", "its default"
    assert config.environment.options == {
        "task": "spell_backward",
        "options": {"min_word_len": 2, "max_word_len": 7},
        "held_out_prompts": 256,
    }


def test_a_field_beside_a_preset_overrides_it() -> None:
    model = ModelSection.model_validate({"preset": "glm-4.5-air", "num_hidden_layers": 2})
    assert (model.num_hidden_layers, model.hidden_size) == (2, 4096)


def test_every_field_says_why() -> None:
    silent = [
        f"{recipe}.{'.'.join(map(str, path))}"
        for recipe, model in RECIPES.items()
        for path, field in walk_fields(model)
        if not field.description
    ]
    assert silent == []


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_transformers_reads_back_every_field_of_a_preset(preset: str) -> None:
    """Oracle: transformers' own configuration class of the architecture."""
    from transformers import AutoConfig

    model = ModelSection.model_validate({"preset": preset})
    given = model.hf_config(vocab_size=320, eos_token_id=1, pad_token_id=0)
    understood = AutoConfig.for_model(**given)
    assert understood.model_type == model.architecture
    assert understood.architectures == [type(understood).__name__.replace("Config", "ForCausalLM")]
    assert understood.rope_parameters["rope_theta"] == model.rope_theta
    for key in given.keys() - {"rope_theta", "partial_rotary_factor", "dtype"}:
        assert getattr(understood, key) == given[key], key


def test_an_architecture_has_its_own_usual_values() -> None:
    glm = ModelSection.model_validate({"preset": "nano"})
    qwen = ModelSection.model_validate({"preset": "tiny_qwen3_moe"})
    assert (glm.partial_rotary_factor, glm.rope_theta, glm.num_nextn_predict_layers) == (0.5, 1e4, 0)
    assert (qwen.partial_rotary_factor, qwen.rope_theta, qwen.num_nextn_predict_layers) == (None, 1e6, None)
    assert glm.decoder(vocab_size=64).correction_bias and not qwen.decoder(vocab_size=64).correction_bias


def test_the_store_defaults_to_the_runs_own_directory(tmp_path: Path) -> None:
    config = quickstart(f"runs_dir={tmp_path}", "name=x")
    assert config.store_url == f"file://{tmp_path}/x/store"
    assert quickstart("store=s3://bucket/a").store_url == "s3://bucket/a"


def test_a_run_keeps_its_settings_except_those_safe_to_change(tmp_path: Path) -> None:
    first = quickstart(f"runs_dir={tmp_path}")
    run_dir = claim_run(first)
    assert load_config(run_dir / "config.yaml") == first

    longer = quickstart(f"runs_dir={tmp_path}", f"rl.steps={first.rl.steps + 5}", "rollouts.workers=2")
    claim_run(longer)
    assert load_config(run_dir / "config.yaml") == longer

    other = quickstart(f"runs_dir={tmp_path}", "seed=9", "model.hidden_size=256")
    with pytest.raises(ConfigError) as caught:
        claim_run(other)
    saved = run_dir / "config.yaml"
    assert caught.value.problems[:-1] == [
        f"{saved}: seed: the run was started with 0, now 9",
        f"{saved}: model.hidden_size: the run was started with 128, now 256",
    ]
    assert "--name" in caught.value.problems[-1]
    assert load_config(saved) == longer


def test_differences_between_recipes_are_the_recipe(tmp_path: Path) -> None:
    grpo = quickstart()
    plain = as_plain(grpo)
    sft = {key: plain[key] for key in RECIPES["sft"].model_fields if key in plain}
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(sft | {"recipe": "sft", "sft": plain["warm_start"]}))
    assert differences(grpo, load_config(path)) == [("recipe", "async_grpo", "sft")]


def test_the_layout_of_the_engines_is_part_of_the_run() -> None:
    """It decides which layers are FP8, so a run that has begun keeps it; how long versions stay does not."""
    fields = WeightSection.model_fields
    assert (WeightSection().tensor_parallel, WeightSection().expert_parallel) == (1, False)
    for name in ("tensor_parallel", "data_parallel", "expert_parallel"):
        assert not (fields[name].json_schema_extra or {}).get("resumable")
    assert (fields["retention_s"].json_schema_extra or {}).get("resumable")


def test_the_writer_of_versions_does_as_the_config_says() -> None:
    asked = writer_settings(quickstart("weights.preset=fast", "weights.full_fraction=0.5").weights)
    assert (asked.preset, asked.max_chain_fraction) == ("fast", 0.5)
    assert writer_settings(quickstart().weights).preset == "small"
