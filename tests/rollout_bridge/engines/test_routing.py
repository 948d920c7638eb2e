"""Reports of routed experts that no router can have made."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_bridge.engines.routing import implausible

TOKENS, LAYERS, K, EXPERTS = 12, 3, 2, 8


def chosen() -> np.ndarray:
    """Two different experts a token and layer; the last token's are not known."""
    random = np.random.default_rng(0)
    rows = [random.permutation(EXPERTS)[:K] for _ in range(TOKENS * LAYERS)]
    experts = np.array(rows, np.int16).reshape(TOKENS, LAYERS, K)
    experts[-1] = -1
    return experts


def changed(at, value) -> np.ndarray:
    experts = chosen()
    experts[at] = value
    return experts


def test_choices_of_a_router_are_plausible():
    assert implausible(chosen(), tokens=TOKENS, num_experts=EXPERTS) == ""
    one = np.arange(TOKENS * LAYERS, dtype=np.int16).reshape(TOKENS, LAYERS, 1) % EXPERTS
    assert implausible(one, tokens=TOKENS, num_experts=EXPERTS) == ""
    assert implausible(np.full((TOKENS, LAYERS, K), -1, np.int16), tokens=TOKENS) == ""
    assert implausible(np.zeros((TOKENS, 0, K), np.int16), tokens=TOKENS) == ""
    same = np.tile(np.int16([[3, 1]]), (8, LAYERS, 1))
    assert implausible(same, tokens=8) == "", "a few tokens may agree"


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        (np.zeros((TOKENS, LAYERS, K), np.int16), "the same expert twice"),
        (np.zeros((TOKENS, LAYERS, 1), np.int16), r"all tokens have experts \[0\] in every layer"),
        (np.tile(np.int16([[0, 1]]), (TOKENS, LAYERS, 1)), r"all tokens have experts \[0, 1\]"),
        (chosen()[:-3], r"their shape is \[9, 3, 2\], expected \[12, layers, k\]"),
        (chosen()[0], "their shape is"),
        (changed((4, 1), [5, EXPERTS]), r"ids are in \[-1, 8\], expected -1 to 7"),
        (changed((4, 1), [5, -2]), "ids are in"),
        (changed((4, 1), [5, -1]), "some of its experts only"),
    ],
)
def test_what_no_router_chose_is_named(experts, problem):
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(implausible(experts, tokens=TOKENS, num_experts=EXPERTS))
