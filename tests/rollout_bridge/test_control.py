"""What one process writes another reads as the same record, and nothing else passes for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_bridge import control
from rollout_bridge.control import (
    Ack,
    Credits,
    EvaluationClaim,
    EvaluationRequest,
    EvaluationResult,
    RecordError,
    Refusals,
    RunState,
)
from rollout_bridge.store import Store, to_json_bytes

RECORDS: dict[str, control.Record] = {
    "control/state.json": RunState(phase="rl", step=12, rl_step=2, version=7, time=1.5),
    "control/credits.json": Credits(groups=64),
    "control/refused/w-1.json": Refusals(writer="w-1", segments=1, segment="x", reason="hot"),
    "control/evaluations/rl-2.json": EvaluationRequest(
        id="rl-2", version=7, prompts=(0, 200), expires_after=9.0
    ),
    "evaluations/rl-2/claim.json": EvaluationClaim(
        id="rl-2", worker="w-1", agent="host-1", lease_seconds=9.0
    ),
    "evaluations/rl-2/result.json": EvaluationResult(
        id="rl-2", version=7, prompts=(0, 200), count=199, failed=1, reward_mean=-0.5, truncated=3,
        components={"exact": 0.25}, mean_tokens=31.0, worker="worker-0", time=3.0,
    ),
    "weights/acks/host-1.json": Ack(
        agent="host-1", version=None, incarnation=None, time=3.0, updates=0, pause_ms=(1.5, 2.0),
        verified_tensors=0, fallbacks=0, setbacks=0, broken_versions=0, errors=1, last_error="no route",
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", RECORDS)
def test_a_record_is_read_back_from_the_key_that_the_store_documents(key: str, tmp_path: Any) -> None:
    """The keys are those of docs/architecture.md."""
    store, record = Store.open(f"memory://{tmp_path.name}"), RECORDS[key]
    assert control.read(store, type(record), key) is None
    store.put_json(record.key, record.to_json())
    assert store.list() == [key]
    assert control.read(store, type(record), key) == record


@pytest.mark.parametrize(
    ("key", "field"), [(key, field) for key, r in RECORDS.items() for field in r.to_json()]
)
def test_a_wrong_field_is_named_with_its_key_and_value(key: str, field: str) -> None:
    value = RECORDS[key].to_json() | {field: {"odd": 1}}
    if field == "components":
        value[field] = {"exact": "odd"}
    with pytest.raises(
        RecordError, match=rf"^{key} is no {type(RECORDS[key]).__name__}: {field}.*found .*odd"
    ):
        type(RECORDS[key]).parse(key, to_json_bytes(value))


@pytest.mark.parametrize(
    ("key", "changed", "problem"),
    [
        ("control/credits.json", {"groups": -1}, r"groups: found '-1', expected: .*greater than"),
        ("control/credits.json", {"groups": True}, r"groups: found 'True', expected: .*integer"),
        ("control/credits.json", {"groups": "3"}, r"groups: found '3', expected: .*integer"),
        ("control/credits.json", {"more": 3}, r"more: found '3', expected: Extra"),
        ("control/state.json", {"phase": ""}, r"phase: found ''"),
        ("control/evaluations/rl-2.json", {"prompts": [4, 4]}, r"prompts \[4, 4\] are \[start, stop\)"),
        ("control/evaluations/rl-2.json", {"prompts": [4]}, r"prompts\.1: .*Field required"),
        ("control/evaluations/rl-2.json", {"purpose": "train"}, r"purpose: found 'train'"),
        ("control/evaluations/rl-2.json", {"id": "../rl-2"}, r"id: found '\.\./rl-2'"),
        ("control/evaluations/rl-2.json", {"id": "rl-3"}, r"holds the EvaluationRequest of .*rl-3\.json"),
        ("weights/acks/host-1.json", {"pause_ms": [1.0, -1.0]}, r"pause_ms\.1: found '-1\.0'"),
    ],
)  # fmt: skip
def test_what_no_record_of_that_key_says_is_refused(key: str, changed: dict[str, Any], problem: str) -> None:
    value = RECORDS[key].to_json() | changed
    with pytest.raises(RecordError, match=problem):
        type(RECORDS[key]).parse(key, to_json_bytes(value))


@pytest.mark.parametrize("key", RECORDS)
def test_a_missing_field_is_named_unless_it_has_a_default(key: str) -> None:
    for field in RECORDS[key].to_json():
        value = RECORDS[key].to_json()
        del value[field]
        if field in ("purpose", "error", "renewals"):
            assert type(RECORDS[key]).parse(key, to_json_bytes(value)) == RECORDS[key]
            continue
        with pytest.raises(RecordError, match=rf"{field}: .*Field required"):
            type(RECORDS[key]).parse(key, to_json_bytes(value))


@given(st.one_of(st.binary(), st.recursive(st.none() | st.integers(), lambda v: st.lists(v)).map(json.dumps)))
def test_other_bytes_are_refused_and_never_end_in_another_error(data: bytes | str) -> None:
    for key, record in RECORDS.items():
        with pytest.raises(RecordError):
            type(record).parse(key, data.encode() if isinstance(data, str) else data)


def test_of_many_the_readable_ones_are_read_and_the_others_logged(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(f"memory://{tmp_path.name}")
    good = RECORDS["weights/acks/host-1.json"]
    store.put_json(good.key, good.to_json())
    store.put("weights/acks/torn.json", b"{")
    assert list(control.readable(store, Ack, control.ACKS_PREFIX)) == [good]
    assert "weights/acks/torn.json is no Ack" in caplog.text
