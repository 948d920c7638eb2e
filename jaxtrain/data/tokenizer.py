"""A Hugging Face tokenizer for small runs.

Whole tokens for the words every prompt shares, bytes for the rest: the template words of a task ("Spell this
word backward") cost one token each; what differs between prompts, and every answer, is spelled in bytes, so
nothing is out of vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollout_bridge.rollouts.environments.base import Environment

EOS, PAD = "<|endoftext|>", "<|pad|>"
USER, ASSISTANT, SYSTEM = "<|user|>", "<|assistant|>", "<|system|>"
PROMPTS = 1000  # enough to separate the words of a task's template from its content
SHARED_FRACTION = 0.5  # a word in at least this fraction of the prompts belongs to the template
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def prompts_of(environment: Environment) -> Iterator[str]:
    """Texts of the messages of the environment's first tasks."""
    for index in range(min(environment.size, PROMPTS)):
        yield from (message["content"] for message in environment.task(index).messages)


def build(prompts: Iterable[str], directory: Path) -> Path:
    """Writes tokenizer.json and tokenizer_config.json (chat template, eos, pad) and returns `directory`."""
    from transformers import PreTrainedTokenizerFast

    texts = list(prompts)
    if not texts:
        raise ValueError("no texts to build a tokenizer from: the data or environment.train_prompts is empty")
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    seen = Counter(piece for text in texts for piece in {piece for piece, _ in split.pre_tokenize_str(text)})
    shared = sorted(p for p, n in seen.items() if n >= SHARED_FRACTION * len(texts) and len(p) > 1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, *shared])}
    # No merges: a piece is either in the vocabulary whole (ignore_merges) or it is spelled.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, PAD, SYSTEM, USER, ASSISTANT])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )
    directory.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(directory)
    return directory
