"""Cores are split without overlap when there are enough, and shared when there are not."""

from __future__ import annotations

import pytest

from jaxtrain.quickstart.placement import split, thread_environment


@pytest.mark.parametrize(
    ("cores", "trainer", "expected"),
    [
        ((0, 1), 0, ((0,), (1,))),
        ((2, 5, 7), 0, ((2, 5), (7,))),
        ((0, 1, 2, 3), 3, ((0, 1, 2), (3,))),
        ((4,), 0, ((4,), (4,))),
        ((0, 1), 2, ((0, 1), (0, 1))),
    ],
)
def test_split(cores: tuple[int, ...], trainer: int, expected: object) -> None:
    assert split(cores, trainer=trainer) == expected


def test_thread_pools_match_the_cores() -> None:
    assert set(thread_environment((3, 4)).values()) == {"2"}
