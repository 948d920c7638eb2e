"""Where the examples of docs/extending are, and the commands that run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rollout_bridge.references import INHERITED

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "extending"
EXAMPLES = PAGES / "examples"


def jaxtrain(*arguments: str | Path, here: Path, platform: str = "cpu", status: int = 0) -> str:
    """What the command prints, typed in the directory `here`, which Python itself does not search."""
    environment = os.environ | {
        "JAX_PLATFORMS": platform,
        "XLA_FLAGS": "",
        "PYTHONPATH": str(ROOT),
        INHERITED: "",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "jaxtrain", *map(str, arguments)],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr
