"""What a phase trains with at the token before each boundary, at it and after it."""

from __future__ import annotations

import pytest

from jaxtrain.config.optimization import BatchSection, SupervisedSection
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.training.phase import batch_ramp, scheduled_values, stage_at, stages
from tests.jaxtrain.models.tiny import HF_CONFIG

TRILLION, BILLION, MILLION = 10**12, 10**9, 10**6
BATCH = BatchSection(rows=8, sequence_length=64)


def phase(**fields) -> SupervisedSection:
    return SupervisedSection.model_validate(
        {
            "steps": 1,
            "learning_rate": {"peak": 2.5e-4, "warmup_tokens": "1B"},
            "batch": {"steps": "0: 16M, 250B: 32M"},
            **fields,
        }
    )


def test_values_change_at_their_boundary():
    """GLM-4.5 (arXiv 2508.06471): bias rate 0.001 then 0, MTP weight 0.3 then 0.1, both at 15T tokens."""
    at = scheduled_values(
        phase(router_bias_rate="0: 0.001, 15T: 0", mtp_weight="0: 0.3, 15T: 0.1", aux_loss_weight=1e-4)
    )
    found = [at(15 * TRILLION + offset) for offset in (-1, 0, 1)]
    assert [values.router_bias_rate for values in found] == [0.001, 0.0, 0.0]
    assert [values.mtp_weight for values in found] == [0.3, 0.1, 0.1]
    assert [values.balance_weight for values in found] == [1e-4] * 3
    assert [at(BILLION + offset).learning_rate for offset in (-1, 0, 1)] == [
        2.5e-4 * ((BILLION - 1) / BILLION),
        2.5e-4,
        2.5e-4,
    ]


def test_one_number_holds_always():
    at = scheduled_values(phase(mtp_weight=0.2, router_bias_rate=0))
    assert [(at(tokens).mtp_weight, at(tokens).router_bias_rate) for tokens in (0, 30 * TRILLION)] == [
        (0.2, 0.0)
    ] * 2


def test_the_batch_steps_at_its_boundary():
    ramp = batch_ramp(phase().batch, microbatch_tokens=MILLION)
    boundary = 250 * BILLION
    assert [ramp.microbatches(t) for t in (0, boundary - 1, boundary, boundary + 1)] == [16, 16, 32, 32]
    # Rounded to whole microbatches, halves up, at least one, as the line is.
    assert batch_ramp(phase().batch, microbatch_tokens=3 * MILLION).microbatches(0) == 5
    assert batch_ramp(phase().batch, microbatch_tokens=TRILLION).microbatches(0) == 1


def test_the_line_is_the_published_one():
    section = phase(batch={"start_tokens": "16M", "end_tokens": "64M", "ramp_tokens": "500B"}).batch
    ramp = batch_ramp(section, microbatch_tokens=MILLION)
    assert [ramp.microbatches(t * BILLION) for t in (0, 125, 250, 500)] == [16, 28, 40, 64]


@pytest.fixture(scope="module")
def definition():
    return define(ModelConfig.from_hf(HF_CONFIG, compute_dtype="float32"))


def test_a_stage_changes_shape_and_base_at_its_boundary(definition):
    """GLM-4.5's mid-training: 4K to 32K tokens, base 10,000 to 1,000,000; here smaller."""
    found = stages(
        phase(
            stages=[
                {"tokens": 0, "rows": 8, "sequence_length": 32, "rope_theta": 1e4},
                {"tokens": "15T", "rows": 2, "sequence_length": 128, "rope_theta": 1e6},
            ]
        ).stages,
        BATCH,
        definition,
    )
    before, at, after = (stage_at(found, 15 * TRILLION + offset) for offset in (-1, 0, 1))
    assert stage_at(found, 0) is before is found[0]
    assert at is after is found[1]
    assert (before.rows, before.sequence_length, before.microbatch_tokens) == (8, 32, 256)
    assert (at.rows, at.sequence_length, at.microbatch_tokens) == (2, 128, 256)
    assert [stage.definition.config.rope_theta for stage in found] == [1e4, 1e6]
    # The same parameters: only the angles of the rotation differ.
    assert found[0].definition.shapes == found[1].definition.shapes


def test_without_stages_the_batch_section_holds(definition):
    (stage,) = stages(phase().stages, BATCH, definition)
    assert (stage.rows, stage.sequence_length) == (8, 64)
    assert stage.definition is definition
