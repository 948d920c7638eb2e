"""The base of the errors that a command shows without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ExpectedError(Exception):
    """Something outside the program is wrong. The message alone says what, where and what to do."""


def guess(found: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name that is nearest to `found`, "" if none is near."""
    near = difflib.get_close_matches(found, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
