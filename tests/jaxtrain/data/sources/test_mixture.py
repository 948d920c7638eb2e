"""Mixtures: shares in tokens, every document once an epoch of its part, and resumed exactly."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from jaxtrain.config.base import Reference
from jaxtrain.config.errors import ConfigError
from jaxtrain.config.references import build
from jaxtrain.data.sources.base import BatchShape, BatchSpec
from jaxtrain.data.sources.documents import packed
from jaxtrain.data.sources.mixture import MixedDocuments, Part
from tests.jaxtrain.data.sources.test_documents import Lengths, contents

SHAPE = BatchShape(2, 4, 256)
SPEC = BatchSpec(shape_at=lambda tokens: SHAPE, columns=(), steps=1000)
RNG = np.random.default_rng(0)
SHORT, LONG, RARE = (
    RNG.integers(5, 15, 300),
    RNG.integers(80, 240, 400),
    RNG.integers(20, 40, 50),
)


def mixed(**parts: Part) -> MixedDocuments:
    lengths = {"short": SHORT, "long": LONG, "rare": RARE}
    return MixedDocuments({name: Lengths(lengths[name]) for name in parts}, parts)


def shares(documents: MixedDocuments, steps: int) -> dict[str, float]:
    batches, tokens = iter(packed(documents, seed=3, spec=SPEC)), Counter()
    for _ in range(steps):
        tokens.update(
            {
                name.removeprefix("tokens_of_"): value
                for name, value in next(batches).metrics.items()
                if name.startswith("tokens_of_")
            }
        )
    return {name: count / tokens.total() for name, count in tokens.items()}


def test_weights_are_shares_of_tokens_not_of_documents():
    found = shares(mixed(short=Part(source={}, weight=1), long=Part(source={}, weight=3)), 60)
    assert found["short"] == pytest.approx(0.25, abs=0.02) and sum(found.values()) == pytest.approx(1)


def test_epochs_are_passes_over_each_part():
    """3.2 passes over one and 1 over the other are done together."""
    documents = mixed(short=Part(source={}, epochs=3.2), long=Part(source={}, epochs=1))
    order = documents.order(0)
    counts = Counter(int(order[at]) for at in range(int(300 * 3.2 + 400)))
    assert {counts[index] for index in range(300)} == {3, 4}
    assert np.mean([counts[index] for index in range(300)]) == pytest.approx(3.2, abs=0.02)
    assert {counts[index] for index in range(300, 700)} <= {0, 1, 2}
    assert np.mean([counts[index] for index in range(300, 700)]) == pytest.approx(1, abs=0.02)


def test_a_part_comes_whole_before_it_comes_again():
    documents = mixed(rare=Part(source={}, weight=1), long=Part(source={}, weight=1))
    order = documents.order(7)
    rare = [index for index in (int(order[at]) for at in range(400)) if index < 50]
    for start in range(0, len(rare) - 50, 50):
        assert sorted(rare[start : start + 50]) == list(range(50))
    assert rare[:50] != rare[50:100]


def test_a_mixture_goes_on_as_if_nothing_had_stopped():
    def run(stops: int) -> list:
        parts = {name: Part(source={}, weight=1) for name in ("short", "long", "rare")}
        dataset = packed(mixed(**parts), seed=5, spec=SPEC)
        iterator, found = iter(dataset), []
        for step in range(20):
            found.append(contents(next(iterator).batch))
            if stops and step % stops == 0:
                state = json.loads(json.dumps(iterator.get_state()))
                iterator = iter(packed(mixed(**parts), seed=5, spec=SPEC))
                iterator.set_state(state)
        return found

    assert run(1) == run(0)


def refused(parts: dict) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        build("source", Reference(name="mixture", parts=parts), where="sft.source")
    return refusal.value.problems


def test_what_cannot_be_mixed_is_refused_by_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    text = {"name": "text", "files": [f"{tmp_path}/a.jsonl"]}
    assert refused({}) == [
        "sft.source.parts: empty; name sources, such as {code: {weight: 2, source: {name: text, ...}}}"
    ]
    assert refused({"a": {"source": text, "weight": 0.0}}) == [
        "sft.source.parts.a.weight: 0.0 is not above 0; leave the part out"
    ]
    assert refused({"a": {"source": text, "weight": 1.0}, "b": {"source": text, "epochs": 1.0}}) == [
        "sft.source.parts.b: no weight, which others have; give all one, or all epochs"
    ]
    assert refused({"a": {"source": text}}) == ["sft.source.parts.a: give weight or epochs, one of them"]
    (problem,) = refused({"a": {"source": text | {"colunm": "x"}, "weight": 1.0}})
    assert problem == "sft.source.parts.a.source.colunm: unknown key; did you mean 'column'?"
