"""`python -m rollout_bridge.engines.vllm_launch <arguments>`: vLLM's API server, ended with its parent.

So a killed agent leaves no server behind that holds a port and a GPU and serves old weights.
"""

from __future__ import annotations

import os
import sys

from rollout_bridge.lifetime import end_with_parent


def main() -> None:
    end_with_parent(int(os.environ["ROLLOUT_BRIDGE_PARENT"]))
    module = "vllm.entrypoints.openai.api_server"
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


if __name__ == "__main__":
    main()
