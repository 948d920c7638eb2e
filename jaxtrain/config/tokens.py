"""Numbers of tokens as people write them, and values that change at a number of tokens.

    16M                    sixteen million tokens
    0: 16M, 250B: 32M      16M from the first token on, 32M from the 250 billionth on

K, M, B and T are powers of a thousand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

Number = TypeVar("Number", int, float)

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_TOKENS = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([KMBT]?)")


def parse_tokens(text: str) -> int:
    """`16M` -> 16000000; exact, so `1.5K` is 1500.

    Raises:
      ValueError: something else, or a fraction of a token.
    """
    found = _TOKENS.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text.strip()!r} is not a number of tokens; write digits, then K, M, B or T: 16M")
    tokens = Decimal(found[1].replace("_", "")) * _SUFFIXES[found[2]]
    if tokens != int(tokens):
        raise ValueError(f"{text.strip()!r} is {tokens} tokens, not a whole number")
    return int(tokens)


def parse_steps(text: str, value: Callable[[str], Number]) -> tuple[tuple[int, Number], ...]:
    """`0: A, 250B: B` -> ((0, A), (250000000000, B)): A from token 0 on, B from token 250B on.

    value: reads what is after a colon; its ValueErrors are passed on.

    Raises:
      ValueError: an entry that is not `tokens: value`, a first one not at 0, or starts that do not ascend.
    """
    steps: list[tuple[int, Number]] = []
    for entry in text.split(","):
        start, colon, rest = entry.partition(":")
        if not colon:
            raise ValueError(f"{entry.strip()!r} is not `tokens: value`, as in 0: 16M, 250B: 32M")
        steps.append((parse_tokens(start), value(rest)))
    starts = [start for start, _ in steps]
    if starts[0] != 0:
        raise ValueError(f"starts at {starts[0]} tokens; the first value must hold from 0 on")
    for before, after in zip(starts, starts[1:], strict=False):
        if after <= before:
            raise ValueError(f"{after} tokens comes after {before}; starts must ascend")
    return tuple(steps)


def parse_rate(text: str) -> float:
    """A non-negative, finite number. Raises ValueError."""
    try:
        rate = float(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not a number") from None
    if not 0 <= rate < float("inf"):
        raise ValueError(f"{text.strip()} is not in [0, inf)")
    return rate


def parse_batch(text: str) -> int:
    """A positive number of tokens. Raises ValueError."""
    tokens = parse_tokens(text)
    if tokens < 1:
        raise ValueError("a batch of 0 tokens; at least 1 is needed")
    return tokens


def rate_steps(value: float | str) -> tuple[tuple[int, float], ...]:
    """A `Rate` field as (start in tokens, value) pairs."""
    return ((0, float(value)),) if not isinstance(value, str) else parse_steps(value, parse_rate)


def _read_tokens(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_tokens(value)
    except ValueError as error:
        raise _rejection(str(error)) from None


def _check_rate(value: float | str) -> float | str:
    try:
        if isinstance(value, str):
            parse_steps(value, parse_rate)
        else:
            parse_rate(f"{value:g}")
    except ValueError as error:
        raise _rejection(f"{value!r}: {error}" if isinstance(value, str) else str(error)) from None
    return value


def _check_batches(value: str) -> str:
    try:
        parse_steps(value, parse_batch)
    except ValueError as error:
        raise _rejection(f"{value!r}: {error}") from None
    return value


def _rejection(message: str) -> PydanticCustomError:
    """An error whose message already says what was found."""
    return PydanticCustomError("own_words", "{message}", {"message": message})


Tokens = Annotated[int, BeforeValidator(_read_tokens), Field(ge=0)]
PositiveTokens = Annotated[int, BeforeValidator(_read_tokens), Field(ge=1)]
# A value for the whole phase, or one that changes at numbers of tokens: "0: 0.001, 15T: 0".
Rate = Annotated[float | str, AfterValidator(_check_rate)]
BatchSteps = Annotated[str, AfterValidator(_check_batches)]
