"""Sources that read files: what a record becomes, and what a broken one costs."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from jaxtrain.config.base import Reference
from jaxtrain.config.errors import ConfigError
from jaxtrain.config.references import build
from jaxtrain.data.records import BrokenRecord
from jaxtrain.data.sources.base import SourceTools
from jaxtrain.data.tokenizer import build as build_tokenizer


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> SourceTools:
    directory = build_tokenizer(["some words"], tmp_path_factory.mktemp("tokenizer"))
    return SourceTools(AutoTokenizer.from_pretrained(directory), 0, environment=None)  # type: ignore[arg-type]


def source(name: str, path, rows, **options):
    file = path / "rows.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return build("source", Reference(name=name, files=[str(file)], **options), where="sft.source")


def learnt(tools, documents) -> list[str]:
    return [tools.tokenizer.decode(one.tokens[one.loss_weights > 0]) for one in documents]


def test_text_is_learnt_whole_and_ends(tmp_path, tools):
    documents = source("text", tmp_path, [{"body": "some words"}], rename={"body": "text"}).open(tools)
    assert learnt(tools, documents[0]) == ["some words<|endoftext|>"]
    assert documents[0][0].origin == f"{tmp_path}/rows.jsonl:1"


MESSAGES = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2", "tool_calls": None}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES},
        {"messages": json.dumps(MESSAGES)},
        {"prompt": "two?", "completion": "2"},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    ],
)
def test_a_conversation_is_learnt_where_the_assistant_speaks(tmp_path, tools, row):
    (document,) = source("conversations", tmp_path, [row]).open(tools)[0]
    assert tools.tokenizer.decode(document.tokens) == "<|user|>two?<|assistant|>2<|endoftext|>"
    assert learnt(tools, [document]) == ["2<|endoftext|>"]


def test_of_several_turns_all_or_the_last_are_learnt(tmp_path, tools):
    row = {
        "messages": MESSAGES + [{"role": "user", "content": "more?"}, {"role": "assistant", "content": "3"}]
    }
    (every,) = source("conversations", tmp_path, [row]).open(tools)[0]
    (last,) = source("conversations", tmp_path, [row], loss_on="last").open(tools)[0]
    assert every.tokens.tolist() == last.tokens.tolist()
    assert learnt(tools, [every, last]) == ["2<|endoftext|>3<|endoftext|>", "3<|endoftext|>"]


BROKEN = [
    ("text", {"txt": "a"}, "no column text; it has txt"),
    ("text", {"text": 7}, "text is int, expected text"),
    ("text", {"text": " \n"}, "text is empty"),
    ("text", "{", "no JSON"),
    ("conversations", {"chat": MESSAGES}, "neither messages nor prompt and completion; it has chat"),
    ("conversations", {"messages": []}, "messages is no list of messages, or it is empty"),
    ("conversations", {"messages": MESSAGES[:1]}, "no message has the role assistant"),
    ("conversations", {"messages": [{"content": "x"}]}, r"messages\[0\] is no message"),
    ("conversations", {"messages": "[{"}, "text that is no JSON"),
]


@pytest.mark.parametrize("name, row, problem", BROKEN)
def test_a_broken_record_is_named_or_left_out(tmp_path, tools, name, row, problem):
    good = {"text": "a"} if name == "text" else {"messages": MESSAGES}
    documents = source(name, tmp_path, [good, row]).open(tools)
    assert documents[0]
    with pytest.raises(BrokenRecord, match=f"rows.jsonl:2: .*{problem}"):
        documents[1]
    skipping = source(name, tmp_path, [good, row], broken="skip").open(tools)
    assert skipping[0] and skipping[1] == ()
    assert list(skipping.broken) == [1] and "rows.jsonl:2" in skipping.broken[1]


def test_files_that_are_missing_are_refused_with_the_config(tmp_path):
    with pytest.raises(ConfigError, match="sft.source.files: no file is named .*/none.jsonl"):
        build(
            "source",
            Reference(name="text", files=[f"{tmp_path}/none.jsonl"]),
            where="sft.source",
        )


def test_a_tokenizer_without_a_template_is_refused(tmp_path, tools):
    bare = AutoTokenizer.from_pretrained(tools.tokenizer.name_or_path)
    bare.chat_template = None
    with pytest.raises(ConfigError, match="tokenizer.path: it has no chat template"):
        source("conversations", tmp_path, [{"messages": MESSAGES}]).open(
            SourceTools(bare, 0, environment=None)  # type: ignore[arg-type]
        )
