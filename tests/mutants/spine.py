"""Faults of the spine: the phase loop and its state, columns, plans and their clock, and versions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOOP = "jaxtrain/training/loop.py"
PLANS = "jaxtrain/data/sources/plans.py"
LOOPS = "tests/jaxtrain/training/test_loop.py"
PACKING = "tests/jaxtrain/data/test_packing.py"
PLANNED = "tests/jaxtrain/data/sources/test_plans.py"
SELECTION = "tests/rollout_bridge/trajectories/test_selection.py"

BY_TOKENS = f"{LOOPS}::test_batch_and_schedules_are_those_of_the_phases_tokens_before_the_step"
GOES_ON = f"{LOOPS}::test_a_phase_goes_on_from_a_checkpoint_as_if_it_had_not_stopped"

MUTANTS = (
    # The phase loop.
    Mutant(
        name="one-step-too-many",
        file=LOOP,
        old="while record.steps < steps:",
        new="while record.steps <= steps:",
        test=f"{LOOPS}::test_a_phase_ends_after_its_steps",
    ),
    Mutant(
        name="schedules-of-the-tokens-of-all-phases",
        file=LOOP,
        old="values_at(record.tokens)",
        new="values_at(progress.tokens_seen)",
        test=BY_TOKENS,
    ),
    Mutant(
        name="state-of-the-data-after-the-batch-read-ahead",
        file=LOOP,
        old="source=batches.get_state(),",
        new="source=(next(batches), batches.get_state())[1],",
        test=f"{LOOPS}::test_the_state_of_the_data_is_that_of_the_batch_trained_on",
    ),
    Mutant(
        name="batch-shaped-by-the-tokens-before-the-last-one",
        file="jaxtrain/data/sources/documents.py",
        old="        shape = spec.shape_at(self._tokens)\n",
        new="""\
        shape = spec.shape_at(getattr(self, "_before", 0))
        self._before = self._tokens
""",
        test=BY_TOKENS,
    ),
    Mutant(
        name="padding-counted-as-tokens",
        file="jaxtrain/data/batch.py",
        old="np.count_nonzero(self.segment_ids)",
        new="np.size(self.segment_ids)",
        test=BY_TOKENS,
    ),
    Mutant(
        name="source-lost-in-a-checkpoint",
        file="jaxtrain/training/progress.py",
        old="PhaseProgress(**record)",
        new='PhaseProgress(steps=record["steps"], tokens=record["tokens"])',
        test=GOES_ON,
    ),
    Mutant(
        name="data-from-the-start-after-a-resume",
        file="jaxtrain/data/sources/base.py",
        old="    if state:\n        iterator.set_state(dict(state))\n",
        new="",
        test=GOES_ON,
    ),
    Mutant(
        name="frozen-parameters-decay",
        file="jaxtrain/training/step.py",
        old="        frozen=state.frozen,\n",
        new="        frozen=jax.tree.map(lambda x: 0.99 * x, state.frozen),\n",
        test=f"{LOOPS}::test_only_what_is_trained_moves",
    ),
    Mutant(
        name="frozen-parameters-are-trained",
        file="jaxtrain/training/build.py",
        old="if choice.method is Method.frozen)",
        new="if choice.method is None)",
        test=f"{LOOPS}::test_only_what_is_trained_moves",
    ),
    # Columns.
    Mutant(
        name="columns-of-inputs-are-of-the-target",
        file="jaxtrain/data/packing.py",
        old='values[:-1] if column.of == "input" else values[1:]',
        new="values[1:]",
        test=f"{PACKING}::test_every_document_is_in_the_batch_once",
    ),
    Mutant(
        name="columns-filled-with-zero",
        file="jaxtrain/data/packing.py",
        old="np.full((*shape, *column.shape), column.fill, column.dtype)",
        new="np.zeros((*shape, *column.shape), column.dtype)",
        test=f"{PACKING}::test_every_document_is_in_the_batch_once",
    ),
    # Plans.
    Mutant(
        name="plans-do-not-wait-for-the-trainer",
        file=PLANS,
        old="lambda: True if self._step >= step else None",
        new="lambda: True",
        test=f"{PLANNED}::test_the_clock_lets_a_wait_go_on_only_at_its_step",
    ),
    Mutant(
        name="planned-a-step-too-far-ahead",
        file=PLANS,
        old="wait_for(step - self._ahead,",
        new="wait_for(step - self._ahead - 1,",
        test=f"{PLANNED}::test_a_step_is_planned_when_the_trainer_is_near_enough",
    ),
    Mutant(
        name="one-advantage-for-all-tokens",
        file=PLANS,
        old="advantage.of_tokens(trajectory, row.advantage)",
        new="row.advantage",
        test=f"{PLANNED}::test_an_advantage_of_each_token_reaches_the_batch",
    ),
    Mutant(
        name="drops-of-filters-not-recorded",
        file="rollout_bridge/trajectories/selection.py",
        old="dropped += [(rule.reason, ref) for",
        new="[(rule.reason, ref) for",
        test=f"{SELECTION}::test_no_signal_is_dropped_if_asked",
    ),
    # Versions.
    Mutant(
        name="a-version-a-step",
        file="jaxtrain/publishing/publication.py",
        old="last, every = self.last, self.section.publish_every",
        new="last, every = self.last, 1",
        test="tests/jaxtrain/publishing/test_publication.py::test_a_version_every_so_many_steps",
    ),
)
