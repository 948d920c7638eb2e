"""What an engine receives from a subscriber: one verified version, and where its tensors are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Update:
    """Everything an engine needs to move to `version`. Fetched, decoded and verified before it exists.

    version, incarnation, step: of the manifest applied last.
    changed: Hugging Face names of the tensors that differ from the version the engine served before
        (all of them after a full version).
    tensor: canonical bits by name, read-only: uint8 (F8_E4M3), uint16 (BF16) or uint32 (F32) arrays.
    mirror: directory that another process on this host can map the same tensors from.
    verified: number of tensors whose digest was compared with the manifest's for this update.
    """

    version: int
    incarnation: int
    step: int
    changed: frozenset[str]
    tensor: Callable[[str], np.ndarray]
    mirror: Path
    verified: int
