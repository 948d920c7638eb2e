"""Packed documents: pure in their state, also behind the thread that reads ahead."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

import grain
import numpy as np
import pytest

from jaxtrain.data.packing import Document
from jaxtrain.data.sources.base import BatchShape, BatchSpec, Packed, prefetching
from jaxtrain.data.sources.documents import packed
from rollout_bridge.trajectories.packing import PackingError
from rollout_bridge.waiting import Interrupted

PATIENCE = 300.0  # seconds for what takes a moment, on a machine that stalls


@dataclass
class Numbers:
    """Document i is i repeated 3 to 8 times, once if it is in `single`; those of `missing` are None."""

    count: int = 30
    missing: frozenset[int] = frozenset()
    single: frozenset[int] = frozenset()
    reads: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Document | None:
        self.reads += 1
        assert self.reads < 1000, "the source is read without end"
        if index in self.missing:
            return None
        size = 1 if index in self.single else 3 + index % 6
        return Document(tokens=np.full(size, index, np.int32), loss_weights=np.ones(size, np.float32))


def spec(shape_at=None, interrupted=lambda: False) -> BatchSpec:
    """One microbatch of 2 rows of 12 for the first 60 tokens, then three."""
    growing = shape_at or (lambda tokens: BatchShape(1 if tokens < 60 else 3, 2, 12))
    return BatchSpec(shape_at=growing, columns=(), steps=1000, interrupted=interrupted)


def contents(batch) -> list:
    return [values.tolist() for values in batch.columns.values()]


@pytest.fixture(scope="module")
def uninterrupted() -> list:
    batches = iter(packed(Numbers(), seed=1, spec=spec()))
    return [contents(next(batches).batch) for _ in range(12)]


def test_the_batch_follows_the_shape_of_the_tokens_handed_out(uninterrupted):
    tokens, microbatches = 0, []
    for columns in uninterrupted:
        segments = np.asarray(columns[3])
        assert segments.shape[0] <= (1 if tokens < 60 else 3) and segments.shape[1:] == (2, 12)
        microbatches.append(segments.shape[0])
        tokens += int((segments > 0).sum())
    assert set(microbatches[-6:]) == {3} and microbatches[:2] == [1, 1]


@pytest.mark.parametrize("stop", [0, 1, 4, 7])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_state_goes_on_as_if_nothing_had_stopped(uninterrupted, stop, ahead):
    """Through JSON, and whatever the thread has read ahead by then."""

    def read(state: dict, count: int) -> tuple[list, dict]:
        batches = packed(Numbers(), seed=1, spec=spec())
        if ahead:
            with prefetching(batches, state, threading.Event()) as iterator:
                found = [contents(next(iterator).batch) for _ in range(count)]
                return found, json.loads(json.dumps(iterator.get_state())) if count else {}
        iterator = iter(batches)
        if state:
            iterator.set_state(state)
        return [contents(next(iterator).batch) for _ in range(count)], json.loads(
            json.dumps(iterator.get_state())
        )

    before, state = read({}, stop)
    after, _ = read(state, len(uninterrupted) - stop)
    assert before + after == uninterrupted


def handed_out(batch) -> list[int]:
    """First token of each document."""
    return [
        int(tokens[segments == segment][0])
        for tokens, segments in zip(
            batch.tokens.reshape(-1, batch.tokens.shape[-1]),
            batch.segment_ids.reshape(-1, batch.tokens.shape[-1]),
            strict=True,
        )
        for segment in range(1, segments.max() + 1)
    ]


def test_every_document_comes_once_an_epoch_and_those_without_one_are_skipped():
    """What was handed out and what is carried are the documents of the positions read, each once."""
    missing = frozenset({0, 7, 29})
    dataset = packed(Numbers(missing=missing), seed=3, spec=spec())
    batches, seen = iter(dataset), []
    while (state := batches.get_state())["position"] < 2 * 30:
        seen += handed_out(next(batches).batch)
        state = batches.get_state()
        read = [int(dataset.order[at]) for at in range(state["position"])]
        carried = [int(dataset.order[at]) for at, _, _ in state["carried"]]
        assert sorted(seen + carried) == sorted(index for index in read if index not in missing)
    assert sorted(read[:30]) == sorted(read[30:60]) == list(range(30))


@dataclass
class Lengths:
    """Document i has `lengths[i]` tokens: i, then i + 1, and so on."""

    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        tokens = index + np.arange(self.lengths[index], dtype=np.int32)
        return Document(
            tokens=tokens,
            loss_weights=np.ones(len(tokens), np.float32),
            columns={"twice": 2.0 * tokens, "whole": float(index)},
        )


def test_rows_are_nearly_full_and_none_waits_for_ever():
    """Log-normal lengths, 8 documents a row on average: full to 99%, and what was carried comes next."""
    lengths = np.random.default_rng(0).lognormal(4.5, 0.8, 20_000).astype(int).clip(2, 1025)
    shape = BatchShape(4, 8, 1024)
    batches, filled = iter(packed(Lengths(lengths), seed=0, spec=spec(lambda tokens: shape))), []
    before: list = []
    for _ in range(60):
        filled.append(next(batches).metrics["packing_fraction"])
        carried = batches.get_state()["carried"]
        assert not [key for key in carried if key in before]
        before = carried
    assert np.mean(filled) > 0.99 and min(filled) > 0.98


def test_long_documents_are_refused_skipped_or_cut():
    lengths = np.array([30, 5, 13, 40, 14])
    shape = BatchShape(1, 2, 12)

    def batches(too_long, seed=0):
        return iter(packed(Lengths(lengths), seed=seed, spec=spec(lambda tokens: shape), too_long=too_long))

    with pytest.raises(PackingError, match="batch.sequence_length 12 holds: .* too_long"):
        for _ in range(3):
            next(batches("refuse"))
    skipped = batches("skip")
    assert {*handed_out(next(skipped).batch), *handed_out(next(skipped).batch)} == {1, 2}

    cut, predicted = batches("split"), {}
    while cut.get_state()["position"] < 25:
        batch = next(cut).batch
        for token in batch.targets[batch.segment_ids > 0]:
            predicted[int(token)] = predicted.get(int(token), 0) + 1
    once = [0] * 60
    for index, length in enumerate(lengths):
        for token in range(index + 1, index + length):
            once[token] += 1
    position, carried = cut.get_state()["position"], cut.get_state()["carried"]
    epochs = position / len(lengths)
    assert carried and all(predicted[token] <= once[token] * (epochs + 1) for token in predicted)
    assert set(predicted) == {token for token in range(60) if once[token]}


def test_pieces_are_predicted_once_with_their_columns():
    from jaxtrain.data.sources.documents import _split

    document = Lengths(np.array([40]))[0]
    for seed in range(20):
        pieces = list(_split(document, 12, np.random.default_rng(seed)))
        assert [t for piece in pieces for t in piece.tokens[1:]] == list(range(1, 40))
        assert all(2 <= len(piece.tokens) <= 13 for piece in pieces)
        assert all((piece.columns["twice"] == 2.0 * piece.tokens).all() for piece in pieces)
        assert {piece.columns["whole"] for piece in pieces} == {0.0}


def test_a_piece_carried_into_a_longer_row_is_the_same_after_a_restart():
    lengths = np.random.default_rng(1).integers(2, 60, 50)

    def run(stops: int) -> list:
        shape_at = lambda tokens: BatchShape(1, 2, 12 if tokens < 100 else 40)  # noqa: E731
        dataset = packed(Lengths(lengths), seed=5, spec=spec(shape_at), too_long="split")
        iterator, found = iter(dataset), []
        for step in range(12):
            found.append(contents(next(iterator).batch))
            if stops and step % stops == 0:
                state = json.loads(json.dumps(iterator.get_state()))
                iterator = iter(dataset)
                iterator.set_state(state)
        return found

    assert run(1) == run(3) == run(0)


def test_a_document_of_one_token_is_skipped_as_if_there_were_none():
    """It predicts nothing: the batches are those of a source that has no document at its index."""
    some = frozenset({0, 7, 29})
    singles, gaps = (
        iter(packed(numbers, seed=3, spec=spec()))
        for numbers in (Numbers(single=some), Numbers(missing=some))
    )
    while gaps.get_state()["position"] < 2 * 30:
        assert contents(next(singles).batch) == contents(next(gaps).batch)
        assert singles.get_state() == gaps.get_state()


def test_another_seed_is_another_order(uninterrupted):
    other = iter(packed(Numbers(), seed=2, spec=spec()))
    assert contents(next(other).batch) != uninterrupted[0]


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(PackingError, match="Numbers holds no document"):
        packed(Numbers(count=0), seed=0, spec=spec())
    nothing = packed(Numbers(count=4, missing=frozenset(range(4))), seed=0, spec=spec())
    single = packed(Numbers(count=4, single=frozenset(range(4))), seed=0, spec=spec())
    for batches in (nothing, single):
        with pytest.raises(PackingError, match="Numbers: none of its 4 indices has a document to train on"):
            next(iter(batches))


def test_an_error_of_the_source_reaches_the_loop_through_the_thread():
    nothing = packed(Numbers(count=4, missing=frozenset(range(4))), seed=0, spec=spec())
    with (
        prefetching(nothing, {}, threading.Event()) as iterator,
        pytest.raises(PackingError, match="none of its 4 indices"),
    ):
        next(iterator)


def test_a_search_for_documents_that_are_not_there_ends_with_a_stop():
    """None of 10^9 indices has one."""
    nothing = Numbers(count=10**9, missing=frozenset())
    nothing.__class__ = type("Nothing", (Numbers,), {"__getitem__": lambda self, index: None})
    looks = iter(range(50))
    batches = iter(packed(nothing, seed=0, spec=spec(interrupted=lambda: next(looks, None) is None)))
    with pytest.raises(Interrupted):
        next(batches)


class Waiting(grain.IterDataset[Packed]):
    """Hands out one batch, then waits for data until it is interrupted."""

    def __init__(self, spec: BatchSpec) -> None:
        super().__init__()
        self.spec, self.waits, self.ended = spec, threading.Event(), threading.Event()

    def __iter__(self):
        return _Waits(self)


class _Waits(grain.DatasetIterator[Packed]):
    def __init__(self, dataset: Waiting) -> None:
        super().__init__()
        self._dataset, self._count = dataset, 0

    def __next__(self) -> Packed:
        dataset = self._dataset
        self._count += 1
        if self._count == 1:
            return next(iter(packed(Numbers(), seed=0, spec=dataset.spec)))
        dataset.waits.set()
        pause = threading.Event()
        while not dataset.spec.interrupted():
            pause.wait(0.01)
        dataset.ended.set()
        raise Interrupted

    def get_state(self):
        return {"count": self._count}

    def set_state(self, state):
        self._count = state["count"]


@pytest.mark.parametrize("failing", [False, True])
def test_closing_while_the_source_waits_ends_the_wait(failing):
    """Also when the loop leaves by an error; its error is the one that is raised."""
    halt = threading.Event()
    batches = Waiting(spec(interrupted=halt.is_set))

    def leave() -> None:
        with prefetching(batches, {}, halt) as iterator:
            next(iterator)
            assert batches.waits.wait(PATIENCE)
            if failing:
                raise KeyError("of the loop")

    thread_error: list[BaseException] = []

    def run() -> None:
        try:
            leave()
        except BaseException as error:
            thread_error.append(error)

    loop = threading.Thread(target=run, daemon=True)
    loop.start()
    loop.join(PATIENCE)
    assert not loop.is_alive(), "closing hangs on the source's wait"
    assert batches.ended.wait(PATIENCE)
    assert [type(error) for error in thread_error] == ([KeyError] if failing else [])
