"""The base of the errors that a command shows without a traceback."""

from __future__ import annotations


class ExpectedError(Exception):
    """Something outside the program is wrong. The message alone says what, where and what to do."""
