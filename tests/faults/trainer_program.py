"""A trainer that publishes, in a process that tests may kill: `trainer_program.py STORE LAST`.

Restart is redo: the last checkpoint is one step behind the head, so the head's step is trained again and
compared before the chain goes on. $KILL_AT, "verb pattern count when", sends SIGKILL at the count-th write or
delete of a key that the pattern matches, before or after it; $HOLD names a file that the last move of the
head waits for. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from rollout_bridge.store import Store
from rollout_bridge.weights.format.manifest import LATEST_KEY
from rollout_bridge.weights.write.garbage import Retention
from tests.rollout_bridge.weights import tiny

FULL_EVERY = 3


class Mortal(Store):
    """Kills the process at the write that $KILL_AT names."""

    left = -1
    last_version = 0

    def arm(self, rule: str) -> None:
        self.verb, self.pattern, count, self.when = rule.split()
        self.left = int(count)

    def _write(self, key: str, data: bytes | None, generation: bytes | None) -> bytes:
        hit = False
        if self.left > 0 and self.verb == ("delete" if data is None else "write"):
            hit = re.search(self.pattern, key) is not None
            self.left -= hit
        if hit and self.left == 0 and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        hold = os.environ.get("HOLD")
        if hold and key == LATEST_KEY and data and f'"version":{self.last_version}' in data.decode():
            Path(hold + ".reached").touch()
            while not Path(hold).exists():
                time.sleep(0.02)
        generation = super()._write(key, data, generation)
        if hit and self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return generation


def tree_of(step: int) -> tiny.Params:
    tree = tiny.params()
    for number in range(1, step + 1):
        tree = tiny.step(tree, number)
    return tree


def main(url: str, last: int) -> None:
    store = Mortal.open(url)
    if "KILL_AT" in os.environ:
        store.arm(os.environ["KILL_AT"])
    store.last_version = last
    trainer = tiny.publisher(
        store,
        full_every=FULL_EVERY,
        object_bytes=4096,
        retention=Retention(versions=0, seconds=0.0, every=FULL_EVERY),
    )
    head = trainer.take_over()
    seen: dict = {"found": head.version, "reproduced": None, "published": []}
    for step in range(max(1, head.step), last + 1):
        params = tiny.on_device(tree_of(step))
        if step == head.step:
            seen["reproduced"] = trainer.verify_head(params)
        else:
            seen["published"].append(trainer.publish(params, step=step).result(300).version)
    trainer.close()
    removes = any(v % FULL_EVERY == 0 and v > FULL_EVERY for v in seen["published"])
    while removes and not trainer.counters["removed"]:
        time.sleep(0.01)  # what is removed is removed in the background
    seen["counters"] = dict(trainer.counters)
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
