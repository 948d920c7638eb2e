"""Timing decides no property test, whatever its own settings say of other things."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

SECONDS = 0.25  # more than hypothesis's own deadline of 0.2 s


def held_up(number: int) -> int:
    """Drawn slowly, as by a process that others keep from the processor."""
    time.sleep(SECONDS)
    return number


@settings(max_examples=2)
@given(st.integers(0, 9))
def test_an_example_that_is_held_up_fails_nothing(number):
    held_up(number)


@settings(max_examples=6)
@given(st.integers(0, 9).map(held_up))
def test_drawing_that_is_held_up_fails_nothing(number):
    assert 0 <= number <= 9
