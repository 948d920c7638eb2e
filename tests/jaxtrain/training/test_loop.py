"""The phase loop on the real trainer, metrics and checkpoints: what each step takes and what it leaves."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.config.optimization import BatchSection, SupervisedSection
from jaxtrain.data.packing import Document
from jaxtrain.data.sources.documents import packed
from jaxtrain.losses.next_token import NextToken
from jaxtrain.optim.optimizer import Method, OptimizerConfig
from jaxtrain.training.build import trainable
from jaxtrain.training.checkpoint import Checkpointer
from jaxtrain.training.loop import run_phase
from jaxtrain.training.metrics import MetricsWriter, read_metrics
from jaxtrain.training.phase import Phase, stages
from jaxtrain.training.progress import PhaseProgress, Progress
from jaxtrain.training.run import Run, Stopped
from rollout_bridge.waiting import Interrupted
from sharding import processes
from sharding.mesh import MeshSpec
from tests.jaxtrain.training.markov import DEFINITION

STEPS = 4
# One microbatch until 14 tokens are seen, then three. A document is 7 of the 8 positions of a microbatch.
RAMP, DOCUMENT = "0: 8, 14: 24", 7
MICROBATCHES = [1, 1, 3, 3]
TOKENS_BEFORE = [0, 7, 14, 35]
AT_START = Progress(step=3, phases={"before": PhaseProgress(steps=3, tokens=1000)})


class Alike:
    """Documents of 8 tokens; the first is not predicted."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Document:
        return Document(
            tokens=(index + np.arange(8, dtype=np.int32)) % 4, loss_weights=np.ones(8, np.float32)
        )


def run_in(directory) -> Run:
    """Only the embedding is trained, on one device."""
    return Run(
        config=SimpleNamespace(failure=SimpleNamespace(max_nonfinite_steps=0)),  # type: ignore[arg-type]
        directory=directory,
        start=None,  # type: ignore[arg-type]
        trainable=trainable(
            DEFINITION.config,
            MeshSpec(ici={"fsdp": 1}).build(jax.devices()[:1]),
            OptimizerConfig(overrides={"embedding": Method.adamw, "*": Method.frozen}),
            clip_norm=1.0,
        ),
        checkpoints=Checkpointer(directory / "checkpoints", keep=9, save_interval_steps=1),
        metrics=MetricsWriter(directory),
        stop=threading.Event(),
    )


def phase_of(run: Run, seen: list[tuple[Progress, int]]) -> Phase:
    """seen: after each step, the progress and the phase's steps that `before_step` was called with last."""
    begun: list[int] = []
    section = SupervisedSection.model_validate(
        {
            "steps": STEPS,
            "learning_rate": {"peak": 0.07, "warmup_tokens": 70},
            "batch": {"steps": RAMP},
            "router_bias_rate": 0,
        }
    )

    def after(state: Any, progress: Progress, values: Any) -> dict[str, float]:
        seen.append((progress, begun[-1]))
        return {"seen": len(seen)}

    return Phase(
        name="alike",
        section=section,
        loss=NextToken(),
        batches=lambda spec: packed(Alike(), seed=0, spec=spec),
        columns=(),
        filled=frozenset(),
        stages=stages((), BatchSection(rows=1, sequence_length=8), run.trainable.definition),
        before_step=lambda progress: begun.append(progress.of("alike").steps),
        after_step=after,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory, state at the start on the host, state at the end, progress at the end, seen)."""
    directory, seen = tmp_path_factory.mktemp("run"), []
    run = run_in(directory)
    state = run.trainable.initial_state(seed=0)
    before = jax.device_get(state)
    state, progress = run_phase(run, state, AT_START, phase_of(run, seen))
    run.checkpoints.close()
    run.metrics.close()
    return directory, before, jax.device_get(state), progress, seen


def test_a_phase_ends_after_its_steps(trained):
    directory, _, _, progress, seen = trained
    assert progress.of("alike").steps == STEPS and progress.step == AT_START.step + STEPS
    rows = read_metrics(directory)
    assert [(row["phase"], row["step"]) for row in rows] == [
        ("alike", 4),
        ("alike", 5),
        ("alike", 6),
        ("alike", 7),
    ]
    assert [row["seen"] for row in rows] == [1, 2, 3, 4]
    assert [steps for _, steps in seen] == [0, 1, 2, 3]


def test_batch_and_schedules_are_those_of_the_phases_tokens_before_the_step(trained):
    """Tokens of an earlier phase and padding do not count. The learning rate rises by 0.001 a token."""
    rows = read_metrics(trained[0])
    assert [row["microbatches"] for row in rows] == MICROBATCHES
    assert [row["tokens"] for row in rows] == [DOCUMENT * count for count in MICROBATCHES]
    found = [row["learning_rate"] for row in rows]
    assert found == pytest.approx([0.001 * tokens for tokens in TOKENS_BEFORE])
    assert [row["tokens_seen"] for row in rows] == [1007, 1014, 1035, 1056]


def test_the_state_of_the_data_is_that_of_the_batch_trained_on(trained):
    """Though the next one is packed by then; a document is one position. Those carried are not trained."""
    states = [progress.of("alike").source for progress, _ in trained[4]]
    trained_on = [state["position"] - len(state["carried"]) for state in states]
    assert trained_on == [1, 2, 5, 8]
    assert [state["tokens"] for state in states] == [DOCUMENT * documents for documents in trained_on]


def test_a_phase_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(trained, tmp_path):
    directory, _, end, progress, _ = trained
    saved = Checkpointer(directory / "checkpoints", keep=9, save_interval_steps=1)
    run = run_in(tmp_path)
    restored = saved.restore(AT_START.step + 2, run.trainable.initial_state(seed=1))
    saved.close()
    at = Progress.from_json(restored.data)
    assert at.of("alike").steps == 2
    state, again = run_phase(run, restored.arrays, at, phase_of(run, []))
    run.checkpoints.close()
    assert again == progress
    for old, new in zip(jax.tree.leaves(end), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(new, old)


def test_only_what_is_trained_moves(trained):
    _, before, after, _, _ = trained
    assert before.params.keys() == {"embedding"} and len(before.frozen) > 5
    assert (after.params["embedding"] != before.params["embedding"]).any()
    for path, value in before.frozen.items():
        np.testing.assert_array_equal(after.frozen[path], value, err_msg=path)


@pytest.mark.parametrize("asked", ["this process", "another"])
def test_a_signal_ends_a_wait_and_all_processes_stop_with_a_checkpoint(tmp_path, monkeypatch, asked):
    """The answers of the processes are those of `any_of`: here of this one, or of one that is not here."""
    run, questions = run_in(tmp_path), []

    def any_of(flag, *, name, timeout):
        questions.append(flag)
        return flag or (asked == "another" and len(questions) == 2)

    monkeypatch.setattr(processes, "any_of", any_of)

    def open_batches(spec):
        return packed(Alike(), seed=0, spec=spec)

    def before(progress):
        if progress.of("alike").steps == 1 and asked == "this process":
            run.stop.set()
            raise Interrupted  # as a store does that is away

    state = run.trainable.initial_state(seed=0)
    phase = replace(phase_of(run, []), batches=open_batches, before_step=before, after_step=lambda *_: {})
    with pytest.raises(Stopped, match="stopped after step 4"):
        run_phase(run, state, AT_START, phase)
    assert questions == [False, asked == "this process"], "once before each step"
    assert run.checkpoints.latest() == AT_START.step + 1
    run.checkpoints.close()
    run.metrics.close()


def test_what_follows_a_step_may_be_ended_by_a_stop_and_the_step_counts(tmp_path):
    run = run_in(tmp_path)

    def after(*_):
        run.stop.set()
        raise Interrupted

    state = run.trainable.initial_state(seed=0)
    phase = replace(phase_of(run, []), before_step=lambda progress: None, after_step=after)
    with pytest.raises(Stopped):
        run_phase(run, state, AT_START, phase)
    assert run.checkpoints.latest() == AT_START.step + 1
    run.checkpoints.close()
    run.metrics.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [AT_START.step + 1]


def test_a_run_restores_onto_shapes(trained, tmp_path, monkeypatch):
    """No random state is made beside the restored one: at most one state is in memory."""
    directory, _, end, _, _ = trained
    run = run_in(tmp_path)
    shutil.copytree(directory / "checkpoints", tmp_path / "checkpoints", dirs_exist_ok=True)
    run.checkpoints._manager.reload()
    monkeypatch.setattr(type(run.trainable), "initial_state", None)
    state, progress = run.restore_or_initialize()
    assert progress.step == AT_START.step + STEPS
    found, expected = map(jax.tree.leaves, (state, end))
    assert all(
        a.sharding == b for a, b in zip(found, jax.tree.leaves(run.trainable.placement.state), strict=True)
    )
    assert all((np.asarray(a) == b).all() for a, b in zip(found, expected, strict=True))
    run.checkpoints.close()
