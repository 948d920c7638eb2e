"""Tokens and stepped values as people write them: what they mean, and what is said of nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import SftConfig
from jaxtrain.config.tokens import parse_batch, parse_rate, parse_steps, parse_tokens

SFT = Path(__file__).parents[3] / "configs" / "sft.yaml"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("0", 0), ("17", 17), ("1_000", 1000), ("1.5K", 1500), ("16M", 16 * 10**6), (" 250B ", 250 * 10**9)]
    + [("15T", 15 * 10**12), ("0.000001M", 1), ("2.000 M", 2 * 10**6)],
)
def test_tokens(text, tokens):
    assert parse_tokens(text) == tokens


@given(st.integers(0, 10**6), st.sampled_from(["", "K", "M", "B", "T"]))
def test_a_suffix_is_a_power_of_a_thousand(digits, suffix):
    assert parse_tokens(f"{digits}{suffix}") == digits * 1000 ** ["", "K", "M", "B", "T"].index(suffix)


@pytest.mark.parametrize("text", ["", "M", "16X", "16m", "-1", "1e6", "0x10", "1.M", "16MB", "1,000"])
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(ValueError, match="is not a number of tokens"):
        parse_tokens(text)


def test_fractions_of_a_token_are_refused():
    with pytest.raises(ValueError, match=r"'1.2345K' is 1234.5000 tokens, not a whole number"):
        parse_tokens("1.2345K")


def test_steps():
    assert parse_steps("0: 16M, 250B: 32M", parse_batch) == ((0, 16 * 10**6), (250 * 10**9, 32 * 10**6))
    assert parse_steps("0:1e-3,15T:0", parse_rate) == ((0, 1e-3), (15 * 10**12, 0.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16M", "'16M' is not `tokens: value`"),
        ("1: 16M", "starts at 1 tokens; the first value must hold from 0 on"),
        ("0: 1M, 5K: 2M, 5K: 3M", "5000 tokens comes after 5000; starts must ascend"),
        ("0: 0", "a batch of 0 tokens"),
        ("0: 1M, ", "'' is not `tokens: value`"),
        ("0: 1Q", "'1Q' is not a number of tokens"),
    ],
)
def test_wrong_steps(text, message):
    with pytest.raises(ValueError, match=message):
        parse_steps(text, parse_batch)


def test_a_config_reads_them():
    config = load_config(
        SFT,
        [
            "sft.batch={steps: '0: 2048, 100K: 4K'}",
            "sft.learning_rate={kind: linear, peak: 1e-3, warmup_tokens: 20K, total_tokens: 1.5M}",
            "sft.router_bias_rate='0: 0.001, 15T: 0'",
            "sft.stages=[{tokens: 0, rows: 16, sequence_length: 128, rope_theta: 5e3},"
            " {tokens: 300K, rows: 4, sequence_length: 512}]",
        ],
    )
    assert isinstance(config, SftConfig)
    sft = config.sft
    assert sft.batch.sizes == ((0, 2048), (100_000, 4000))
    assert (sft.batch.first_tokens, sft.batch.last_tokens) == (2048, 4000)
    assert (sft.learning_rate.warmup_tokens, sft.learning_rate.total_tokens) == (20_000, 1_500_000)
    assert sft.router_bias_rate == "0: 0.001, 15T: 0"
    assert [stage.tokens for stage in sft.stages] == [0, 300_000]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.batch={start_tokens: 16Q, end_tokens: 1}", "sft.batch.start_tokens: '16Q' is not a number of"),
        ("sft.batch={start_tokens: 0K, end_tokens: 1}", "sft.batch.start_tokens: '0K' is not in [1, inf)"),
        ("sft.batch={end_tokens: 1K}", "sft.batch.start_tokens: missing; the tokens of the first batch, or"),
        ("sft.batch={steps: '0: 1K', end_tokens: 5}", "sft.batch.end_tokens: 5 is not read beside steps"),
        ("sft.batch={steps: '1: 1K'}", "sft.batch.steps: '1: 1K': starts at 1 tokens"),
        ("sft.router_bias_rate=-1", "sft.router_bias_rate: -1 is not in [0, inf)"),
        ("sft.mtp_weight='0: 0.3; 5'", "sft.mtp_weight: '0: 0.3; 5': '0.3; 5' is not a number"),
        ("sft.stages=[{tokens: 5, rows: 1, sequence_length: 8}]", "sft.stages: the first begins at 5 tokens"),
        ("sft.stages=[{tokens: 0, rows: 0, sequence_length: 8}]", "sft.stages.0.rows: 0 is not in [1, inf)"),
        ("sft.stages=[{tokens: 0, row: 1}]", "sft.stages.0.row: unknown key; did you mean 'rows'?"),
        (
            "sft.stages=[{tokens: 0, rows: 1, sequence_length: 1024}]",
            "sft.stages.0.sequence_length: 1024 is more than model.max_position_embeddings 512",
        ),
        (
            "sft.stages=[{tokens: 0, rows: 1, sequence_length: 8, rope_theta: 5e5}]",
            "sft.stages.0.rope_theta: 500000 is not model.rope_theta 10000",
        ),
    ],
)
def test_a_config_that_means_nothing_says_so(override, message):
    with pytest.raises(ConfigError) as raised:
        load_config(SFT, [override])
    assert any(message in problem for problem in raised.value.problems), raised.value.problems
