"""`jaxtrain train` with a store that goes away: `waits_program.py FLAG KEYS ARGUMENT...`.

While the file FLAG is there, calls on keys that contain KEYS fail, as they do when a network is down.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jaxtrain.cli import main
from rollout_bridge.store import Store, StoreAway

flag, keys = Path(sys.argv[1]), sys.argv[2]
really = Store._try


def _try(self, verb, key, start):
    if keys in key and flag.exists():
        raise StoreAway(f"store {self.url}: {verb} of {key!r} failed: away")
    return really(self, verb, key, start)


Store._try = _try  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.argv[1:] = sys.argv[3:]
    main()
