"""A run starts from given weights, with their architecture, vocabulary and tokenizer, and can be exported."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from jaxtrain.cli import app
from jaxtrain.commands.export import export
from jaxtrain.commands.import_ import import_
from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import ConfigReader, load_config
from jaxtrain.config.resume import claim_run
from jaxtrain.config.schema import SftConfig
from jaxtrain.data import tokenizer as task_tokenizer
from jaxtrain.recipes import sft
from jaxtrain.training.checkpoint_reader import CheckpointReader
from tests.jaxtrain.huggingface.directories import LLAMA, random_tensors, read, same_bytes, write

pytestmark = pytest.mark.usefixtures("one_device")
CONFIG = Path(__file__).parents[3] / "configs" / "sft.yaml"
VOCABULARY = 330  # no multiple of 64: given weights keep their size
MODEL = LLAMA | {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture(scope="module", autouse=True)
def quiet_commands():
    """The commands log to a stream that ends with them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (export, import_):
            patch.setattr(sys.modules[module.__module__], "log_to_stderr", lambda: None)
        yield


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published") / "model"
    write(directory, MODEL, random_tensors(MODEL, torch.bfloat16))
    task_tokenizer.build(["Spell this word backward: abc"], directory)
    return directory


def config_of(weights: Path, runs: Path, name: str, steps: int) -> SftConfig:
    config = load_config(
        CONFIG,
        [
            f"model={{checkpoint: {weights}, compute_dtype: float32}}",
            *(f"runs_dir={runs}", f"name={name}", f"sft.steps={steps}", "environment.held_out_prompts=8"),
            "sft.learning_rate={kind: constant, peak: 1e-2}",
            "batch={rows: 2, sequence_length: 128}",
            "sft.batch={start_tokens: 256, end_tokens: 256, ramp_tokens: 1}",
        ],
    )
    assert isinstance(config, SftConfig)
    return config


def command(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_imported_trained_and_exported(published: Path, tmp_path: Path) -> None:
    """Without a step in between, the run's export is the published model; one step moves every weight."""
    assert "ok (llama, 20 tensors" in command("import", "--check", published, tmp_path / "imported")
    command("import", published, tmp_path / "imported")
    for name, steps in (("still", 0), ("moved", 1)):
        config = config_of(tmp_path / "imported", tmp_path, name, steps)
        assert (config.model.architecture, config.model.hidden_size) == ("llama", 64)
        sft.run(config, claim_run(config))
        command("export", tmp_path / name, tmp_path / f"{name}-exported")
    expected, still, moved = (
        read(d) for d in (published, tmp_path / "still-exported", tmp_path / "moved-exported")
    )
    assert same_bytes(expected, still)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "still-exported" / file).read_bytes() == (published / file).read_bytes()
    exported = json.loads((tmp_path / "still-exported" / "config.json").read_text())
    assert exported["vocab_size"] == VOCABULARY and exported["architectures"] == ["LlamaForCausalLM"]
    arrays = CheckpointReader(tmp_path / "moved" / "checkpoints")
    assert arrays.step == 1
    assert moved.keys() == expected.keys()
    assert not any(torch.equal(moved[name], expected[name]) for name in expected if "norm" not in name)


def test_hugging_face_weights_without_an_import(published: Path, tmp_path: Path) -> None:
    config = config_of(published, tmp_path, "direct", 0)
    sft.run(config, claim_run(config))
    command("export", tmp_path / "direct", tmp_path / "exported")
    assert same_bytes(read(published), read(tmp_path / "exported"))
    with pytest.raises(ConfigError, match="the run was started with"):  # a resume keeps to its weights
        claim_run(config_of(published, tmp_path, "direct", 0).model_copy(update={"seed": 1}))


def test_a_field_that_the_weights_contradict(published: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.hidden_size: 65 is not the 64 of .*/config\.json"):
        load_config(CONFIG, [f"model={{checkpoint: {published}, hidden_size: 65}}"])
    with pytest.raises(ConfigError, match=r"model\.preset: 'nano' as well as model\.checkpoint"):
        load_config(CONFIG, [f"model={{checkpoint: {published}, preset: nano}}"])
    with pytest.raises(ConfigError, match=r"model\.checkpoint: .* is no directory"):
        load_config(CONFIG, [f"model={{checkpoint: {tmp_path}/nothing}}"])
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match=r"model\.checkpoint: .*hidden_act.*gelu"):
        load_config(CONFIG, [f"model={{checkpoint: {tmp_path}}}"])


def test_a_run_that_has_begun_and_a_rollout_host_need_the_weights_no_more(
    published: Path, tmp_path: Path
) -> None:
    """A resume takes architecture, vocabulary, tokenizer and stop ids from the run itself."""
    weights = tmp_path / "weights"
    shutil.copytree(published, weights)
    (weights / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "bos_token_id": 1}))
    config = config_of(weights, tmp_path, "resumed", 0)
    run_dir = claim_run(config)
    sft.run(config, run_dir)
    before = json.loads((run_dir / "config.json").read_text())
    assert (before["eos_token_id"], before["bos_token_id"]) == ([2, 7], 1)
    shutil.rmtree(weights)
    config = config_of(weights, tmp_path, "resumed", 1)
    sft.run(config, claim_run(config))
    assert json.loads((run_dir / "config.json").read_text()) == before
    with pytest.raises(ConfigError, match=r"model\.checkpoint: .* is no directory"):
        config_of(weights, tmp_path, "another", 1)
    rollout = load_config(
        CONFIG.with_name("quickstart.yaml"),
        [f"model={{checkpoint: {weights}, compute_dtype: float32}}", f"tokenizer.path={weights}"],
        reader=ConfigReader.FLEET,
    )
    assert rollout.model.compute_dtype == "float32"
