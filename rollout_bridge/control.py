"""Keys of what the trainer tells the fleet. The trainer writes them, the fleet reads them."""

from __future__ import annotations

STATE_KEY = (
    "control/state.json"  # {"phase": warm_start, rl or finished, "step", "rl_step", "version", "time"}
)
EVALUATIONS_PREFIX = "control/evaluations/"  # <id>.json: {"id", "version", "prompts", "purpose", "expires"}
CREDITS_KEY = "control/credits.json"  # {"groups"}: prompt indices below it may be claimed
