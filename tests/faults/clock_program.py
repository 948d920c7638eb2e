"""A rollout worker whose wall clock is wrong: `clock_program.py STORE NAME OFFSET_FILE`.

OFFSET_FILE holds the seconds by which `time.time` is ahead, read at every call. Prints "begun INDEX" for each
answer that is asked for, and runs until the trainer has finished.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

real, offset = time.time, Path(sys.argv[3])
time.time = lambda: real() + float(offset.read_text() or 0)

import asyncio  # noqa: E402
import random  # noqa: E402
from dataclasses import replace  # noqa: E402

from rollout_bridge.store import Store  # noqa: E402
from tests.rollout_bridge.rollouts.conftest import PolicyEngine, character_tokenizer  # noqa: E402
from tests.rollout_bridge.rollouts.copying import CopyEnvironment  # noqa: E402
from tests.rollout_bridge.rollouts.test_worker import SETTINGS, pool  # noqa: E402

LEASE = 3.0  # seconds, many times what a renewal takes


class Slow(PolicyEngine):
    """Answers as an engine does, not at once."""

    async def generate(self, requests):
        print("begun", int(requests[0].affinity), flush=True)
        await asyncio.sleep(random.uniform(0.1, 0.5))
        return await super().generate(requests)


def main() -> None:
    from rollout_bridge.rollouts.worker import RolloutWorker

    environment = CopyEnvironment()
    options = replace(SETTINGS, lease_seconds=LEASE, segment_groups=1, poll_seconds=0.02)
    worker = RolloutWorker(
        Store.open(sys.argv[1]),
        Slow(),
        environment,
        character_tokenizer(),
        pool(environment),
        options,
        sys.argv[2],
    )
    asyncio.run(worker.run())


if __name__ == "__main__":
    main()
