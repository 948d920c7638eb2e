"""Reasoning-gym environments: splits share nothing, verifier bugs are statuses, wrong names fail early."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollout_bridge.rollouts.environments import registry
from rollout_bridge.rollouts.environments.base import EnvironmentConfigError
from rollout_bridge.rollouts.environments.reasoning_gym import ReasoningGym
from rollout_bridge.trajectories.schema import Status


def spell(**options) -> ReasoningGym:
    return ReasoningGym(dataset="spell_backward", **options)


def questions(environment) -> list[str]:
    return [environment.task(index).messages[-1]["content"] for index in range(environment.size)]


def test_no_question_and_no_index_is_in_both_splits() -> None:
    # A third of the words are held out, so nearly every other draw of the training split collides.
    environment = spell(options={"min_word_len": 3, "max_word_len": 3}, train_size=3000, held_out_size=300)
    held_out, train = questions(environment.held_out), questions(environment)
    assert len(set(held_out)) == 300 and set(held_out).isdisjoint(train)
    indices = {environment.dataset_index(index) for index in range(environment.size)}
    assert indices.isdisjoint(environment.held_out_indices)
    raw = {environment._dataset[environment._train_start + i]["question"] for i in range(environment.size)}
    assert raw & set(held_out), "without the filter questions would be shared: the test can fail"


def test_the_same_index_is_the_same_task_everywhere() -> None:
    a, b, other = (spell(train_size=50, held_out_size=20, seed=seed) for seed in (3, 3, 4))
    assert questions(a) == questions(b) != questions(other)
    assert questions(a.held_out) == questions(b.held_out)
    with pytest.raises(IndexError):
        a.task(50)
    with pytest.raises(IndexError):
        a.held_out.task(20)


def test_spell_backward_pays_for_each_matching_position() -> None:
    environment = spell(train_size=20, held_out_size=2)
    question, answer = environment.worked_answer(4)
    task = environment.task(4)
    assert task.messages[-1]["content"] == question and question.endswith(answer[::-1])
    assert environment.score(task, f" {answer}\n").components == {"correct": 1.0, "exact": 1.0}
    almost = environment.score(task, answer[:-1])
    assert almost.total == pytest.approx(1 - 1 / len(answer)) and almost.components["exact"] == 0.0
    strict = spell(train_size=20, held_out_size=2, reward="exact")
    assert strict.score(task, answer[:-1]).total == 0.0 and strict.score(task, answer).total == 1.0


def test_tagged_answers() -> None:
    environment = spell(train_size=9, held_out_size=2, answer_tag="answer", system_prompt="Think.")
    task, (_, answer) = environment.task(0), environment.worked_answer(0)
    word = answer.removeprefix("<answer>").removesuffix("</answer>")
    assert task.messages[0] == {"role": "system", "content": "Think."}
    assert environment.score(task, f"<answer>no</answer> or <answer> {word} </answer>").total == 1.0
    assert environment.score(task, word).status is Status.MALFORMED


@pytest.mark.parametrize("returned", [float("nan"), 1.5, -1.0, None, "raise"])
def test_a_broken_verifier_is_an_environment_failure(monkeypatch, returned) -> None:
    environment = spell(train_size=9, held_out_size=2)

    def verifier(*_):
        if returned == "raise":
            raise ZeroDivisionError("oops")
        return returned

    monkeypatch.setattr(environment._dataset, "score_answer", verifier)
    score = environment.score(environment.task(0), "x")
    assert score.status is Status.ENVIRONMENT_FAILURE and score.total == 0.0 and score.detail


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "basic_arithmetic"])
def test_any_dataset_by_name(dataset) -> None:
    environment = registry.create("reasoning_gym", {"dataset": dataset, "train_size": 30, "held_out_size": 5})
    question, answer = environment.worked_answer(7)
    assert environment.score(environment.task(7), answer).total == 1.0
    assert set(questions(environment)).isdisjoint(questions(environment.held_out))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "known ones: reasoning_gym"),
        ("reasoning_gym", {"dataset": "no_such"}, "spell_backward"),
        ("reasoning_gym", {"dataset": "spell_backward", "colour": 1}, "colour"),
        ("reasoning_gym", {"dataset": "spell_backward", "options": {"seed": 1}}, "seed"),
        (
            "reasoning_gym",
            {"dataset": "spell_backward", "options": {"min_word_len": 9, "max_word_len": 3}},
            "refuses",
        ),
        ("reasoning_gym", {"dataset": "spell_backward", "reward": "best"}, "correct, exact"),
    ],
)
def test_wrong_configuration_names_what_is_wrong(name, options, message) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        registry.create(name, options)


def test_too_few_distinct_questions_is_an_error() -> None:
    environment = spell(options={"min_word_len": 3, "max_word_len": 3}, held_out_size=5000, train_size=10)
    with pytest.raises(EnvironmentConfigError, match="held_out_size 5000"):
        _ = environment.held_out


def test_rollout_modules_import_neither_jax_nor_reasoning_gym() -> None:
    modules = (
        "rollouts.worker",
        "rollouts.environments.reasoning_gym",
        "trajectories.planner",
        "trajectories.accounting",
    )
    program = f"import {', '.join('rollout_bridge.' + m for m in modules)}, sys; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert not {f"'{name}'" for name in ("jax", "grain", "torch", "reasoning_gym")} & set(
        loaded.strip("[]\n").split(", ")
    )
