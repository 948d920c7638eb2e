"""Values that are allowed: overrides, presets, defaults, and the Hugging Face config they become."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from jaxtrain.config.errors import ConfigError, walk_fields
from jaxtrain.config.fleet import WeightSection
from jaxtrain.config.load import as_yaml, load_config, parse_override
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
    (run_dir / "metrics.jsonl").write_text('{"phase": "rl", "step": 1}\n')

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
    assert (WeightSection().tensor_parallel, WeightSection().expert_parallel) == (1, True)
    for name in ("tensor_parallel", "data_parallel", "expert_parallel"):
        assert not (fields[name].json_schema_extra or {}).get("resumable")
    assert (fields["retention_s"].json_schema_extra or {}).get("resumable")


def test_the_writer_of_versions_does_as_the_config_says() -> None:
    asked = writer_settings(quickstart("weights.preset=fast", "weights.full_fraction=0.5").weights)
    assert (asked.preset, asked.max_chain_fraction) == ("fast", 0.5)
    assert writer_settings(quickstart().weights).preset == "small"


# Section 10.3.2 of YAML 1.2: what each form is, and what only looks like one.
CORE_SCHEMA = {
    "null": None, "Null": None, "~": None, "nULL": "nULL",
    "true": True, "True": True, "FALSE": False, "tRUE": "tRUE", "yes": "yes", "no": "no", "on": "on",
    "Off": "Off", "0": 0, "-19": -19, "+7": 7, "017": 17, "0o7": 7, "0o17": 15, "0x3A": 58, "0b11": "0b11",
    "1_000": "1_000", "12:30:00": "12:30:00", "0o8": "0o8",
    "0.": 0.0, "-0.0": 0.0, ".5": 0.5, "12e03": 12000.0, "-2E+05": -200000.0, "1e-4": 1e-4, "1.5e3": 1500.0,
    ".inf": math.inf, "-.Inf": -math.inf, "1.5.2": "1.5.2", "2026-12-01": "2026-12-01", "=": "=", "e5": "e5",
}  # fmt: skip


@pytest.mark.parametrize("text", CORE_SCHEMA)
def test_scalars_are_those_of_the_core_schema_and_come_back_when_saved(text: str) -> None:
    _, found = parse_override(f"a={text}")
    assert (found, type(found)) == (CORE_SCHEMA[text], type(CORE_SCHEMA[text]))
    for value in (text, found):
        assert parse_override("a=" + as_yaml({"b": value}).removeprefix("b: ").strip())[1] == value


def test_mappings_may_be_merged(tmp_path: Path) -> None:
    text = (ROOT / "configs/sft.yaml").read_text()
    merged = text.replace("checkpoint:\n", "checkpoint:\n  <<: &base {every_steps: 7, keep: 3}\n")
    assert merged != text
    (tmp_path / "merged.yaml").write_text(merged)
    config = load_config(tmp_path / "merged.yaml")
    assert (config.checkpoint.every_steps, config.checkpoint.keep) == (50, 3), "a key beside it wins"


def test_a_start_that_took_no_step_binds_the_name_to_nothing(tmp_path: Path) -> None:
    """What it left is renamed, so that the next start does not mix the two."""
    run_dir = claim_run(quickstart(f"runs_dir={tmp_path}"))
    (run_dir / "store" / "control").mkdir(parents=True)
    (run_dir / "tokenizer").mkdir()
    claim_run(quickstart(f"runs_dir={tmp_path}"))
    assert (run_dir / "store").exists(), "the same settings go on with what is there"
    other = quickstart(f"runs_dir={tmp_path}", "seed=9")
    claim_run(other)
    assert load_config(run_dir / "config.yaml") == other
    left = sorted(path.name.rpartition("-")[0] for path in run_dir.iterdir() if path.is_dir())
    assert left == ["unused-store", "unused-tokenizer"]
    (run_dir / "checkpoints" / "0").mkdir(parents=True)
    with pytest.raises(ConfigError, match="seed: the run was started with 9, now 0"):
        claim_run(quickstart(f"runs_dir={tmp_path}"))


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="runs_dir: .*file/x/quickstart cannot be written"):
        claim_run(quickstart(f"runs_dir={tmp_path}/file/x"))
