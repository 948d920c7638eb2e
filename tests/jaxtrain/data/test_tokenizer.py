"""Tokenizer built from prompts: template words are one token, everything comes back unchanged."""

from __future__ import annotations

import pytest
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
