"""Rotary embeddings stretched to longer contexts: the parameters of a config.json, and the frequencies.

The formulas are those of transformers 5 (`modeling_rope_utils`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# Parameters of each kind that are implemented, with their defaults; REQUIRED has none.
_REQUIRED = object()
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": _REQUIRED},
    "llama3": {
        "factor": _REQUIRED,
        "low_freq_factor": _REQUIRED,
        "high_freq_factor": _REQUIRED,
        "original_max_position_embeddings": _REQUIRED,
    },
    "yarn": {
        "factor": _REQUIRED,
        "original_max_position_embeddings": _REQUIRED,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
    },
}


@dataclass(frozen=True)
class RopeScaling:
    """kind: one of `KINDS`. parameters: (name, value) of it, in the order of `KINDS`."""

    kind: str
    parameters: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RopeScaling | None:
        """Of `rope_scaling` or `rope_parameters` of a config.json without problems; None: the default."""
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "default":
            return None
        values = {name: given.get(name, default) for name, default in KINDS[kind].items()}
        return cls(kind, tuple((name, values[name]) for name in KINDS[kind]))

    def to_json(self) -> dict[str, Any]:
        return {
            "rope_type": self.kind,
            **{name: value for name, value in self.parameters if value is not None},
        }

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin."""
        values = dict(self.parameters)
        if self.kind != "yarn":
            return 1.0
        if values["attention_factor"] is not None:
            return float(values["attention_factor"])
        factor, mscale, of_all = values["factor"], values["mscale"], values["mscale_all_dim"]
        if mscale and of_all:
            return _mscale(factor, mscale) / _mscale(factor, of_all)
        return _mscale(factor, 1.0)

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        """Radians a position of each pair of channels, float64 [rotary_dim / 2]."""
        import numpy as np  # a config is checked without it

        values = dict(self.parameters)
        plain = 1.0 / theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
        stretched = plain / values["factor"]
        if self.kind == "linear":
            return stretched
        length = values["original_max_position_embeddings"]
        if self.kind == "llama3":
            low, high = values["low_freq_factor"], values["high_freq_factor"]
            turns = length * plain / (2 * math.pi)  # of a pair within the original context
            kept = np.clip((turns - low) / (high - low), 0, 1)
            return stretched * (1 - kept) + plain * kept
        first, last = (
            rotary_dim * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(theta))
            for beta in (values["beta_fast"], values["beta_slow"])
        )
        if values["truncate"]:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        ramp = (np.arange(rotary_dim // 2) - first) / (last - first or 0.001)
        kept = 1 - np.clip(ramp, 0, 1)
        return stretched * (1 - kept) + plain * kept


def problems(key: str, given: Mapping[str, Any]) -> list[str]:
    """What of `rope_scaling` or `rope_parameters` is not implemented or missing."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return []
    if kind not in KINDS:
        return [f"{key}.rope_type: {kind!r} is not supported, expected default, {', '.join(KINDS)}"]
    known = KINDS[kind]
    found = [
        f"{key}.{name}: missing; rope_type {kind!r} needs it" for name in known if _lacks(known, given, name)
    ]
    # Engines ignore what is not of the kind, and so do published files that carry it.
    for name in ("factor", "original_max_position_embeddings"):
        value = given.get(name)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            found.append(f"{key}.{name}: {value!r} is not a positive number")
    return found


def _lacks(known: Mapping[str, Any], given: Mapping[str, Any], name: str) -> bool:
    return known[name] is _REQUIRED and given.get(name) is None


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
