"""Faults of a trainer: losses, step, optimizer, schedules, data, checkpoints, metrics and models."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

POLICIES = "jaxtrain/losses/policies/base.py"
DOUBLE_SIDED = "jaxtrain/losses/policies/double_sided.py"
STEP = "jaxtrain/training/step.py"
PROGRAMS = "jaxtrain/training/programs.py"
BALANCE = "jaxtrain/models/balance.py"
POLICY = "tests/jaxtrain/losses/policies/test_base.py"
APPLY = "tests/jaxtrain/training/test_apply.py"
NEXT_TOKEN = "tests/jaxtrain/training/test_next_token_step.py"

MUTANTS = (
    # The policy gradient.
    Mutant(
        name="advantage-sign",
        file=POLICIES,
        old='jnp.asarray(batch["advantages"]).reshape(-1)',
        new='-jnp.asarray(batch["advantages"]).reshape(-1)',
        test=f"{POLICY}::test_a_step_raises_what_was_better_and_lowers_what_was_worse",
    ),
    Mutant(
        name="temperature-dropped",
        file=POLICIES,
        old='temperature=jnp.asarray(batch["temperature"]),',
        new="temperature=None,",
        test=f"{POLICY}::test_a_step_raises_what_was_better_and_lowers_what_was_worse",
    ),
    Mutant(
        name="policy-mean-over-the-window-only",
        file=POLICIES,
        old="weight=weights_N.sum(),",
        new='weight=metrics["inside_fraction"],',
        test=f"{POLICY}::test_a_step_raises_what_was_better_and_lowers_what_was_worse",
    ),
    Mutant(
        name="window-ends-swapped",
        file=DOUBLE_SIDED,
        old="(ratio_N > 1.0 - self.eps_low) & (ratio_N < 1.0 + self.eps_high)",
        new="(ratio_N > 1.0 - self.eps_high) & (ratio_N < 1.0 + self.eps_low)",
        test=f"{POLICY}::test_a_step_raises_what_was_better_and_lowers_what_was_worse",
    ),
    Mutant(
        name="mtp-trains-the-policy",
        file=POLICIES,
        old='value if path.startswith("mtp/") else jax.lax.stop_gradient(value)',
        new="value",
        test=f"{POLICY}::test_mtp_layers_learn_beside_the_policy_and_leave_it_alone",
    ),
    Mutant(
        name="ratio-has-a-gradient",
        file=DOUBLE_SIDED,
        old="jax.lax.stop_gradient(tokens.logprobs_N) - tokens.behavior_logprobs_N",
        new="tokens.logprobs_N - tokens.behavior_logprobs_N",
        test=f"{POLICY}::test_a_step_raises_what_was_better_and_lowers_what_was_worse",
    ),
    # The step.
    Mutant(
        name="clipping-removed",
        file=STEP,
        old="scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-20)) / weight",
        new="scale = 1.0 / weight",
        test=f"{APPLY}::test_a_gradient_is_divided_by_the_weight_then_clipped",
    ),
    Mutant(
        name="non-finite-gradient-trained-on",
        file=STEP,
        old="finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)",
        new="finite = jnp.isfinite(sums.loss)",
        test=f"{APPLY}::test_a_step_that_cannot_be_made_changes_nothing",
    ),
    Mutant(
        name="step-without-weight-decays",
        file=STEP,
        old=" & (sums.weight > 0)",
        new="",
        test=f"{APPLY}::test_a_step_that_cannot_be_made_changes_nothing",
    ),
    Mutant(
        name="skipped-step-moves-the-momentum",
        file=STEP,
        old="jnp.where(finite, new, old), changed, state)",
        new="jnp.where(finite, new, old), changed, "
        "TrainState(state.params, state.frozen, state.buffers, optimizer_state))",
        test=f"{APPLY}::test_a_step_that_cannot_be_made_changes_nothing",
    ),
    Mutant(
        name="last-microbatch-only",
        file=STEP,
        old="jax.tree.map(jnp.add, sums.gradients, gradients)",
        new="gradients",
        test=f"{NEXT_TOKEN}::test_a_step_is_the_mean_over_token_weight_of_all_microbatches",
    ),
    Mutant(
        name="metrics-divided-by-valid-tokens",
        file=PROGRAMS,
        old="float(total) / weight for name",
        new="float(total) / tokens for name",
        test=f"{POLICY}::test_values_are_means_over_all_trainable_tokens",
    ),
    Mutant(
        name="balance-denominator-dropped",
        file=PROGRAMS,
        old="values.balance_weight * float(np.sum(batch.loss_weights)) / max(tokens, 1)",
        new="values.balance_weight",
        test=f"{NEXT_TOKEN}::test_the_balance_loss_is_a_mean_over_valid_tokens_of_any_loss_weight",
    ),
    Mutant(
        name="balance-rows-alike",
        file=BALANCE,
        old=".sum(-1) @ valid_BS.sum(-1)",
        new=".sum(-1).mean() * valid_BS.sum()",
        test=f"{NEXT_TOKEN}::test_the_balance_loss_is_a_mean_over_valid_tokens_of_any_loss_weight",
    ),
    Mutant(
        name="mtp-bias-by-the-body-s-counts",
        file=BALANCE,
        old="rows = counts_LE[first : first + buffers[path].shape[0]]",
        new="rows = counts_LE[: buffers[path].shape[0]]",
        test=f"{NEXT_TOKEN}::test_each_correction_bias_moves_by_the_counts_of_its_own_layer",
    ),
    Mutant(
        name="mtp-weight-ignored",
        file=STEP,
        old="total + scales.mtp * out.mtp",
        new="total + out.mtp",
        test=f"{NEXT_TOKEN}::test_an_mtp_layer_moves_by_its_weight_times_its_mean_loss",
    ),
    Mutant(
        name="mtp-weight-not-passed-on",
        file=PROGRAMS,
        old="mtp=np.float32(values.mtp_weight)",
        new="mtp=np.float32(0.1)",
        test=f"{NEXT_TOKEN}::test_an_mtp_layer_moves_by_its_weight_times_its_mean_loss",
    ),
    Mutant(
        name="mtp-weights-of-the-token-before",
        file="jaxtrain/losses/mtp.py",
        old="_shift(weights, k) * alike[k - 1]",
        new="weights * alike[k - 1]",
        test=f"{NEXT_TOKEN}::test_an_mtp_layer_moves_by_its_weight_times_its_mean_loss",
    ),
    # Models.
    Mutant(
        name="initial-deviation-doubled",
        file="jaxtrain/models/parameters.py",
        old="stddev * jax.random.normal",
        new="2 * stddev * jax.random.normal",
        test="tests/jaxtrain/models/test_initialization.py",
    ),
    Mutant(
        name="gate-holds-the-correction-bias",
        file="jaxtrain/models/router.py",
        old="jnp.take_along_axis(scores_NE, ids_Nk",
        new="jnp.take_along_axis(choice_NE, ids_Nk",
        test="tests/jaxtrain/models/test_router.py::test_a_correction_bias_chooses_and_does_not_weigh",
    ),
    # Optimizer, schedules, batch ramp.
    Mutant(
        name="muon-scaled-by-the-shorter-side",
        file="jaxtrain/optim/muon.py",
        old="math.sqrt(max(group.matrix))",
        new="math.sqrt(min(group.matrix))",
        test="tests/jaxtrain/optim/test_optimizer.py::"
        "test_muon_parameters_get_optax_muon_at_learning_rate_1_with_decay",
    ),
    Mutant(
        name="weight-decay-grows-weights",
        file="jaxtrain/optim/optimizer.py",
        old="direction = direction + choice.weight_decay *",
        new="direction = direction - choice.weight_decay *",
        test="tests/jaxtrain/optim/test_optimizer.py::"
        "test_excepted_parameters_get_adamw_of_optax_at_learning_rate_1",
    ),
    Mutant(
        name="cosine-ends-late",
        file="jaxtrain/optim/schedules.py",
        old="/ float(end_tokens - warmup_tokens)",
        new="/ float(end_tokens)",
        test="tests/jaxtrain/optim/test_schedules.py::test_warmup_cosine_of_glm45",
    ),
    Mutant(
        name="batch-rounded-down",
        file="jaxtrain/optim/batch_ramp.py",
        old="(2 * tokens_times_whole + unit) // (2 * unit)",
        new="tokens_times_whole // unit",
        test="tests/jaxtrain/optim/test_batch_ramp.py::"
        "test_rounding_changes_half_a_microbatch_past_a_whole_one",
    ),
    # Data, checkpoints, metrics.
    Mutant(
        name="columns-of-targets-are-of-the-token-before",
        file="jaxtrain/data/packing.py",
        old='values[:-1] if column.of == "input" else values[1:]',
        new="values[:-1]",
        test="tests/jaxtrain/data/test_packing.py::test_every_document_is_in_the_batch_once",
    ),
    Mutant(
        name="checkpoint-digests-not-compared",
        file="jaxtrain/training/checkpoint.py",
        old="for path in wanted if found[path] != saved[path]",
        new="for path in wanted if path not in saved",
        test="tests/jaxtrain/training/test_checkpoint.py::test_a_flipped_bit_names_the_leaf",
    ),
    Mutant(
        name="oldest-checkpoint-restored",
        file="jaxtrain/training/checkpoint.py",
        old="return steps[-1] if step is None else step",
        new="return steps[0] if step is None else step",
        test="tests/jaxtrain/training/test_checkpoint.py::"
        "test_saves_at_the_interval_or_when_forced_and_keeps_the_newest",
    ),
    Mutant(
        name="rows-after-the-restored-step-stay",
        file="jaxtrain/training/metrics.py",
        old='if key[1] <= row["restored_step"]',
        new='if key[1] <= row["restored_step"] + 2',
        test="tests/jaxtrain/training/test_metrics.py::test_rows_after_the_restored_step_are_superseded",
    ),
)
