"""Nothing the other side wrote is trusted: every way a manifest, a pointer or a run can be wrong is named."""

import json

import pytest
from pydantic import ValidationError

from rollout_bridge.store import Store, StoreError
from rollout_bridge.weights.format import chain
from rollout_bridge.weights.format import run as runs
from rollout_bridge.weights.format.manifest import (
    BrokenVersion,
    Latest,
    Manifest,
    ManifestRef,
    parse_version_key,
    version_directory,
)
from rollout_bridge.weights.format.run import RunError
from tests.rollout_bridge.weights import tiny

PIECE = {"key": "00000-00000.blob", "offset": 0, "length": 3, "hash": "0" * 32, "rectangle": [[0, 4], [0, 2]]}
VALID = {
    "format_version": 3,
    "run_id": "a" * 32,
    "version": 2,
    "incarnation": 1,
    "step": 7,
    "kind": "full",
    "parent": {"version": 1, "incarnation": 1, "hash": "b" * 64},
    "tensors": {"w": {"dtype": "BF16", "shape": [4, 2], "digest": "0" * 16, "blobs": [PIECE]}},
    "stats": {"delta_bytes": 3, "reference_bytes": 2.5, "full_bytes_bf16": 16, "changed_fraction": 0.5},
    "attempt": "7-1",
}


def edited(**changes):
    """VALID with `path__to__field=value`."""
    data = json.loads(json.dumps(VALID))
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = data
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        place[last] = value
    return data


def test_a_manifest_survives_its_bytes():
    manifest = Manifest.model_validate(VALID)
    again = Manifest.from_bytes(manifest.to_bytes(), manifest.ref)
    assert again == manifest and again.to_bytes() == manifest.to_bytes()
    entry = again.tensors["w"]
    assert entry.blobs[0].shape == (4, 2) and entry.digest_value == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "delta", "parent": None}, "a delta names the version"),
        ({"parent__version": 3}, "parent of version 2 is version 3"),
        ({"tensors__w__dtype": "I64"}, "dtype 'I64' is not one of"),
        ({"tensors__w__shape": [4, 1]}, "does not lie in"),
        ({"tensors__w__shape": [8, 2]}, "hold 8 elements, the tensor has 16"),
        ({"tensors__w__blobs": []}, "hold 0 elements, the tensor has 8"),
        ({"tensors__w__blobs": [PIECE, PIECE]}, "hold 16 elements, the tensor has 8"),
        ({"tensors__w__blobs": [PIECE | {"key": "../../../run.json"}]}, "pattern"),
        ({"tensors__w__blobs": [PIECE | {"offset": -1}]}, "greater than or equal to 0"),
        ({"tensors__w__blobs": [PIECE | {"rectangle": [[3, 3], [0, 2]]}]}, "does not lie in"),
        ({"tensors__w__digest": "zz"}, "pattern"),
        ({"run_id": "/etc/passwd"}, "pattern"),
        ({"format_version": 2}, "format_version"),
        ({"stats__changed_fraction": float("nan")}, "finite"),
        ({"surprise": 1}, "surprise"),
        ({"version": 0}, "version"),
    ],
)
def test_a_wrong_manifest_is_refused(change, message):
    with pytest.raises(ValidationError, match=message):
        Manifest.model_validate(edited(**change))


def test_bytes_that_are_not_the_named_manifest_are_refused():
    manifest = Manifest.model_validate(VALID)
    data = manifest.to_bytes()
    with pytest.raises(BrokenVersion, match=r"SHA-256 .*, expected"):
        Manifest.from_bytes(data + b" ", manifest.ref)
    elsewhere = manifest.ref.model_copy(update={"version": 3})
    with pytest.raises(BrokenVersion, match="says version 2, incarnation 1"):
        Manifest.from_bytes(data, elsewhere)


def test_version_keys_sort_by_version_and_parse_back():
    assert version_directory(9, 1) < version_directory(10, 0) < version_directory(10, 2)
    assert parse_version_key(version_directory(12, 3) + "manifest.json") == (12, 3)
    assert parse_version_key("weights/versions/x/1/manifest.json") is None
    assert parse_version_key("weights/latest") is None


def test_a_pointer_must_agree_with_its_manifest():
    ref = ManifestRef(version=2, incarnation=1, hash="a" * 64)
    with pytest.raises(ValidationError, match="disagree"):
        Latest(version=3, incarnation=1, step=0, manifest=ref, full=ref)
    with pytest.raises(ValidationError, match="full version it starts from"):
        Latest(version=2, incarnation=1, step=0, manifest=ref)
    assert Latest(version=0, incarnation=1, step=0).manifest_hash is None
    store = Store.open("memory://pointer")
    store.put("weights/latest", b'{"version": "two"}')
    with pytest.raises(StoreError, match="weights/latest is not a pointer"):
        chain.read_latest(store)


def test_a_run_is_created_once_and_joined_by_the_same_model(tmp_path):
    store = Store.open(f"memory://{tmp_path.name}")
    assert runs.load(store) is None
    first = tiny.new_run()
    assert runs.create_or_join(store, first) == first
    joined = runs.create_or_join(store, tiny.new_run())
    assert joined.run_id == first.run_id and joined == first
    assert runs.load(store) == first
    other = runs.RunInfo.new(tiny.CONFIG | {"rope_theta": 1.0}, first.plan)
    with pytest.raises(RunError, match=r"another model configuration \(rope_theta\)"):
        runs.create_or_join(store, other)
    other = runs.RunInfo.new(tiny.CONFIG, first.plan, tokenizer={"tokenizer.json": '{"version": "1.1"}'})
    assert other.fingerprint != first.fingerprint, "the same token id would mean another text"
    with pytest.raises(RunError, match=r"another tokenizer \(tokenizer\.json\)"):
        runs.create_or_join(store, other)


def test_the_incarnation_only_rises(tmp_path):
    store = tiny.open_store(tmp_path.name)
    assert runs.move_incarnation(store, 3).incarnation == 3
    assert runs.move_incarnation(store, 2).incarnation == 3
    loaded = runs.load(store)
    assert loaded is not None and loaded.incarnation == 3
    with pytest.raises(RunError, match="missing; create the run"):
        runs.move_incarnation(Store.open(f"memory://{tmp_path.name}-empty"), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 9}, "format_version is 9, this program reads 2"),
        ({"hf_config": []}, "hf_config is"),
        ({"hf_config": {}}, "hf_config: model_type: None is not a name"),
        (
            {"hf_config": {"jaxtrain_architecture": "no_such:X"}},
            "jaxtrain_architecture: .* cannot import no_such",
        ),
        ({"tokenizer": {"../x": "y"}}, "plain file names"),
        ({"quantization_plan": {}}, "quantization_plan"),
        ({"fingerprint": "0"}, "does not belong to its hf_config, plan and tokenizer"),
    ],
)
def test_a_wrong_run_is_refused(change, message):
    with pytest.raises(RunError, match=message):
        runs.RunInfo.from_json(tiny.new_run().to_json() | change)
