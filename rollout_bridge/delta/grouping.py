"""Which of many arrays' updates share a blob.

The probabilities of a small array's update cost more to describe than they save, and its coder takes more
time than its changes. Arrays of one element width that change about as often (within a factor of four) are
therefore coded together (`group`), large ones alone (`codec`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_bridge.delta import codec, group
from rollout_bridge.delta.blob import ArrayChange

_ALONE = 1 << 20  # elements from which an array pays for its own statistics
_SPREAD = 4  # how much more often one array of a group may change than another


def together(changes: Sequence[ArrayChange]) -> list[list[int]]:
    """Which of `changes` share a blob, as ascending places in it; those that change nothing in none.

    Ordered by the first of each; of several arrays only such as `group.encode` takes.
    """
    groups: list[list[int]] = []
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, change in enumerate(changes):
        if len(change.indices) and change.size >= _ALONE:
            groups.append([place])
        elif len(change.indices):
            start = None if change.ranks is None else change.ranks.start
            alike.setdefault((change.old_values.dtype, change.old is None, start), []).append(place)
    for places in alike.values():
        groups += [sorted(members) for members in _as_often(changes, places)]
    return sorted(groups)


def encode_group(changes: Sequence[ArrayChange], *, preset: str = "small") -> bytes:
    """The blob of some that go `together`. Errors as `encode_sparse`."""
    if len(changes) > 1:
        return group.encode(changes, wide=codec.Preset(preset) is codec.Preset.fast)
    return codec.encode_change(changes[0], preset=preset)


def _as_often(changes: Sequence[ArrayChange], places: list[int]) -> list[list[int]]:
    """`places` split into groups of arrays that change about as often, from the most seldom."""
    fraction = {place: len(changes[place].indices) / changes[place].size for place in places}
    groups: list[list[int]] = []
    lowest, elements, changed = 0.0, 0, 0
    for place in sorted(places, key=fraction.__getitem__):
        size, moved = changes[place].size, len(changes[place].indices)
        elements, changed = elements + size, changed + moved
        if (
            not groups
            or fraction[place] > _SPREAD * lowest
            or len(groups[-1]) >= group.MOST_ARRAYS
            or elements > group.MOST_ELEMENTS
            or changed > group.MOST_CHANGES
        ):
            groups.append([])
            lowest, elements, changed = fraction[place], size, moved
        groups[-1].append(place)
    return groups
