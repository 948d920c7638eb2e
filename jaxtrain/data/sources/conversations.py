"""Documents from conversations: loss on what the assistant wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxtrain.config.errors import ConfigError
from jaxtrain.data.packing import Document
from jaxtrain.data.records import BrokenRecord, Record
from jaxtrain.data.sources.base import Documents, SourceTools
from jaxtrain.data.sources.files import FileDocuments, Files
from jaxtrain.data.transforms.chat import ChatError, render


@dataclass(frozen=True, kw_only=True)
class Conversations(Files):
    """Records with `messages`, or with `prompt` and `completion`, each a text or a list of messages.

    A message is {"role", "content"}, with "tool_calls" where a template knows them. `tools` of a record are
    the functions offered, `chat_template_kwargs` further variables of the template. loss_on: every turn of
    the assistant, or the last one.
    """

    loss_on: Literal["assistant", "last"] = "assistant"

    def open(self, tools: SourceTools) -> Documents:
        tokenizer = tools.tokenizer
        if not tokenizer.chat_template:
            raise ConfigError(
                [
                    "tokenizer.path: it has no chat template, which conversations need; name that of an "
                    "instruct model, or add chat_template.jinja beside tokenizer.json"
                ]
            )

        def made(record: Record, where: str) -> list[Document]:
            messages, prompted = messages_of(record, where)
            try:
                rendered = render(
                    tokenizer,
                    messages,
                    tools=_read(record.get("tools"), where),
                    last_only=self.loss_on == "last" or prompted,
                    **(record.get("chat_template_kwargs") or {}),
                )
            except ChatError as error:
                raise BrokenRecord(f"{where}: {error}") from error
            return [
                Document(tokens=one.tokens, loss_weights=one.learnt.astype(np.float32), origin=where)
                for one in rendered
            ]

        return FileDocuments(self, made)


def messages_of(record: Record, where: str) -> tuple[list[Mapping[str, Any]], bool]:
    """The messages of a record, and whether they are a prompt and its completion."""
    if "messages" in record:
        return _messages(record["messages"], "messages", where), False
    if "prompt" in record and "completion" in record:
        prompt, completion = (
            [{"role": role, "content": record[name]}]
            if isinstance(record[name], str)
            else _messages(record[name], name, where)
            for name, role in (("prompt", "user"), ("completion", "assistant"))
        )
        return [*prompt, *completion], len(completion) == 1
    raise BrokenRecord(
        f"{where}: neither messages nor prompt and completion; it has {', '.join(record) or 'no column'}. "
        "Name columns in rename, such as {conversation: messages}"
    )


def _messages(value: Any, column: str, where: str) -> list[Mapping[str, Any]]:
    value = _read(value, where)
    if not isinstance(value, list) or not value:
        raise BrokenRecord(f"{where}: {column} is no list of messages, or it is empty")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BrokenRecord(f"{where}: {column}[{number}] is no message; it needs a role and content")
    # Parquet gives every message every key; a template asks whether one is there.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _read(value: Any, where: str) -> Any:
    """Lists that were written as JSON text are read."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BrokenRecord(f"{where}: text that is no JSON ({error})") from error
