"""Which tokens of a conversation are learnt. The oracle is transformers' own mask of assistant tokens, which
needs {% generation %} in the template; the code under test gets the template without it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxtrain.data.transforms.chat import ChatError, render

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<think>", "</think>",
]  # fmt: skip
G, END = "{% generation %}", "{% endgeneration %}"

# How the templates of these families lay out a conversation; {% generation %} is ours.
CHATML = (  # SmolLM2
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + G + "{{ m.content }}<|im_end|>"
    + END + "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}" + G + "{{ m.content | trim }}<|eot_id|>" + END
    + "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)  # fmt: skip
QWEN3 = (  # the reasoning of turns before the last question is dropped
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + G
    + "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>" + END + "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)  # fmt: skip
GLM = (  # a turn ends where the next role begins
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>" + G
    + "{{ '\n' }}<think>{{ m.reasoning_content or '' }}</think>\n{{ m.content }}" + END
    + "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # fmt: skip
STRICT = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'user' and loop.index0 > 0 and messages[loop.index0 - 1].role == "
    "'user' %}{{ raise_exception('roles must alternate') }}{% endif %}",
    1,
)

TALK = [
    {"role": "user", "content": "What is 2 + 2? <|nothing|> assistant"},
    {"role": "assistant", "content": "It is 4.", "reasoning_content": "two and two"},
    {"role": "user", "content": "And\n\n3 + 3?  "},
    {"role": "assistant", "content": "assistant\nIt is 6.", "reasoning_content": "three"},
]
TOOLS = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "look up"},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


@pytest.fixture(scope="module")
def base() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    lines = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")  # as Llama 3, Qwen and GLM
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [lines, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [message["content"] for message in TALK + TOOLS] + ["\n\n", "assistant\n", "user\n"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return tokenizer


def with_template(base: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=base,
        eos_token="<|endoftext|>",
        additional_special_tokens=SPECIAL,
        chat_template=template,
    )


def without_marks(template: str) -> str:
    return re.sub(r"{% (end)?generation %}", "", template)


def masked(base: Tokenizer, template: str, messages) -> tuple[list[int], list[int]]:
    """Tokens and the assistant mask, by transformers."""
    found = with_template(base, template).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(found["input_ids"]), list(found["assistant_masks"])


@pytest.mark.parametrize("talk", [TALK, TOOLS], ids=["talk", "tools"])
@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama3"])
def test_learnt_are_the_tokens_that_transformers_calls_the_assistants(base, template, talk):
    (rendered,) = render(with_template(base, without_marks(template)), talk)
    tokens, mask = masked(base, template, talk)
    assert rendered.tokens.tolist() == tokens[: len(rendered.tokens)]
    assert rendered.learnt.tolist() == [bool(value) for value in mask[: len(rendered.tokens)]]
    assert not any(mask[len(rendered.tokens) :]) and rendered.learnt[-1]


def test_a_turn_whose_reasoning_is_dropped_later_is_learnt_as_it_was_generated(base):
    first, second = render(with_template(base, without_marks(QWEN3)), TALK)
    for rendered, count in ((first, 2), (second, 4)):
        tokens, mask = masked(base, QWEN3, TALK[:count])
        last = np.flatnonzero(np.diff([0, *mask]) == 1)[-1]  # the last turn begins
        assert rendered.tokens.tolist() == tokens[: len(rendered.tokens)]
        assert np.flatnonzero(rendered.learnt).tolist() == [at for at in np.flatnonzero(mask) if at >= last]
    assert len(render(with_template(base, without_marks(QWEN3)), TALK, last_only=True)) == 1


def test_what_is_asked_for_is_not_learnt(base):
    """enable_thinking=False asks with an empty block of reasoning: what follows it is the answer."""
    tokenizer = with_template(base, without_marks(QWEN3))
    talk = [TALK[0], {"role": "assistant", "content": "It is 4."}]
    (direct,) = render(tokenizer, talk, enable_thinking=False)
    (thinking,) = render(tokenizer, talk)
    assert tokenizer.decode(direct.tokens[direct.learnt]) == "It is 4.<|im_end|>"
    assert tokenizer.decode(thinking.tokens[thinking.learnt]) == "<think>\n\n</think>\n\nIt is 4.<|im_end|>"
    assert direct.tokens.tolist() == thinking.tokens.tolist()


@pytest.mark.parametrize("talk, ends", [(TALK, "<|user|>"), (TOOLS, "<|observation|>")])
def test_where_a_turn_has_no_end_the_next_role_is_learnt_or_the_end_of_the_sequence(base, talk, ends):
    tokenizer = with_template(base, without_marks(GLM))
    (rendered,) = render(tokenizer, talk)
    tokens, mask = masked(base, GLM, talk)
    assert rendered.tokens.tolist() == [*tokens, tokenizer.eos_token_id]
    starts = np.flatnonzero(np.diff([0, *mask]) == -1)  # of the role after a turn
    wanted = np.asarray([*mask, 1], bool)
    wanted[starts] = True
    assert tokenizer.decode(tokens[starts[0]]) == ends
    assert rendered.learnt.tolist() == wanted.tolist()


def test_a_conversation_without_an_answer_or_in_a_wrong_order_is_refused(base):
    tokenizer = with_template(base, without_marks(STRICT))
    with pytest.raises(ChatError, match="no message has the role assistant"):
        render(tokenizer, TALK[:1])
    with pytest.raises(ChatError, match="messages 0 to 1: roles must alternate"):
        render(tokenizer, [TALK[0], TALK[2], TALK[1]])


def test_what_follows_the_last_answer_is_left_out(base):
    tokenizer = with_template(base, without_marks(CHATML))
    (longer,), (shorter,) = render(tokenizer, TALK[:3]), render(tokenizer, TALK[:2])
    assert longer.tokens.tolist() == shorter.tokens.tolist()


def test_where_a_token_spans_the_border_the_turn_follows_the_tokens_it_is_generated_after(base):
    """As in GPT-2, where two newlines are one token at the end of a text and two before a word."""
    gpt2 = Tokenizer.from_str(base.to_str())
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = with_template(gpt2, without_marks(LLAMA3))
    rendered = render(tokenizer, TALK)
    assert len(rendered) == 2
    for one, turn in zip(rendered, (1, 3), strict=True):
        asked = tokenizer.apply_chat_template(TALK[:turn], add_generation_prompt=True, return_dict=False)
        assert one.tokens[: len(asked)].tolist() == asked
        assert one.learnt.tolist() == [at >= len(asked) for at in range(len(one.tokens))]
        assert tokenizer.decode(one.tokens[one.learnt]) == TALK[turn]["content"] + "<|eot_id|>"
