"""What the recipes' tests share."""

import jax
import pytest


@pytest.fixture(scope="module")
def one_device():
    """Compiling for eight devices would take most of the time, and tests of meshes are elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        one = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda *_: one)
        yield
