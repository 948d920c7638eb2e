"""Versions that evaluation requests hold until the requests are answered."""

from __future__ import annotations

from rollout_bridge.control import (
    EVALUATIONS_PREFIX,
    EvaluationClaim,
    EvaluationRequest,
    RecordError,
    read,
    readable,
)
from rollout_bridge.store import Store
from rollout_bridge.waiting import Unchanged


def unanswered(store: Store) -> list[EvaluationRequest]:
    """Requests without a result, expired or not. A malformed one is logged and ignored."""
    requests = readable(store, EvaluationRequest, EVALUATIONS_PREFIX)
    return [request for request in requests if store.read(request.result_key) is None]


def pins_of(store: Store, agent: str, *, unchanged: Unchanged) -> list[EvaluationRequest]:
    """Requests that hold `agent`: not answered, not expired, and not claimed for another agent."""
    return [
        request
        for request in unanswered(store)
        if unchanged.seconds(request.key, request) < request.expires_after
        and _may_be_of(store, request, agent, unchanged)
    ]


def _may_be_of(store: Store, request: EvaluationRequest, agent: str, unchanged: Unchanged) -> bool:
    try:
        claim = read(store, EvaluationClaim, request.claim_key)
    except RecordError:
        return True
    if claim is None or claim.agent in ("", agent):
        return True
    return unchanged.seconds(claim.key, claim) >= claim.lease_seconds
