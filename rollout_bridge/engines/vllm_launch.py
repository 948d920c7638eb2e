"""`python -m rollout_bridge.engines.vllm_launch <arguments>`: vLLM's API server, ended with its parent.

Asks the kernel for SIGTERM when the parent dies (Linux; kept across exec), so a killed agent leaves no server
behind with a port, a GPU and weights that nobody updates.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(os.environ["ROLLOUT_BRIDGE_PARENT"])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"parent {parent} has gone")
    module = "vllm.entrypoints.openai.api_server"
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


if __name__ == "__main__":
    main()
