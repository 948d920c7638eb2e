"""Mutants of the weight chain: publishing, reading, the mirror and its agent, and the store below."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TESTS = "tests/rollout_bridge/weights"
_PUBLISHER, _SUBSCRIBER = (
    f"{_TESTS}/write/test_publisher_faults.py",
    f"{_TESTS}/read/test_subscriber_faults.py",
)

MUTANTS = (
    Mutant(
        name="baseline-before-durable",
        file="rollout_bridge/weights/write/writer.py",
        old="        ref = commit.create_manifest(self.store, manifest)\n",
        new="        durable()\n        ref = commit.create_manifest(self.store, manifest)\n",
        test=f"{_PUBLISHER}::test_a_publication_that_failed_before_its_manifest_may_be_tried_again",
    ),
    Mutant(
        name="begin-without-announcing",
        file="rollout_bridge/weights/write/writer.py",
        old="        commit.announce(self.store, head)  # also finishes a move whose answer was lost\n",
        new="",
        test=f"{_PUBLISHER}::test_after_one_failed_write_the_same_trainer_goes_on_from_what_is_durable"
        "[latest-False]",
    ),
    Mutant(
        name="waiting-not-failed-with-flight",
        file="rollout_bridge/weights/write/latest_wins.py",
        old="                waiting.ticket.future.set_exception(error)\n",
        new="                pass\n",
        test=f"{_PUBLISHER}::test_a_publication_that_waits_fails_with_the_one_in_flight",
    ),
    Mutant(
        name="foreign-manifest-accepted",
        file="rollout_bridge/weights/write/commit.py",
        old="if not created and store.read(ref.key) != data:",
        new="if not created and store.read(ref.key) is None:",
        test=f"{_PUBLISHER}::test_a_manifest_that_another_wrote_is_never_taken_for_this_trainers",
    ),
    Mutant(
        name="own-manifest-refused",
        file="rollout_bridge/weights/write/commit.py",
        old="if not created and store.read(ref.key) != data:",
        new="if not created:",
        test=f"{_PUBLISHER}::test_a_manifest_that_the_store_took_and_then_refused_again_is_this_trainers",
    ),
    Mutant(
        name="run-incarnation-ignored",
        file="rollout_bridge/weights/write/commit.py",
        old="incarnation = max(current.incarnation, joined.incarnation) + 1",
        new="incarnation = current.incarnation + 1",
        test=f"{_PUBLISHER}::test_whatever_the_pointer_says_no_incarnation_of_a_run_is_used_twice[stale]",
    ),
    Mutant(
        name="run-incarnation-ignored-without-pointer",
        file="rollout_bridge/weights/write/commit.py",
        old="Latest(version=0, incarnation=joined.incarnation + 1, step=0, owner=owner)",
        new="Latest(version=0, incarnation=1, step=0, owner=owner)",
        test=f"{_PUBLISHER}::test_whatever_the_pointer_says_no_incarnation_of_a_run_is_used_twice[missing]",
    ),
    Mutant(
        name="chain-bytes-lost-on-restart",
        file="rollout_bridge/weights/write/writer.py",
        old="        self._chain_bytes = sum(link.nbytes for link in links[1:])\n",
        new="",
        test=f"{_PUBLISHER}::test_a_restarted_trainer_cuts_the_chain_where_one_that_ran_on_does",
    ),
    Mutant(
        name="intermediate-digest-unchecked",
        file="rollout_bridge/weights/format/chain.py",
        old="        _check_digest(ref, name, current_digest, entry.digest_value)\n",
        new="        if link is links[-1]:\n"
        "            _check_digest(ref, name, current_digest, entry.digest_value)\n",
        test=f"{_SUBSCRIBER}::test_a_digest_that_its_blobs_do_not_lead_to_is_caught_before_the_mirror_moves"
        "[wrong-digest-3]",
    ),
    Mutant(
        name="digest-moved-without-blob",
        file="rollout_bridge/weights/read/subscriber.py",
        old="            if last.manifest.tensors[name].digest_value != view.state.digests[name]:\n",
        new="            if False:\n",
        test=f"{_SUBSCRIBER}::test_a_digest_that_its_blobs_do_not_lead_to_is_caught_before_the_mirror_moves"
        "[no-blobs-2]",
    ),
    Mutant(
        name="disk-never-digested-in-turn",
        file="rollout_bridge/weights/read/subscriber.py",
        old="key=lambda name: (name not in changed, self._turn.get(name, 0))",
        new="key=lambda name: name not in changed",
        test=f"{_SUBSCRIBER}::test_rot_in_a_tensor_that_never_changes_is_found_in_a_few_updates",
    ),
    Mutant(
        name="half-changed-bits-believed",
        file="rollout_bridge/weights/read/mirror.py",
        old="        except Exception:\n            self._view = None\n            raise\n",
        new="        except Exception:\n            raise\n",
        test=f"{_SUBSCRIBER}::test_a_reader_stopped_at_any_moment_of_an_update_is_one_version_again"
        "[OSError-False-write_whole]",
    ),
    Mutant(
        name="garbage-manifest-last",
        file="rollout_bridge/weights/write/garbage.py",
        old='key=lambda key: not key.endswith("/manifest.json")',
        new='key=lambda key: key.endswith("/manifest.json")',
        test=f"{_TESTS}/write/test_garbage.py"
        "::test_whenever_a_collection_dies_a_manifest_still_there_has_every_blob_it_names",
    ),
    Mutant(
        name="journal-not-synced",
        file="rollout_bridge/weights/read/journal.py",
        old="with whole_file(path, durable=True) as file:",
        new="with whole_file(path) as file:",
        test=f"{_TESTS}/read/test_durability.py"
        "::test_what_a_mirror_would_recover_from_is_on_disk_before_it_is_needed[delta]",
    ),
    Mutant(
        name="file-synced-before-it-is-written",
        file="rollout_bridge/files.py",
        old="""\
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
""",
        new="""\
            if durable:
                file.flush()
                os.fsync(file.fileno())
            yield file
""",
        test=f"{_TESTS}/read/test_durability.py"
        "::test_what_a_mirror_would_recover_from_is_on_disk_before_it_is_needed[delta]",
    ),
    Mutant(
        name="name-of-a-file-not-synced",
        file="rollout_bridge/files.py",
        old="        raise\n    if durable:\n        sync_directory(path.parent)\n",
        new="        raise\n",
        test=f"{_TESTS}/read/test_durability.py"
        "::test_what_a_mirror_would_recover_from_is_on_disk_before_it_is_needed[delta]",
    ),
    Mutant(
        name="bits-not-synced",
        file="rollout_bridge/weights/read/mirror.py",
        old="        data.flush()\n",
        new="",
        test=f"{_TESTS}/read/test_durability.py"
        "::test_what_a_mirror_would_recover_from_is_on_disk_before_it_is_needed[delta]",
    ),
    Mutant(
        name="engine-never-suspect",
        file="rollout_bridge/agent.py",
        old="        self._engine_suspect = True\n",
        new="",
        test="tests/rollout_bridge/test_agent.py"
        "::test_an_engine_that_failed_after_it_took_the_new_version_gets_every_tensor_again",
    ),
    Mutant(
        name="stale-reads-not-proved",
        file="rollout_bridge/store.py",
        old='            if found != b"third":\n',
        new="            if found is None:\n",
        test="tests/rollout_bridge/test_store.py::test_a_store_that_ignores_conditions_is_refused",
    ),
)
