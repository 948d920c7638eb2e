"""Three workers on prompts of which six in a hundred are bad, one of each kind: each costs only itself."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from dataclasses import dataclass, replace

import pytest

from rollout_bridge.engines.protocol import EngineError
from rollout_bridge.rollouts.environments.base import Answer, Task
from rollout_bridge.rollouts.environments.registry import EnvironmentSpec
from rollout_bridge.rollouts.scoring import ScoringPool
from rollout_bridge.rollouts.worker import RolloutWorker
from rollout_bridge.store import Store
from rollout_bridge.trajectories.claims import grant, read_claims
from rollout_bridge.trajectories.log import read_segment
from rollout_bridge.trajectories.schema import Status
from tests.rollout_bridge.rollouts.conftest import PolicyEngine, character_tokenizer
from tests.rollout_bridge.rollouts.copying import CopyEnvironment
from tests.rollout_bridge.rollouts.test_worker import SETTINGS, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

KINDS = ("raise", "nan", "too long", "never answered", "hold the GIL", "run code")
PROMPTS, GROUP = 400, 2
KIND_OF = {
    index: KINDS[index % 100 // 15] for index in range(PROMPTS) if index % 100 in (0, 15, 30, 45, 60, 75)
}
DETAIL = {
    "raise": "task .* raises RuntimeError: no such question",
    "nan": "the reward is nan, expected finite numbers",
    "too long": "the prompt has .* tokens",
    "never answered": "answers others",
    "hold the GIL": "took over 3 s",
    "run code": "PermissionError",
}


@dataclass(frozen=True)
class Options:
    canary: str


class Poisoned(CopyEnvironment):
    """Task i is to copy "i:kind"."""

    Options = Options

    def __init__(self, options: Options, *, seed: int = 0) -> None:
        self.options, self.size = options, PROMPTS

    def task(self, index: int) -> Task:
        kind = KIND_OF.get(index, "good")
        if kind == "raise":
            raise RuntimeError("no such question")
        text = f"{index}:{kind[:5]}" + ("x" * 100 if kind == "too long" else "")
        messages = ({"role": "user", "content": text},)
        return Task(index=index, name="poisoned", messages=messages, data={"text": text, "kind": kind})

    def score(self, task: Task, answer: Answer) -> float:  # type: ignore[override]
        match task.data["kind"]:
            case "nan":
                return float("nan")
            case "hold the GIL":
                return float(bool(re.match("(a+)+$", "a" * 40 + "b")))
            case "run code":  # as libraries do that evaluate an answer
                return float(eval(f"open({self.options.canary!r}, 'w').write('x')"))
        return float(answer.text == task.data["text"])


class Choosy(PolicyEngine):
    """Fails on the prompts that are never to be answered."""

    tokenizer = character_tokenizer()

    async def generate(self, requests):
        await asyncio.sleep(0.002)
        if any("never" in self.tokenizer.decode(request.prompt_ids) for request in requests):
            raise EngineError("policy: cannot take this prompt")
        return await super().generate(requests)


def test_what_is_bad_costs_only_itself(tmp_path, record_property):
    canary = tmp_path / "canary"
    store = Store.open(f"memory://{uuid.uuid4().hex}", probe=False)
    grant(store, PROMPTS)
    spec = EnvironmentSpec(name="tests.faults.test_poison:Poisoned", options={"canary": str(canary)}, seed=0)
    settings = replace(
        SETTINGS,
        group_size=GROUP,
        limits=replace(SETTINGS.limits, tokens=40, answer_tokens=16, seconds=120.0),
        max_concurrent_groups=8,
        segment_groups=8,
        claim_groups=8,
        engine_timeout_seconds=2.0,
    )

    def worker(number: int) -> RolloutWorker:
        scoring = ScoringPool(spec, processes=1, memory_bytes=1 << 28, timeout_seconds=3.0)
        environment = Poisoned(Options(canary=str(canary)))
        return RolloutWorker(
            store, Choosy(), environment, character_tokenizer(), scoring, settings, f"w{number}"
        )

    def done() -> bool:
        claims = read_claims(store)
        return sum(claim.end - claim.start for claim in claims if claim.done) == PROMPTS

    async def main() -> list:
        stop = asyncio.Event()
        running = [asyncio.create_task(worker(number).run(stop)) for number in range(3)]
        try:
            await until(lambda: done() or any(task.done() for task in running))
        finally:
            stop.set()
        return await asyncio.gather(*running)

    began = time.monotonic()
    reports = asyncio.run(main())
    assert len(reports) == 3, "no worker died"
    rows = [row for key in store.list("trajectories/") for row in read_segment(store, key)]
    assert len(rows) == PROMPTS * GROUP == len({row.trajectory_id for row in rows})
    finished = {row.prompt_index for row in rows if row.status is Status.OK}
    failed = {row.prompt_index: row for row in rows if row.status is not Status.OK}
    assert len(finished) / PROMPTS >= 0.94
    assert {index: kind for index, kind in KIND_OF.items()}.keys() == failed.keys()
    for index, kind in KIND_OF.items():
        assert re.search(DETAIL[kind], failed[index].metadata["detail"]), (
            index,
            kind,
            failed[index].metadata,
        )
    assert not canary.exists()
    record_property(
        "outcome", f"{len(finished)} of {PROMPTS} prompts, 3 workers, {time.monotonic() - began:.0f} s"
    )
