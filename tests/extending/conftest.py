"""The examples are found by every test here, as beside their config files."""

import sys

import jax
import pytest

from rollout_bridge.references import INHERITED, search_path
from tests.extending.examples import EXAMPLES


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(INHERITED, "")
    search_path(EXAMPLES)


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling for eight devices would take most of the time, and tests of meshes are elsewhere."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
