"""Tokenizer built from prompts: template words are one token, everything comes back unchanged."""

from __future__ import annotations

import pytest
from jaxtrain.data.worked_answers import WorkedAnswers
from transformers import AutoTokenizer

from jaxtrain.data.tokenizer import build
from rollout_bridge.rollouts.environments.reasoning_gym import Options, ReasoningGym


@pytest.fixture(scope="module")
def environment() -> ReasoningGym:
    return ReasoningGym(Options(train_prompts=200, held_out_prompts=20), seed=0)


@pytest.fixture(scope="module")
def tokenizer(environment, tmp_path_factory):
    prompts = [environment.task(i).messages[-1]["content"] for i in range(200)]
    return AutoTokenizer.from_pretrained(build(prompts, tmp_path_factory.mktemp("tokenizer")))


def test_text_round_trips_and_template_words_are_single_tokens(tokenizer):
    for text in ("Spell this word backward: grün 日本 🙂\n", "zzz", " leading and trailing  "):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("Spell this word backward", add_special_tokens=False)) == 4
    assert len(tokenizer.encode(" quixotry", add_special_tokens=False)) == 9


def test_worked_answers_put_loss_on_the_answer_only(environment, tokenizer):
    data = WorkedAnswers(environment, tokenizer, seed=0)
    document = data.document(3)
    question, answer = environment.worked_answer(3)
    learnt = document.tokens[document.loss_weights > 0]
    assert tokenizer.decode(learnt) == answer + tokenizer.eos_token
    assert tokenizer.decode(document.tokens[document.loss_weights == 0]) == f"<|user|>{question}<|assistant|>"


def test_a_resumed_position_reads_what_would_have_come(environment, tokenizer):
    data = WorkedAnswers(environment, tokenizer, seed=1)
    shape = {"microbatches": 2, "rows": 2, "sequence_length": 64}
    first = data.batch(0, **shape)
    assert first.batch.tokens.shape == (2, 2, 64)
    again = WorkedAnswers(environment, tokenizer, seed=1).batch(first.position, **shape)
    straight = data.batch(first.position, **shape)
    assert (again.batch.tokens == straight.batch.tokens).all() and again.position == straight.position
    assert not (again.batch.tokens == first.batch.tokens).all()


def test_held_out_questions_are_never_worked(environment, tokenizer):
    """Held out here: tasks 0 to 39 of the split itself; no batch contains their words."""

    class FirstForty:
        size = 40
        task = staticmethod(environment.task)

    data = WorkedAnswers(environment, tokenizer, seed=2, held_out=FirstForty())
    shape = {"microbatches": 1, "rows": 4, "sequence_length": 64}
    position, words = 0, set()
    while position < environment.size:
        taken = data.batch(position, **shape)
        position = taken.position
        text = tokenizer.decode(taken.batch.tokens.reshape(-1))
        words |= {part.split("<|assistant|>")[0] for part in text.split("nus): ")[1:]}
    held_out = {environment.task(i).data["entry"]["metadata"]["word"] for i in range(40)}
    seen = {environment.task(i).data["entry"]["metadata"]["word"] for i in range(40, 200)} - held_out
    assert not words & held_out
    assert words == seen
