"""One mutation of the source, and the test that must fail with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """name: of the fault that is put in. file: from the repository's root.

    old: text that occurs exactly once in the file, replaced by `new`. test: pytest arguments, node ids where
    possible; they pass as the source stands and must fail with the mutation.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
