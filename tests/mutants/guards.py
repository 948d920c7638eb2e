"""Faults of the checks against hostile input, and of those who go on after a write that failed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GROUP = "rollout_bridge/delta/group.py"
PLANES = "rollout_bridge/delta/planes.py"
TENSORS = "rollout_bridge/vllm_plugin/tensors.py"
COMMIT = "rollout_bridge/weights/write/commit.py"
MIRROR = "rollout_bridge/weights/read/mirror.py"
SUBSCRIBER = "rollout_bridge/weights/read/subscriber.py"
AGENT = "rollout_bridge/agent.py"
CLAIMS = "rollout_bridge/trajectories/claims.py"
GATE = "rollout_bridge/trajectories/gate.py"
PLANNER = "rollout_bridge/trajectories/planner.py"
WORKER = "rollout_bridge/rollouts/worker.py"

HOSTILE = "tests/rollout_bridge/delta/test_hostile_values.py"
OUT_OF_RANGE = f"{HOSTILE}::test_integers_of_planes_are_in_range"
ADD_UP = f"{HOSTILE}::test_the_changes_of_the_arrays_of_a_group_add_up"
SCALES = "tests/vllm/test_mirror_tensors.py::test_a_scale_that_no_quantiser_makes_is_refused_by_name"
PUBLISHER = (
    "tests/rollout_bridge/weights/write/test_goes_on.py"
    "::test_a_publication_goes_on_after_any_one_write_that_failed"
)
READER = (
    "tests/rollout_bridge/weights/read/test_goes_on.py::test_a_reader_goes_on_after_any_one_file_that_failed"
)
AGENTS = "tests/rollout_bridge/test_agent.py"
TRAJECTORIES = "tests/rollout_bridge/trajectories"
GOES_ON = f"{TRAJECTORIES}/test_goes_on.py"
WORKERS = "tests/rollout_bridge/rollouts/test_worker.py"

COUNTS = "if (counts.sum(axis=1) != moved).any() or (counts.sum(axis=0) > sizes).any():"
RANGE = "if rest.min() < 0 or rest.max() > largest - _HALF:"
POSITIVE = "inside = (scales >= MINIMUM_SCALE) & (scales <= MAXIMUM_SCALE) & (mantissas == 0.5)"
MUTANTS = (
    # Hostile blobs and mirrors.
    Mutant(
        name="a-reader-takes-a-group-of-any-number-of-changes",
        file=GROUP,
        old="if moved.sum() > MOST_CHANGES:",
        new="if False:",
        test=f"{HOSTILE}::test_a_group_of_too_many_changes_is_refused_before_they_are_read",
    ),
    Mutant(
        name="a-writer-makes-a-group-of-any-number-of-changes",
        file=GROUP,
        old="not 0 < per_array.sum() <= MOST_CHANGES:",
        new="not 0 < per_array.sum():",
        test=f"{HOSTILE}::test_a_writer_makes_no_group_of_too_many_changes",
    ),
    Mutant(
        name="changes-of-arrays-that-are-not-those-of-the-group",
        file=GROUP,
        old=COUNTS,
        new="if (counts.sum(axis=0) > sizes).any():",
        test=ADD_UP,
    ),
    Mutant(
        name="more-changes-in-an-array-than-it-has-elements",
        file=GROUP,
        old=COUNTS,
        new="if (counts.sum(axis=1) != moved).any():",
        test=ADD_UP,
    ),
    Mutant(
        name="bits-past-the-end-of-a-stream",
        file="rollout_bridge/delta/stream.py",
        old='if filler.strip(b"\\0"):',
        new="if False:",
        test=f"{HOSTILE}::test_bits_past_the_end_of_a_stream_are_clear",
    ),
    Mutant(
        name="negative-integers-in-a-plane-of-large-ones",
        file=PLANES,
        old=RANGE,
        new="if rest.max() > largest - _HALF:",
        test=OUT_OF_RANGE,
    ),
    Mutant(
        name="integers-of-any-size-in-a-plane-of-large-ones",
        file=PLANES,
        old=RANGE,
        new="if rest.min() < 0:",
        test=OUT_OF_RANGE,
    ),
    Mutant(
        name="steps-past-the-last-in-a-plane-of-bytes",
        file=PLANES,
        old="elif rest.max() > largest - _HALF:",
        new="elif False:",
        test=OUT_OF_RANGE,
    ),
    Mutant(
        name="gaps-whose-sum-comes-round",
        file="rollout_bridge/delta/places.py",
        old="if part.max() >= size:",
        new="if False:",
        test=f"{HOSTILE}::test_gaps_whose_sum_comes_round_to_a_place_inside_the_class",
    ),
    Mutant(
        name="an-engine-takes-any-scale",
        file=TENSORS,
        old=POSITIVE,
        new="inside = torch.ones_like(scales, dtype=torch.bool)",
        test=SCALES,
    ),
    Mutant(
        name="an-engine-takes-a-scale-above-the-largest",
        file=TENSORS,
        old=POSITIVE,
        new="inside = (scales >= MINIMUM_SCALE) & (mantissas == 0.5)",
        test=SCALES,
    ),
    Mutant(
        name="an-engine-takes-a-scale-that-is-no-power-of-two",
        file=TENSORS,
        old=POSITIVE,
        new="inside = (scales >= MINIMUM_SCALE) & (scales <= MAXIMUM_SCALE)",
        test=SCALES,
    ),
    # A write that failed once.
    Mutant(
        name="a-manifest-whose-answer-was-lost-is-not-looked-for",
        file=COMMIT,
        old="        if store.read(ref.key) != data:\n            raise\n",
        new="        raise\n",
        test=f"{PUBLISHER}[delta-written]",
    ),
    Mutant(
        name="a-manifest-that-could-not-be-written-counts-as-written",
        file=COMMIT,
        old="        if store.read(ref.key) != data:\n            raise\n",
        new="",
        test=f"{PUBLISHER}[delta-not-written]",
    ),
    Mutant(
        name="the-writer-forgets-a-version-whose-head-could-not-be-moved",
        file="rollout_bridge/weights/write/writer.py",
        old="""\
        self._moved(latest, manifest, patches)
        durable()
        commit.announce(self.store, latest)
""",
        new="""\
        commit.announce(self.store, latest)
        self._moved(latest, manifest, patches)
        durable()
""",
        test=f"{PUBLISHER}[delta-not-written]",
    ),
    Mutant(
        name="a-reader-does-not-finish-a-move-that-failed",
        file=SUBSCRIBER,
        old="        self._report()\n        self.mirror.recover()\n",
        new="        self._report()\n",
        test=f"{READER}[delta-not-moved]",
    ),
    Mutant(
        name="a-journal-is-left-whose-parts-are-removed",
        file=MIRROR,
        old="            (self.directory / _JOURNAL).unlink(missing_ok=True)  # before what it names\n",
        new="",
        test=f"{READER}[delta-in-parts-moved]",
    ),
    Mutant(
        name="an-agent-ends-at-the-first-error-of-its-last-acknowledgement",
        file=AGENT,
        old="""\
                    if finished:
                        await self._acknowledge(subscriber)
                except _TROUBLE as error:
                    await self._failed(error, subscriber)
                    continue
                self._failing_since, self._failures = None, 0
""",
        new="""\
                except _TROUBLE as error:
                    await self._failed(error, subscriber)
                    continue
                self._failing_since, self._failures = None, 0
                if finished:
                    await self._acknowledge(subscriber)
""",
        test=f"{AGENTS}::test_an_acknowledgement_that_failed_is_counted_and_the_agent_goes_on",
    ),
    Mutant(
        name="a-segment-that-failed-loses-its-place",
        file="rollout_bridge/trajectories/log.py",
        old="""\
            written = self._store.create(key, data) or self._store.read(key) == data
            self._sequence += 1
""",
        new="""\
            self._sequence += 1
            written = self._store.create(key, data) or self._store.read(key) == data
""",
        test=f"{GOES_ON}::test_a_segment_is_in_the_log_once_however_often_it_is_tried",
    ),
    Mutant(
        name="a-segment-that-failed-is-tried-again-with-more-groups",
        file=WORKER,
        old="self._writing = self._writing or self._buffer[",
        new="self._writing = self._buffer[",
        test=f"{WORKERS}::test_groups_that_finish_while_a_write_fails_go_into_a_segment_of_their_own",
    ),
    Mutant(
        name="a-planner-counts-a-plan-that-was-not-written",
        file=PLANNER,
        old="        if not create_plan(self._store, plan):\n",
        new="        self._record(plan)\n        if not create_plan(self._store, plan):\n",
        test=f"{GOES_ON}::test_plans_and_credits_are_those_of_a_trainer_whose_store_never_failed",
    ),
    Mutant(
        name="plans-are-discarded-from-the-oldest",
        file="rollout_bridge/trajectories/plan.py",
        old="    for found in reversed(discarded):\n",
        new="    for found in discarded:\n",
        test=f"{GOES_ON}::test_plans_discarded_by_a_call_that_failed_leave_no_gap",
    ),
    # Others.
    Mutant(
        name="a-claim-is-moved-by-an-attempt-that-was-lost",
        file=CLAIMS,
        old="if (current.worker, current.attempt) == (claim.worker, claim.attempt):",
        new="if current.worker == claim.worker:",
        test=f"{TRAJECTORIES}/test_claims.py"
        "::test_a_claim_that_its_worker_lost_and_took_again_is_moved_by_the_second_attempt_only",
    ),
    Mutant(
        name="a-claim-forgets-who-held-it-before",
        file=CLAIMS,
        old="holders = claim.holders if self._worker in claim.holders else (*claim.holders, self._worker)",
        new="holders = (self._worker,)",
        test=f"{TRAJECTORIES}/test_claims.py::test_an_expired_claim_passes_on_what_no_segment_finished",
    ),
    Mutant(
        name="a-token-at-the-largest-lag-is-stale",
        file=GATE,
        old="for token_version, count in version_counts if lag(token_version) <= max_lag)",
        new="for token_version, count in version_counts if lag(token_version) < max_lag)",
        test=f"{TRAJECTORIES}/test_gate_sampler_groups.py::test_gate_by_hand",
    ),
    Mutant(
        name="a-trajectory-without-a-fresh-token-passes",
        file=GATE,
        old="return fresh > 0 and fresh >=",
        new="return fresh >=",
        test=f"{TRAJECTORIES}/test_gate_sampler_groups.py::test_gate_by_hand",
    ),
    Mutant(
        name="a-create-overwrites",
        file="rollout_bridge/store.py",
        old="return found is None and self.swap(key, data, generation)",
        new="return self.swap(key, data, generation)",
        test=f"{TRAJECTORIES}/test_log.py::test_two_writers_with_one_id_overwrite_nothing",
    ),
    Mutant(
        name="a-claim-is-complete-before-its-last-segment",
        file=WORKER,
        old="if not held.todo and not held.open:",
        new="if not held.todo:",
        test=f"{WORKERS}::test_a_claim_is_complete_no_sooner_than_all_of_it_is_written",
    ),
    Mutant(
        name="bytes-after-the-end-of-a-stream",
        file="rollout_bridge/delta/stream.py",
        old="    reader.end()\n    total = int(moved.sum())\n",
        new="    total = int(moved.sum())\n",
        test="tests/rollout_bridge/delta/test_hostile.py::test_every_truncation_and_extension_is_seen",
    ),
)
