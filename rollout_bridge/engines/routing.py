"""Whether the experts that an engine reports can be those that its routers chose."""

from __future__ import annotations

import numpy as np

FEW_TOKENS = 8  # so many may all choose one expert


def implausible(experts: np.ndarray, *, tokens: int, num_experts: int | None = None) -> str:
    """Why [tokens, MoE layers, k] cannot be the choices of routers; "" if they can.

    A router chooses k different experts of a token. -1 in all k places says that a token's choice is not
    known. num_experts: of a layer, where it is known.
    """
    if experts.ndim != 3 or len(experts) != tokens:
        return f"their shape is {list(experts.shape)}, expected [{tokens}, layers, k]"
    if experts.size == 0:
        return ""
    low, high = int(experts.min()), int(experts.max())
    if low < -1 or (num_experts is not None and high >= num_experts):
        return f"ids are in [{low}, {high}], expected -1 to {'' if num_experts is None else num_experts - 1}"
    ordered = np.sort(experts, axis=-1)
    unknown = ordered[..., -1] == -1
    if (ordered[..., 0] == -1)[~unknown].any():
        return "a token has some of its experts only"
    if (ordered[..., 1:] == ordered[..., :-1])[~unknown].any():
        return "a token has the same expert twice"
    chosen = ordered[~unknown]
    if len(chosen) > FEW_TOKENS * experts.shape[1] and (chosen == chosen[0]).all():
        return f"all tokens have experts {chosen[0].tolist()} in every layer"
    return ""
