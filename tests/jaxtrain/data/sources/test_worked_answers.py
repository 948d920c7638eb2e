"""Worked answers: loss on the answer only, and never a question that is held out."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from jaxtrain.config.errors import ConfigError
from jaxtrain.data.sources.base import BatchShape, BatchSpec, SourceTools
from jaxtrain.data.sources.documents import packed
from jaxtrain.data.sources.worked_answers import WorkedAnswers, WorkedDocuments
from jaxtrain.data.tokenizer import build, prompts_of
from rollout_bridge.rollouts.environments.reasoning_gym import Options, ReasoningGym


def spelling(**options) -> ReasoningGym:
    usual = {"task": "spell_backward", "train_prompts": 200, "held_out_prompts": 20}
    return ReasoningGym(Options(**usual | options), seed=0)


@pytest.fixture(scope="module")
def environment() -> ReasoningGym:
    return spelling()


@pytest.fixture(scope="module")
def tokenizer(environment, tmp_path_factory):
    directory = build(prompts_of(environment), tmp_path_factory.mktemp("tokenizer"))
    return AutoTokenizer.from_pretrained(directory)


def word(task) -> str:
    return task.data["entry"]["metadata"]["word"]


def test_loss_is_on_the_answer_only(environment, tokenizer):
    document = WorkedDocuments(environment, tokenizer)[3]
    assert document is not None and not document.columns
    question, answer = environment.worked_answer(3)
    learnt = document.tokens[document.loss_weights > 0]
    assert tokenizer.decode(learnt) == answer + tokenizer.eos_token
    assert tokenizer.decode(document.tokens[document.loss_weights == 0]) == f"<|user|>{question}<|assistant|>"


def first_carried(state) -> int:
    """Every document before this position was handed out."""
    return min([state["position"], *(position for position, _, _ in state["carried"])])


def test_held_out_questions_are_never_worked(environment, tokenizer):
    """Held out here: tasks 0 to 39 of the split itself; no batch of an epoch contains their words."""
    held_out = frozenset(
        tuple(message["content"] for message in environment.task(index).messages) for index in range(40)
    )
    documents = WorkedDocuments(environment, tokenizer, held_out=held_out)
    spec = BatchSpec(shape_at=lambda tokens: BatchShape(1, 4, 64), columns=(), steps=1000)
    batches = iter(packed(documents, seed=2, spec=spec))
    words = set()
    while first_carried(batches.get_state()) < environment.size:
        text = tokenizer.decode(next(batches).batch.tokens.reshape(-1))
        words |= {part.split("<|assistant|>")[0] for part in text.split("nus): ")[1:]}
    forty = {word(environment.task(i)) for i in range(40)}
    assert not words & forty
    assert words == {word(environment.task(i)) for i in range(40, 200)} - forty


def test_the_source_leaves_out_what_the_runs_environment_holds_out(tokenizer):
    """Also when its own options make it a split in which such tasks are; here all of them are."""
    opened = []

    def environment(**options) -> ReasoningGym:
        opened.append(options)
        return spelling(**options)

    source = WorkedAnswers(environment={"train_prompts": 50})
    documents = source.open(SourceTools(tokenizer, 0, environment))
    assert {"train_prompts": 50} in opened and len(documents) == 50
    held_out = spelling().held_out
    out = {word(held_out.task(index)) for index in range(held_out.size)}
    fifty = spelling(train_prompts=50)
    for index in range(50):
        assert (documents[index] is None) == (word(fifty.task(index)) in out)


def test_an_environment_without_worked_answers_is_refused(environment, tokenizer):
    class Silent:
        size, task, held_out = 1, environment.task, environment.held_out

    with pytest.raises(
        ConfigError, match="environment Silent states no worked answers: set warm_start.steps"
    ):
        WorkedDocuments(Silent(), tokenizer)


def test_an_environment_that_holds_out_itself_or_too_much_is_refused(environment, tokenizer):
    class Same:
        size = 10**9

        @property
        def held_out(self):
            return self

    class Huge(Same):
        held_out = Same()

    for made in (Same, Huge):
        tools = SourceTools(tokenizer, 0, made)
        with pytest.raises(ConfigError, match="held_out of .* has 1000000000 tasks"):
            WorkedAnswers().open(tools)
