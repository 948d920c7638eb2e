"""Where a run is: counted by phase, and the same again from JSON."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.optimization import BatchSection, SupervisedSection
from jaxtrain.data.batch import Column
from jaxtrain.losses.next_token import NextToken
from jaxtrain.losses.policies.double_sided import DoubleSided
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.training.loop import run_phase
from jaxtrain.training.phase import Phase, stages
from jaxtrain.training.progress import PhaseProgress, Progress
from tests.jaxtrain.models.tiny import HF_CONFIG

NEXT_TOKEN = NextToken()
STEPS = st.lists(
    st.tuples(st.sampled_from(["warm_start", "rl"]), st.integers(0, 10**15), st.booleans()), max_size=12
)


@given(STEPS)
def test_steps_are_counted_by_phase_and_come_back_from_json(steps) -> None:
    progress = Progress()
    for index, (phase, tokens, finite) in enumerate(steps):
        source = {"position": index, "nested": {"é": [index]}}
        progress = progress.stepped(phase, tokens=tokens, source=source, finite=finite)
        assert progress.of(phase).source == source
    assert progress.step == len(steps)
    in_a_row = list(itertools.takewhile(lambda step: not step[2], reversed(steps)))
    assert progress.nonfinite == len(in_a_row)
    assert progress.tokens_seen == sum(tokens for _, tokens, _ in steps)
    for name in ("warm_start", "rl"):
        of_phase = [tokens for phase, tokens, _ in steps if phase == name]
        assert (progress.of(name).steps, progress.of(name).tokens) == (len(of_phase), sum(of_phase))
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


def test_a_phase_that_has_not_begun_is_at_its_start() -> None:
    assert Progress().of("rl") == PhaseProgress(steps=0, tokens=0, source={})


def phase(steps: int, loss: Any = NEXT_TOKEN, filled: frozenset[str] = frozenset()) -> Phase:
    def batches(spec):
        raise AssertionError("the data is not opened")

    section = SupervisedSection.model_validate(
        {"steps": steps, "learning_rate": {"peak": 1e-3}, "batch": {"start_tokens": 8, "end_tokens": 8}}
    )
    definition = define(ModelConfig.from_hf(HF_CONFIG, compute_dtype="float32"))
    return Phase(
        name="warm_start",
        section=section,
        loss=loss,
        batches=batches,
        columns=loss.columns,
        filled=filled,
        stages=stages((), BatchSection(rows=1, sequence_length=8), definition),
        before=("rl",),
    )


# Neither run nor state is looked at before the checks.
NOTHING: Any = None


def test_a_phase_cannot_go_on_after_a_later_one_began() -> None:
    done = {"warm_start": PhaseProgress(steps=5), "rl": PhaseProgress(steps=1)}
    progress = Progress(step=6, phases=done)
    with pytest.raises(ConfigError, match="warm_start.steps: 7 is more than the 5 done before rl began"):
        run_phase(NOTHING, NOTHING, progress, phase(steps=7))


@pytest.mark.parametrize("steps", [3, 5])
def test_a_phase_that_is_done_changes_nothing(steps) -> None:
    done = {"warm_start": PhaseProgress(steps=5), "rl": PhaseProgress(steps=1)}
    progress = Progress(step=6, phases=done)
    state: Any = object()
    assert run_phase(NOTHING, state, progress, phase(steps=steps)) == (state, progress)


def test_a_loss_whose_columns_the_data_does_not_fill_is_refused_by_its_field() -> None:
    with pytest.raises(ConfigError) as caught:
        phase(1, DoubleSided(), frozenset({"advantages"}))
    assert caught.value.problems == [
        "warm_start.loss: reads behavior_logprobs, temperature, which this phase's data does not have "
        "(it has advantages); name another loss"
    ]
    phase(1, DoubleSided(), frozenset({"advantages", "behavior_logprobs", "temperature", "unread"}))


def test_columns_beside_those_of_the_loss_must_be_filled_too() -> None:
    """Such as the experts that a router replays, which a phase adds."""
    whole = phase(1)
    with pytest.raises(ConfigError, match=r"reads routed_experts, .*it has no further columns"):
        Phase(
            **(vars(whole) | {"columns": (Column("routed_experts", "int16", -1, of="input", shape=(2, 2)),)})
        )
