"""Versions that evaluation requests hold until the requests are answered."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from rollout_bridge.control import EVALUATIONS_PREFIX
from rollout_bridge.store import Store, StoreError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pin:
    """Evaluation `id` needs `version` served until it has a result or `expires` (unix seconds) has passed."""

    id: str
    version: int
    expires: float


def active_pins(store: Store, *, now: float) -> list[Pin]:
    """Requests without a result that have not expired. A malformed one is logged and ignored."""
    pins = []
    for key in store.list(EVALUATIONS_PREFIX):
        match = re.fullmatch(re.escape(EVALUATIONS_PREFIX) + r"([A-Za-z0-9_-][A-Za-z0-9._-]*)\.json", key)
        pin = _parse(store, key, match[1]) if match else None
        if pin is None:
            logger.warning("%s%s: not an evaluation request; ignored", store.url, key)
        elif pin.expires > now and store.read(f"evaluations/{pin.id}/result.json") is None:
            pins.append(pin)
    return pins


def _parse(store: Store, key: str, name: str) -> Pin | None:
    try:
        data = store.read_json(key)
    except StoreError as error:
        logger.warning("%s", error)
        return None
    if not isinstance(data, dict):
        return None
    version, expires = data.get("version"), data.get("expires")
    if not isinstance(version, int) or not isinstance(expires, int | float):
        return None
    return Pin(name, version, float(expires))
