"""A character tokenizer, scoring processes and a deterministic policy behind the engine protocol."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from rollout_bridge.engines.protocol import (
    Completion,
    EngineError,
    FinishReason,
    Health,
    KvPolicy,
    Request,
    UpdateReport,
    VersionSpan,
)
from rollout_bridge.store import Store
from rollout_bridge.weights.read.update import Update
from tests.rollout_bridge.rollouts.copying import CopyEnvironment

EOS = 1


@pytest.fixture
def store() -> Store:
    return Store.open(f"memory://{uuid.uuid4().hex}", probe=False)


def character_tokenizer():
    """Token 0 unknown, 1 end of sequence, then the printable characters; prompts are `?<content>=`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<eos>": EOS, **{chr(c): c - 30 for c in range(32, 127)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template="{% for m in messages %}?{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}",
    )


@pytest.fixture(scope="session")
def tokenizer():
    return character_tokenizer()


@dataclass
class PolicyEngine:
    """Copies the prompt's content; sampled requests get one wrong character in half of the seeds.

    versions: what it serves, one span for each entry, split evenly over the tokens.
    abort, fail: how many of the next requests are aborted, or fail.
    """

    versions: Sequence[int] = (0,)
    abort: int = 0
    fail: int = 0
    name: str = "policy"
    asked: list[Request] = field(default_factory=list)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await asyncio.sleep(0)
        self.asked.extend(requests)
        if self.fail:
            self.fail -= 1
            raise EngineError("policy: out of order")
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Completion:
        aborts = self.abort > 0
        self.abort = max(0, self.abort - 1)
        prompt = list(request.prompt_ids)
        answer = prompt[len(prompt) - prompt[::-1].index(ord("?") - 30) : -1]  # of the last message
        if request.temperature and request.seed % 2:
            answer[request.seed // 2 % len(answer)] = ord("!") - 30
        tokens = np.array([*answer, EOS][: request.max_tokens], np.int32)
        if request.exact_version is not None and set(self.versions) != {request.exact_version}:
            aborts = True
        if aborts:
            tokens = tokens[:1]
        cuts = np.linspace(0, len(tokens), len(self.versions) + 1).astype(int)
        spans = zip(self.versions, cuts, cuts[1:], strict=False)
        return Completion(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=np.full(len(tokens), -0.25, np.float32),
            spans=tuple(VersionSpan(v, int(a), int(b)) for v, a, b in spans if b > a),
            finish_reason=FinishReason.ABORT if aborts else FinishReason.STOP,
            kv_policy=KvPolicy.KEEP,
            seconds=0.5,
            routed_experts=np.tile(
                np.arange(len(request.prompt_ids) + len(tokens), dtype=np.int16)[:, None, None], (1, 2, 1)
            ),
        )

    async def update(self, update: Update) -> UpdateReport:
        self.versions = (update.version,)
        return UpdateReport(version=update.version, pause_ms=0, total_ms=0, tensors=0)

    async def version(self) -> int | None:
        return self.versions[-1]

    async def health(self) -> Health:
        return Health(ready=True, version=self.versions[-1])

    async def close(self) -> None:
        return None


@pytest.fixture
def environment() -> CopyEnvironment:
    return CopyEnvironment()


@pytest.fixture
def engine() -> PolicyEngine:
    return PolicyEngine()


@pytest.fixture(scope="session")
def make_engine() -> type[PolicyEngine]:
    return PolicyEngine
