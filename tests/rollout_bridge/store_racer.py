"""A process that adds one to a counter of a store by compare-and-swap, and creates keys that others race for.

`python -m tests.rollout_bridge.store_racer <store> <name> <increments>`: writes what it did to stdout, a line
each, flushed: ``swap <value it wrote>`` or ``create <key>``. It ends after so many increments, or is killed.
"""

from __future__ import annotations

import json
import sys

from rollout_bridge.store import Store

COUNTER = "control/state.json"


def main(url: str, name: str, increments: int) -> None:
    store = Store.open(url, probe=False)
    for number in range(increments):
        key = f"prompts/claims/{number:06d}.json"
        if store.create(key, value(number, name)):
            print(f"create {key}", flush=True)
        while True:
            data, generation = store.read_with_generation(COUNTER)
            before = 0 if data is None else json.loads(data)["count"]
            if store.swap(COUNTER, value(before + 1, name), generation):
                print(f"swap {before + 1}", flush=True)
                break


def value(count: int, name: str) -> bytes:
    """JSON whose length differs from count to count, so that a rest of another value shows."""
    return json.dumps({"count": count, "by": name, "fill": "x" * (count * 7919 % 4001)}).encode()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
