"""Router replay: a token keeps the experts that the engine chose, where the trainer's router agrees enough.

The trainer computes the gate values itself, so gradients flow; replay decides only which experts are used.
Source: Composer 2 (arXiv 2603.24477); the threshold's number is not published there.
"""

# N tokens, E experts, k experts a token

from __future__ import annotations

import jax
import jax.numpy as jnp

CHOOSE = -1  # an id that leaves the choice to the router here


def plausible(
    scores_NE: jax.Array, own_Nk: jax.Array, replay_Nk: jax.Array, *, threshold: float
) -> jax.Array:
    """bool [N, E]: replayed experts with a gate score of at least `threshold` times the router's smallest.

    own_Nk: the router's own choice, over which the smallest is taken. Ids outside [0, E) are ignored.
    """
    n, e = scores_NE.shape
    ids = jnp.where((replay_Nk >= 0) & (replay_Nk < e), replay_Nk, e)
    given_NE = jnp.zeros((n, e), bool).at[jnp.arange(n)[:, None], ids].set(True, mode="drop")
    least_N1 = jnp.take_along_axis(scores_NE, own_Nk, axis=-1).min(axis=-1, keepdims=True)
    return given_NE & (scores_NE >= threshold * least_N1)


def choose(
    choice_NE: jax.Array, scores_NE: jax.Array, replay_Nk: jax.Array, *, threshold: float
) -> jax.Array:
    """k different experts a token, int32 [N, k], best choice first.

    The plausible ones of `replay_Nk` come first in the choice; the router's best by `choice_NE` (scores with
    the correction bias) fill it up to k.
    """
    k = replay_Nk.shape[-1]
    _, own_Nk = jax.lax.top_k(choice_NE, k)
    kept_NE = plausible(scores_NE, own_Nk, replay_Nk, threshold=threshold)
    _, ids_Nk = jax.lax.top_k(jnp.where(kept_NE, jnp.inf, choice_NE), k)
    by_choice = jnp.argsort(-jnp.take_along_axis(choice_NE, ids_Nk, axis=-1), axis=-1, stable=True)
    return jnp.take_along_axis(ids_Nk, by_choice, axis=-1)
