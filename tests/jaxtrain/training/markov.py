"""A decoder that is a Markov chain chosen by hand: losses and gradients of a step are hand calculations.

Attention and experts give 0 and the embedding of token d is the unit vector d, so the final hidden state is
2 e_d (rms norm of 4 channels). The head is the chain's log-probabilities over 2. The MTP layer passes on the
embedding that it sees: it predicts by the same chain, from the token ahead. The body's router scores its two
experts alike and takes expert 0; that of the MTP layer takes expert 1. The step is plain gradient descent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.data.batch import Batch, microbatch_shapes
from jaxtrain.data.packing import Document, pack
from jaxtrain.losses.base import Loss
from jaxtrain.losses.policies.base import POLICY_COLUMNS
from jaxtrain.models.config import ModelConfig
from jaxtrain.models.definition import define
from jaxtrain.training.phase import ScheduledValues
from jaxtrain.training.programs import Programs, compile_apply, compile_programs, train_step
from jaxtrain.training.state import StatePlacement, TrainState, abstract_state, place, state_of
from sharding.mesh import MeshSpec
from tests.jaxtrain.models.tiny import HF_CONFIG

ROWS, SEQUENCE_LENGTH = 2, 3
HIDDEN = 2.0  # the one channel of a final hidden state that is not 0
# Surprise of a token after token d, in bits: 1 of the token d + 1, 2 of d + 2, 3 of d + 3 and of d itself.
BITS = np.array([[3, 1, 2, 3], [3, 3, 1, 2], [2, 3, 3, 1], [1, 2, 3, 3]])
PROBABILITIES = 0.5**BITS
ENTROPY = 1.75 * np.log(2)  # of each row: 1/2 * 1 + 1/4 * 2 + 2 * 1/8 * 3 bits

DEFINITION = define(
    ModelConfig.from_hf(
        HF_CONFIG
        | {
            "vocab_size": 4,
            "hidden_size": 4,
            "num_hidden_layers": 1,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_shared_experts": 0,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-12,
        },
        compute_dtype="float32",
    )
)


@dataclass(frozen=True)
class Setup:
    programs: Programs
    placement: StatePlacement
    state: TrainState


@dataclass(frozen=True)
class Step:
    """moved: what the step added to each parameter and buffer. values: of its report."""

    moved: dict[str, np.ndarray]
    values: dict[str, float]


def parameters() -> dict[str, jax.Array]:
    values = {
        path: (np.ones if path.endswith("norm") else np.zeros)(shape.shape, np.float32)
        for path, shape in DEFINITION.shapes.items()
    }
    values["embedding"] = np.eye(4, dtype=np.float32)
    values["lm_head/kernel"] = (np.log(PROBABILITIES) / HIDDEN).astype(np.float32)
    values["mtp/eh_proj/kernel"][0, :4] = np.eye(4)
    values["mtp/layer/mlp/router/kernel"][..., 1] = 1.0
    return {path: jnp.asarray(value) for path, value in values.items()}


def compiled(loss: Loss) -> Setup:
    """Programs of one loss on one device, with clipping far above every gradient here."""
    optimizer = optax.scale(-1.0)
    abstract = abstract_state(DEFINITION, optimizer)
    placement = place(DEFINITION, abstract, MeshSpec(ici={"fsdp": 1}).build(jax.devices()[:1]))
    programs = compile_programs(
        DEFINITION,
        placement,
        abstract,
        loss=loss,
        microbatch=microbatch_shapes(POLICY_COLUMNS, rows=ROWS, sequence_length=SEQUENCE_LENGTH),
        step=compile_apply(optimizer, placement, clip_norm=1e6),
    )
    return Setup(programs, placement, state_of(parameters(), optimizer, placement))


def document(
    tokens: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
    behavior_logprobs: Sequence[float] | None = None,
    advantage: float = 0.0,
    temperature: float = 1.0,
) -> Document:
    """weights, behavior_logprobs: of all tokens but the first, which nothing predicts."""
    given = [1.0] * (len(tokens) - 1) if weights is None else weights
    return Document(
        tokens=np.array(tokens, np.int32),
        loss_weights=np.array([0, *given], np.float32),
        columns={
            "behavior_logprobs": np.array([0, *(behavior_logprobs or [0] * len(given))], np.float32),
            "advantages": advantage,
            "temperature": temperature,
        },
    )


def batch(*documents: Document) -> Batch:
    """Microbatches of 2 rows, each of 3 predictions, with the columns of policies."""
    return pack(documents, rows=ROWS, sequence_length=SEQUENCE_LENGTH, columns=POLICY_COLUMNS)


def step(
    setup: Setup,
    batch: Batch,
    *,
    learning_rate: float = 1.0,
    router_bias_rate: float = 0.0,
    balance_weight: float = 0.0,
    mtp_weight: float = 0.0,
) -> Step:
    """From the chain's own parameters."""
    before = setup.state.model
    state, report = train_step(
        setup.programs,
        setup.placement,
        jax.tree.map(jnp.copy, setup.state),
        batch,
        ScheduledValues(
            learning_rate=learning_rate,
            router_bias_rate=router_bias_rate,
            balance_weight=balance_weight,
            mtp_weight=mtp_weight,
        ),
    )
    moved = {path: np.asarray(state.model[path]) - np.asarray(value) for path, value in before.items()}
    return Step(moved, report.values)
