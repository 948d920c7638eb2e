"""Errors of a model's directory, reported together."""

from __future__ import annotations

from pathlib import Path

from rollout_bridge.errors import ExpectedError


class HuggingFaceError(ExpectedError, ValueError):
    """A directory cannot be imported; every problem is a line of the message and an entry of `problems`."""

    def __init__(self, directory: Path, problems: list[str]) -> None:
        self.problems = problems
        heading = f"{directory}: {len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n  ".join([heading, *problems]))
