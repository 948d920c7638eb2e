"""lines.py, a recipe with two sections and a data source of its own, works from config alone, and resumes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config
from jaxtrain.config.references import build
from jaxtrain.config.resume import claim_run
from jaxtrain.data import tokenizer
from jaxtrain.data.sources.base import SourceTools
from jaxtrain.training.metrics import read_metrics
from tests.extending.examples import EXAMPLES, ROOT

CONFIG = EXAMPLES / "lines.yaml"
SMALL = [
    "model={preset: tiny_llama, compute_dtype: float32, num_hidden_layers: 1, hidden_size: 32, head_dim: 16,"
    " intermediate_size: 32}",
    "batch={rows: 8, sequence_length: 32}",
    "plenty.batch={start_tokens: 256, end_tokens: 256}",
    "better.batch={start_tokens: 256, end_tokens: 256}",
]


@pytest.fixture
def texts(tmp_path, monkeypatch) -> list[str]:
    """Files of 40 lines, and of 10 of another kind, in the directory that the command is typed in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plenty.txt").write_text("".join(f"the number {i}\n\n" for i in range(40)))
    (tmp_path / "better.txt").write_text("".join(f"{i} and {i + 1}\n" for i in range(10)))
    names = ("plenty", "better")
    return [f"{name}.source={{name: 'lines:Lines', path: {name}.txt, longest: 16}}" for name in names]


def run(directory: Path, *overrides: str) -> Path:
    """As `jaxtrain train` does."""
    config = load_config(CONFIG, [*SMALL, f"runs_dir={directory}", *overrides])
    module, _, function = config.program.partition(":")
    getattr(import_module(module), function)(config, claim_run(config))
    return config.run_dir


def test_both_phases_are_trained_and_a_resumed_run_takes_the_same_step(texts, tmp_path, one_device):
    """From a checkpoint in the second phase; the numbers of the step are those of the whole run."""
    steps = ("plenty.steps=2", "better.steps=2", "checkpoint={every_steps: 1, keep: 9}")
    whole = run(tmp_path / "whole", *texts, *steps)
    rows = read_metrics(whole)
    assert [row["phase"] for row in rows] == ["plenty", "plenty", "better", "better"]
    resumed = tmp_path / "resumed" / whole.name
    shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns("metrics.jsonl"))
    shutil.rmtree(resumed / "checkpoints" / "4")
    run(resumed.parent, *texts, *steps)
    [row] = read_metrics(resumed)
    for key in ("phase", "step", "loss", "gradient_norm", "learning_rate", "tokens", "tokens_seen"):
        assert row[key] == rows[3][key], key
    with pytest.raises(ConfigError, match=r"plenty.steps: 3 is more than the 2 done before better began"):
        run(resumed.parent, *texts, *steps, "plenty.steps=3")


def test_the_tokenizer_knows_the_words_of_the_text_and_a_document_is_a_line(texts, tmp_path):
    """A word of at least half of the lines is one token; the rest is spelled in bytes."""
    source = build("source", load_config(CONFIG, texts).phases["plenty"].source, where="plenty.source")
    assert source.texts() == [f"the number {i}" for i in range(40)]
    known = AutoTokenizer.from_pretrained(tokenizer.build(source.texts(), tmp_path / "tokenizer"))
    documents = source.open(SourceTools(known, 0, pytest.fail))  # no environment is opened
    assert len(documents) == 40
    assert known.convert_ids_to_tokens(documents[12].tokens)[:2] == ["the", "Ġnumber"]
    assert known.decode(documents[12].tokens) == f"the number 12{known.eos_token}"
    assert documents[12].loss_weights.tolist() == [1.0] * len(documents[12].tokens)
    short = replace(source, longest=3).open(SourceTools(known, 0, pytest.fail))
    assert {len(document.tokens) for document in short} == {3}


def test_stages_of_its_sections_are_checked(monkeypatch):
    """As those of the built-in recipes: too long a sequence, or rows that the devices do not divide."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(
        ConfigError, match=r"better.stages.0.sequence_length: 1024 is more than model.max_pos"
    ):
        load_config(CONFIG, ["better.stages=[{tokens: 0, rows: 8, sequence_length: 1024}]"])
    with pytest.raises(ConfigError, match=r"better.stages.0.rows: 3 "):
        load_config(CONFIG, ["better.stages=[{tokens: 0, rows: 3, sequence_length: 64}]", "mesh.ici.fsdp=2"])
