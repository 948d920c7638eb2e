"""Conversations as documents: the tokenizer's chat template, with loss on what the assistant wrote.

Which tokens those are is found by comparing token ids of the template's renderings, never by searching text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Message = Mapping[str, Any]
ASSISTANT = "assistant"


class ChatError(ValueError):
    """A conversation that the template cannot render, or that has nothing to learn."""


@dataclass(frozen=True)
class Rendered:
    """tokens int32 [T]. learnt bool [T]: tokens of the assistant's turns, the end of each turn included."""

    tokens: np.ndarray
    learnt: np.ndarray


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    last_only: bool = False,
    **template: Any,
) -> list[Rendered]:
    """The conversation as few sequences, in each of which a turn stands as it does when it is generated.

    That is one sequence for most templates. A template that shows an earlier turn differently later, as those
    do that drop its reasoning, gives one more sequence for each such turn. last_only: learn the last turn
    alone. template: further variables of the template.

    Raises `ChatError`.
    """
    turns = [number for number, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if not turns:
        raise ChatError("no message has the role assistant, so there is nothing to learn")

    def rendered(count: int, *, prompt: bool, tokenize: bool) -> Any:
        try:
            return tokenizer.apply_chat_template(
                list(messages[:count]),
                tools=tools,
                add_generation_prompt=prompt,
                tokenize=tokenize,
                return_dict=False,
                **template,
            )
        except Exception as error:  # the template's own errors, of any class
            raise ChatError(f"the chat template refuses messages 0 to {count - 1}: {error}") from error

    sequences: list[tuple[list[int], np.ndarray]] = []
    special = set(tokenizer.all_special_ids)
    for turn in reversed(turns[-1:] if last_only else turns):
        before = list(rendered(turn, prompt=True, tokenize=True))
        after = list(rendered(turn + 1, prompt=False, tokenize=True))
        start = len(before)
        if after[:start] != before:  # a token spans the border, or the template is at fault
            asked = rendered(turn, prompt=True, tokenize=False)
            answered = rendered(turn + 1, prompt=False, tokenize=False)
            if not answered.startswith(asked):
                raise ChatError(
                    f"message {turn}: what the template adds to ask for an answer is no beginning of its turn"
                )
            after = [*before, *tokenizer.encode(answered[len(asked) :], add_special_tokens=False)]
        after = _through_end(tokenizer, after, start, special)
        if after[-1] not in special:  # the template ends a turn by the next message's role, or by nothing
            following = [tokens[len(after)] for tokens, _ in sequences if tokens[: len(after)] == after]
            after = [*after, *(following[:1] if {*following[:1]} & special else [tokenizer.eos_token_id])]
        learnt = next((mask for tokens, mask in sequences if tokens[: len(after)] == after), None)
        if learnt is None:
            learnt = np.zeros(len(after), bool)
            sequences.append((after, learnt))
        learnt[start : len(after)] = True
    return [Rendered(np.asarray(tokens, np.int32), learnt) for tokens, learnt in reversed(sequences)]


def _through_end(tokenizer: Any, tokens: list[int], start: int, special: set[int]) -> list[int]:
    """Without the white space that a template has after the token that ends a turn."""
    for at in range(len(tokens) - 1, start - 1, -1):
        if tokens[at] in special:
            return tokens[: at + 1]
        if tokenizer.decode(tokens[at:]).strip():
            break
    return tokens
