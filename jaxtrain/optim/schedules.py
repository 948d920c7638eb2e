"""Values as functions of tokens seen: learning rate, balance rate, loss weights.

A schedule takes the number of tokens trained on before a step and gives the value for that step. With a
Python int it is exact at every boundary and returns a float; with a traced scalar it returns a float32 array
and is as exact as the scalar (float32 counts tokens exactly only up to 2^24), so the training loop evaluates
schedules on the host and passes their values to the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Python number -> float, or traced scalar -> float32 array
Schedule = Callable[[Any], Any]


def constant(value: float) -> Schedule:
    """`value` always."""
    return piecewise([value], [])


def piecewise(values: Sequence[float], boundaries: Sequence[int]) -> Schedule:
    """values[i] before boundaries[i] tokens, the last value from the last boundary on.

    GLM-4.5's bias update rate is piecewise([0.001, 0.0], [15 * 10**12]), its MTP weight
    piecewise([0.3, 0.1], [15 * 10**12]) (arXiv 2508.06471).

    Raises:
      ValueError: not one more value than boundaries, or boundaries not ascending.
    """
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            f"piecewise: found {len(values)} values and {len(boundaries)} boundaries, expected one more value"
        )
    return _joined([_flat(value) for value in values], boundaries)


def linear(start: float, stop: float, *, start_tokens: int = 0, stop_tokens: int) -> Schedule:
    """`start` up to start_tokens, then a straight line to `stop` at stop_tokens, `stop` after.

    Raises:
      ValueError: stop_tokens before start_tokens.
    """
    return _joined(
        [_flat(start), _line(start, stop, start_tokens, stop_tokens), _flat(stop)],
        [start_tokens, stop_tokens],
    )


def warmup_cosine(*, peak: float, end: float, warmup_tokens: int, end_tokens: int) -> Schedule:
    """0 to `peak` in a straight line over the warmup, half a cosine to `end` at end_tokens, `end` after.

    GLM-4.5: peak 2.5e-4, end 2.5e-5 at the end of mid-training, warmup length unpublished (arXiv 2508.06471).

    Raises:
      ValueError: boundaries not ascending.
    """

    def cosine(tokens: Any) -> Any:
        fraction = (tokens - float(warmup_tokens)) / float(end_tokens - warmup_tokens)
        cos = math.cos if _is_number(tokens) else jnp.cos
        return end + (peak - end) * 0.5 * (1.0 + cos(math.pi * fraction))

    return _joined([_line(0.0, peak, 0, warmup_tokens), cosine, _flat(end)], [warmup_tokens, end_tokens])


def warmup_stable_decay(
    *, peak: float, end: float, warmup_tokens: int, decay_start_tokens: int, end_tokens: int
) -> Schedule:
    """WSD (arXiv 2404.06395): 0 to `peak` over the warmup, `peak` up to decay_start_tokens, a line to `end`.

    Raises:
      ValueError: boundaries not ascending.
    """
    return _joined(
        [
            _line(0.0, peak, 0, warmup_tokens),
            _flat(peak),
            _line(peak, end, decay_start_tokens, end_tokens),
            _flat(end),
        ],
        [warmup_tokens, decay_start_tokens, end_tokens],
    )


def named(
    kind: str,
    *,
    peak: float,
    final: float = 0.0,
    warmup_tokens: int = 0,
    total_tokens: int | None = None,
    decay_tokens: int | None = None,
) -> Schedule:
    """The learning rate that a configuration names: 0 to `peak` over the warmup, then by kind.

    "constant" stays at `peak`; "linear" and "cosine" reach `final` at total_tokens; "wsd" stays up to
    decay_tokens before total_tokens, then falls in a line to `final`.

    Raises:
      ValueError: unknown kind, or a length missing that the kind needs.
    """
    kinds = ("constant", "linear", "cosine", "wsd")
    if kind not in kinds:
        raise ValueError(f"schedule kind: found {kind!r}, expected one of {kinds}")
    if kind == "constant":
        return linear(0.0, peak, stop_tokens=warmup_tokens)
    if total_tokens is None or (kind == "wsd" and decay_tokens is None):
        raise ValueError(f"schedule {kind}: needs total_tokens, and wsd decay_tokens; set them")
    if kind == "cosine":
        return warmup_cosine(peak=peak, end=final, warmup_tokens=warmup_tokens, end_tokens=total_tokens)
    decay_start = warmup_tokens if kind == "linear" or decay_tokens is None else total_tokens - decay_tokens
    return warmup_stable_decay(
        peak=peak,
        end=final,
        warmup_tokens=warmup_tokens,
        decay_start_tokens=decay_start,
        end_tokens=total_tokens,
    )


def _flat(value: float) -> Schedule:
    return lambda tokens: float(value)


def _line(start: float, stop: float, start_tokens: int, stop_tokens: int) -> Schedule:
    length = float(stop_tokens - start_tokens)
    return lambda tokens: start + (stop - start) * ((tokens - float(start_tokens)) / length)


def _is_number(tokens: Any) -> bool:
    return not isinstance(tokens, jax.Array)


def _joined(pieces: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """pieces[i] holds from boundaries[i - 1] on and before boundaries[i]; an empty piece is never used."""
    if any(b < 0 for b in boundaries) or any(b < a for a, b in zip(boundaries, boundaries[1:], strict=False)):
        raise ValueError(
            f"schedule: found boundaries {list(boundaries)} tokens, expected none negative and each at or "
            "after the one before"
        )
    starts = [0, *boundaries]
    used = [
        (start, piece)
        for start, stop, piece in zip(starts, [*boundaries, None], pieces, strict=True)
        if start != stop
    ]

    def schedule(tokens: Any) -> Any:
        if _is_number(tokens):
            return float(
                next((piece for start, piece in reversed(used) if tokens >= start), used[0][1])(tokens)
            )
        # As float32: a boundary of trillions does not fit the integers of a traced scalar.
        tokens = tokens.astype(jnp.float32)
        value = jnp.asarray(used[0][1](tokens), jnp.float32)
        for start, piece in used[1:]:
            value = jnp.where(tokens >= float(start), piece(tokens), value)
        return value.astype(jnp.float32)

    return schedule
