"""Errors and warnings of this package."""

from __future__ import annotations


class ShardingError(ValueError):
    """A mesh, rule or placement that cannot work; the message names the parameter, the axis and the sizes."""


class ProcessesError(RuntimeError):
    """A wait for other processes failed; the message names what was waited for and for how long."""


class UnusedAxisWarning(UserWarning):
    """A mesh axis larger than one shards nothing, so every device along it holds the same bytes."""
