"""Scores a second of an environment in scoring processes, and what starting them costs.

    python benchmarks/scoring.py --processes 2 --scores 4000

Prints one JSON object. `ratio` compares with calls of the same `score` in this process, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time

from rollout_bridge.rollouts.environments.base import Answer
from rollout_bridge.rollouts.environments.registry import EnvironmentSpec
from rollout_bridge.rollouts.scoring import ScoringPool


async def measure(spec: EnvironmentSpec, *, processes: int, scores: int) -> dict[str, float]:
    environment = spec.create()
    tasks = [environment.task(index % environment.size) for index in range(scores)]
    answer = Answer(text="answer", turns=("answer",), ended=True, tokens=6)
    pool = ScoringPool(spec, processes=processes, memory_bytes=1 << 30, timeout_seconds=60.0)
    began = time.perf_counter()
    await pool.start()
    start_seconds = time.perf_counter() - began
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        await asyncio.gather(*(pool.score(task, answer) for task in tasks))
        rates.append(scores / (time.perf_counter() - began))
    await pool.close()
    began = time.perf_counter()
    for task in tasks:
        environment.score(task, answer)
    direct = scores / (time.perf_counter() - began)
    return {
        "start_seconds": start_seconds,
        "scores_per_second": max(rates),
        "direct_per_second": direct,
        "ratio": max(rates) / direct,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="spell_backward", help="of reasoning-gym")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--scores", type=int, default=4000)
    arguments = parser.parse_args()
    spec = EnvironmentSpec(name="reasoning_gym", options={"task": arguments.task}, seed=0)
    found = asyncio.run(measure(spec, processes=arguments.processes, scores=arguments.scores))
    print(json.dumps({**vars(arguments), "cores": len(os.sched_getaffinity(0)), **found}))


if __name__ == "__main__":
    main()
