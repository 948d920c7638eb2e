"""The supervised phase: a run that stops in a ramp and a stage goes on as if it had not, and nothing compiles
again while the batch grows.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config
from jaxtrain.config.resume import claim_run
from jaxtrain.config.schema import SftConfig
from jaxtrain.recipes import sft
from jaxtrain.training.checkpoint import Checkpointer
from jaxtrain.training.metrics import read_metrics
from jaxtrain.training.progress import Progress
from jaxtrain.training.saved import open_model

pytestmark = pytest.mark.usefixtures("one_device")
ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "sft.yaml"
SMALL_MODEL = (
    "model={preset: nano, compute_dtype: float32, hidden_size: 32, num_hidden_layers: 2, head_dim: 16,"
    " intermediate_size: 32, moe_intermediate_size: 16, n_routed_experts: 4, rope_theta: 40000}"
)
OVERRIDES = [
    SMALL_MODEL,
    "environment.held_out_prompts=8",
    # Four microbatches of 8 x 32 tokens from the third step or so on, then rows twice as long.
    "sft.batch={start_tokens: 256, end_tokens: 1K, ramp_tokens: 1K}",
    "sft.stages=[{tokens: 0, rows: 8, sequence_length: 32, rope_theta: 10000},"
    " {tokens: 2K, rows: 8, sequence_length: 64}]",
    "sft.learning_rate={kind: linear, peak: 1e-2, warmup_tokens: 300, total_tokens: 1M}",
    "sft.router_bias_rate='0: 0.01, 1K: 0.002'",
    "checkpoint.every_steps=3",
]
STEPS = 7


def run(directory: Path, steps: int) -> Path:
    config = load_config(CONFIG, [*OVERRIDES, f"runs_dir={directory}", f"sft.steps={steps}"])
    assert isinstance(config, SftConfig)
    sft.run(config, claim_run(config))
    return config.run_dir


def arrays(run_dir: Path) -> dict[str, np.ndarray]:
    """The last checkpoint's leaves."""
    checkpoints = Checkpointer(run_dir / "checkpoints", keep=9, save_interval_steps=1)
    step = checkpoints.latest()
    assert step == STEPS
    stored = checkpoints._manager.restore(step)["arrays"]
    checkpoints.close()
    return {path: np.asarray(value) for path, value in stored.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("whole"), STEPS)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """Stopped after two steps, in the ramp and before the first periodic checkpoint."""
    directory = tmp_path_factory.mktemp("resumed")
    for steps in (2, STEPS):
        run_dir = run(directory, steps)
    return run_dir


def test_a_resume_in_the_ramp_and_across_a_stage_is_exact(whole, resumed):
    expected, found = arrays(whole), arrays(resumed)
    assert expected.keys() == found.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    kept = ("step", "loss", "tokens", "microbatches", "learning_rate", "router_bias_rate", "sequence_length")
    rows = [[{key: row[key] for key in kept} for row in read_metrics(path)] for path in (whole, resumed)]
    assert rows[0] == rows[1]


def test_nothing_compiles_again_while_the_batch_grows(whole):
    rows = read_metrics(whole)
    microbatches = [row["microbatches"] for row in rows]
    assert microbatches[0] == 1 and max(microbatches) == 4 and len(set(microbatches)) >= 3
    assert [row["recompilations"] for row in rows] == [0] * STEPS


def test_values_and_shapes_are_those_of_the_tokens_before_each_step(whole):
    seen = 0
    for row in read_metrics(whole):
        ramped = 256 + 768 * min(seen / 1000, 1)
        length = 32 if seen < 2000 else 64
        assert row["sequence_length"] == length
        assert row["microbatches"] == int(ramped / (8 * length) + 0.5)
        assert row["router_bias_rate"] == (0.01 if seen < 1000 else 0.002)
        assert row["tokens"] <= row["microbatches"] * 8 * length
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_seconds"])
        assert "mfu" not in row  # a CPU has no published peak
        assert 0 < row["goodput"] <= 1
        assert (row["checkpoint_seconds"] > 0) == (seen > 0)  # of the save after the step before
        assert row["after_step_seconds"] >= 0
        seen += row["tokens"]
        assert row["tokens_seen"] == seen
    assert seen > 2000


def test_weights_come_with_the_base_that_they_were_trained_with(whole, tmp_path):
    """The model's base, 40000, is that of the second stage; two steps end in the first, which has 10000."""
    for run_dir, base in ((run(tmp_path, 2), 10_000), (whole, 40_000)):
        config = open_model(run_dir).hf_config
        assert (config["rope_theta"], config["rope_parameters"]["rope_theta"]) == (base, base)


def test_a_phase_without_stages_does_not_go_on_with_another_base():
    definition = SimpleNamespace(config=SimpleNamespace(rope_theta=40_000.0))
    opened: Any = SimpleNamespace(trainable=SimpleNamespace(definition=definition))
    sft.check_base(opened, Progress())
    sft.check_base(opened, Progress(rope_theta=40_000.0))
    with pytest.raises(
        ConfigError, match="model.rope_theta: 40000, but the steps so far ended .* base 10000;"
    ):
        sft.check_base(opened, Progress(rope_theta=10_000.0))
