"""Reasoning-gym environments: splits share nothing, verifier bugs are statuses, wrong names fail early."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from rollout_bridge.rollouts.environments.base import Answer, EnvironmentConfigError
from rollout_bridge.rollouts.environments.reasoning_gym import Options, ReasoningGym
from rollout_bridge.rollouts.environments.registry import EnvironmentSpec
from rollout_bridge.trajectories.schema import Status


def spell(seed=0, **options) -> ReasoningGym:
    return ReasoningGym(Options(task="spell_backward", **options), seed=seed)


def create(name="reasoning_gym", **options):
    return EnvironmentSpec(name=name, options=options, seed=0).create()


def answered(text: str) -> Answer:
    return Answer(text=text, turns=(text,), ended=True, tokens=len(text))


def questions(environment) -> list[str]:
    return [environment.task(index).messages[-1]["content"] for index in range(environment.size)]


def test_no_question_and_no_index_is_in_both_splits() -> None:
    # A third of the words are held out, so nearly every other draw of the training split collides.
    environment = spell(
        options={"min_word_len": 3, "max_word_len": 3}, train_prompts=3000, held_out_prompts=300
    )
    held_out, train = questions(environment.held_out), questions(environment)
    assert len(set(held_out)) == 300 and set(held_out).isdisjoint(train)
    indices = {environment.dataset_index(index) for index in range(environment.size)}
    assert indices.isdisjoint(environment.held_out_indices)
    raw = {environment._dataset[environment._train_start + i]["question"] for i in range(environment.size)}
    assert raw & set(held_out), "without the filter questions would be shared: the test can fail"


def test_the_same_index_is_the_same_task_everywhere() -> None:
    a, b, other = (spell(train_prompts=50, held_out_prompts=20, seed=seed) for seed in (3, 3, 4))
    assert questions(a) == questions(b) != questions(other)
    assert questions(a.held_out) == questions(b.held_out)
    with pytest.raises(IndexError):
        a.task(50)
    with pytest.raises(IndexError):
        a.held_out.task(20)


def test_spell_backward_pays_for_each_matching_position() -> None:
    environment = spell(train_prompts=20, held_out_prompts=2)
    question, answer = environment.worked_answer(4)
    task = environment.task(4)
    assert task.messages[-1]["content"] == question and question.endswith(answer[::-1])
    assert environment.score(task, answered(f" {answer}\n")).components == {"correct": 1.0, "exact": 1.0}
    almost = environment.score(task, answered(answer[:-1]))
    assert almost.total == pytest.approx(1 - 1 / len(answer)) and almost.components["exact"] == 0.0
    strict = spell(train_prompts=20, held_out_prompts=2, reward="exact")
    assert (
        strict.score(task, answered(answer[:-1])).total == 0.0
        and strict.score(task, answered(answer)).total == 1.0
    )


def test_exact_is_the_answer_and_nothing_else_and_it_ended() -> None:
    """Seven sevenths add up to a hair below 1, which the dataset gives for an answer with junk after it."""
    environment = spell(train_prompts=9, held_out_prompts=2, options={"min_word_len": 7, "max_word_len": 7})
    task, (_, answer) = environment.task(0), environment.worked_answer(0)
    for text in (answer + "JUNKJUNK", answer + "x", answer + "<|pad|>", answer[0] + "<|pad|>" + answer[1:]):
        assert environment.score(task, answered(text)).components["exact"] == 0.0
    cut = replace(answered(answer), ended=False)
    assert environment.score(task, cut).components == {"correct": 1.0, "exact": 0.0}
    assert environment.score(task, answered(answer)).components["exact"] == 1.0


def test_tagged_answers() -> None:
    environment = spell(train_prompts=9, held_out_prompts=2, answer_tag="answer", system_prompt="Think.")
    task, (_, answer) = environment.task(0), environment.worked_answer(0)
    word = answer.removeprefix("<answer>").removesuffix("</answer>")
    assert task.messages[0] == {"role": "system", "content": "Think."}
    assert environment.score(task, answered(f"<answer>no</answer> or <answer> {word} </answer>")).total == 1.0
    assert environment.score(task, answered(word)).status is Status.MALFORMED


@pytest.mark.parametrize("returned", [float("nan"), 1.5, -1.0, None, "raise"])
def test_a_broken_verifier_is_an_environment_failure(monkeypatch, returned) -> None:
    environment = spell(train_prompts=9, held_out_prompts=2)

    def verifier(*_):
        if returned == "raise":
            raise ZeroDivisionError("oops")
        return returned

    monkeypatch.setattr(environment._dataset, "score_answer", verifier)
    if returned in ("raise", None):  # a scoring process says what was raised
        with pytest.raises((ZeroDivisionError, TypeError)):
            environment.score(environment.task(0), answered("x"))
        return
    score = environment.score(environment.task(0), answered("x"))
    assert score.status is Status.ENVIRONMENT_FAILURE and score.total == 0.0 and score.detail


def short_and_right(task, answer: Answer) -> dict[str, float]:
    right = answer.text == task.data["entry"]["answer"]
    return {"right": float(right), "short": -0.01 * answer.tokens}


def test_a_reward_function_by_reference() -> None:
    reward = f"{__name__}:short_and_right"
    environment = create(train_prompts=9, held_out_prompts=2, reward=reward)
    task, (_, answer) = environment.task(0), environment.worked_answer(0)
    score = environment.score(task, answered(answer))
    assert score.total == pytest.approx(1 - 0.01 * len(answer))
    assert set(score.components) == {"correct", "exact", "right", "short"}


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "basic_arithmetic"])
def test_any_dataset_by_name(dataset) -> None:
    environment = create(task=dataset, train_prompts=30, held_out_prompts=5)
    question, answer = environment.worked_answer(7)
    assert environment.score(environment.task(7), answered(answer)).total == 1.0
    assert set(questions(environment)).isdisjoint(questions(environment.held_out))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "nothing"}, "environment.name: environment 'nothing' is unknown. Known: reasoning_gym"),
        ({"task": "spell_bakward"}, "environment.task: 'spell_bakward' is none of the .*spell_backward"),
        ({"colour": 1}, "environment.colour: unknown key; allowed here: task"),
        ({"options": {"colour": 1}}, "environment.options: spell_backward refuses .*colour"),
        (
            {"options": {"seed": 1}},
            "environment.options.seed: does not go here; it comes from the config's seed",
        ),
        ({"options": {"min_word_len": 9, "max_word_len": 3}}, "environment.options: spell_backward refuses"),
        ({"options": 3}, "environment.options: 3 is not a mapping"),
        ({"reward": "best"}, "environment.reward: 'best' is not one of correct, exact"),
        ({"reward": "no_such:thing"}, "environment: reward 'no_such:thing': cannot import no_such"),
        ({"train_prompts": 0}, r"environment.train_prompts: 0 is not in \[1, inf\)"),
    ],
)
def test_wrong_configuration_names_what_is_wrong(options, message) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        create(**options)


class NoEpisode:
    """Has all but the loop of an episode."""

    def __init__(self, options, *, seed):
        raise AssertionError("it is built, though no episode can run")

    def task(self, index):
        raise NotImplementedError

    def score(self, task, answer):
        raise NotImplementedError


class Whole(NoEpisode):
    async def episode(self, task, policy, limits):
        raise NotImplementedError


class NoDataclass(Whole):
    class Options:
        size: int = 3


class NoSeed(Whole):
    def __init__(self, options):
        raise AssertionError("it is built without its seed")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("NoEpisode", "^environment.name: '{name}' has no episode, which an environment needs$"),
        (
            "NoDataclass",
            "^environment.name: '{name}': environment: .*Options'> declares options, but it is not",
        ),
        ("NoSeed", r"^environment: .*__init__\(\) got an unexpected keyword argument 'seed'$"),
    ],
)
def test_a_class_that_is_no_environment_is_refused_by_its_field(kind, message) -> None:
    """With the error that ends a command in one line, not with that of the call that failed."""
    name = f"{__name__}:{kind}"
    with pytest.raises(EnvironmentConfigError, match=message.format(name=re.escape(name))):
        create(name)


def test_too_few_distinct_questions_is_an_error() -> None:
    environment = spell(
        options={"min_word_len": 3, "max_word_len": 3}, held_out_prompts=5000, train_prompts=10
    )
    with pytest.raises(EnvironmentConfigError, match="held_out_prompts: 5000"):
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
