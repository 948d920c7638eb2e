"""Evaluation requests of the trainer, as far as weights care: hold one version until they are answered."""

from __future__ import annotations

from rollout_bridge.control import EVALUATIONS_PREFIX, EvaluationRequest, readable
from rollout_bridge.store import Store


def active_pins(store: Store, *, now: float) -> list[EvaluationRequest]:
    """Requests without a result that have not expired. A malformed one is logged and ignored."""
    return [
        request
        for request in readable(store, EvaluationRequest, EVALUATIONS_PREFIX)
        if request.expires > now and store.read(request.result_key) is None
    ]
