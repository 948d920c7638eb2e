"""What the trainer's rows say of its publications."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from jaxtrain.rl.publication import Publications

from jaxtrain.config.fleet import WeightSection
from rollout_bridge.weights.format.manifest import Latest


def test_what_gave_way_is_counted_before_the_first_version_is_out() -> None:
    """The first publication of a start compiles and takes long; a trainer may be stopped before it ends."""
    head = Latest(version=0, step=0, incarnation=2, owner="me")
    publisher: Any = SimpleNamespace(last=None, head=head, counters=Counter(overtaken=3))
    found = Publications(SimpleNamespace(), publisher, WeightSection(), head, version=2).metrics()
    assert (found["version"], found["incarnation"], found["versions_overtaken"]) == (2, 2, 3)
    assert "delta_bytes" not in found and "publish_milliseconds" not in found  # of a version that is out
