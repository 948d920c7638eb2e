"""Documents packed into one row do not see each other, through attention or through the experts they share.

A law of the decoder's logits, for every attention implementation that runs on a CPU; cuDNN's needs a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxtrain.models import attention_chunked
from jaxtrain.models.config import AttentionImplementation, ExpertImplementation
from jaxtrain.models.definition import define
from jaxtrain.models.sharding_rules import parameter_shardings, row_sharding
from sharding.mesh import MeshSpec
from tests.jaxtrain.models.forward import CONFIG, perturbed_parameters, tokens_of

# Borders of documents are inside the chunks of 8 tokens, and inside the parts of 10 that ring devices hold.
SEGMENTS = np.array([[1] * 17 + [2] * 19 + [0] * 4, [1] * 28 + [2] * 12], np.int32)
POSITIONS = np.array([[*range(17), *range(19), *range(4)], [*range(28), *range(12)]], np.int32)
WAYS = {
    "xla": (AttentionImplementation.XLA, None),
    "chunked": (AttentionImplementation.CHUNKED, None),
    "splash": (AttentionImplementation.SPLASH, None),
    "ring": (AttentionImplementation.AUTO, {"expert": 2, "context": 4}),
}


@pytest.fixture(scope="module", params=WAYS)
def logits(request) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """(tokens, segment ids) -> logits of a decoder with a dense and two MoE layers; compiled once."""
    attention, axes = WAYS[request.param]
    config = dataclasses.replace(
        CONFIG, attention_implementation=attention, expert_implementation=ExpertImplementation.BLOCKS
    )
    definition, params, rows = define(config), perturbed_parameters(seed=0), None
    if axes is not None:
        mesh = MeshSpec(ici=axes).build()
        shardings = parameter_shardings(definition, mesh)
        definition, rows = definition.on(mesh), row_sharding(mesh)
        params = {path: jax.device_put(value, shardings[path]) for path, value in params.items()}

    def run(params, tokens, positions, segments):
        model = definition.bind(params)
        return model.logits(model(tokens, positions, segments)[0])

    def placed(*arrays: np.ndarray):
        return [jax.device_put(array, rows) for array in arrays]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_chunked, "CHUNK", 8)
        compiled = jax.jit(run).lower(params, *placed(SEGMENTS, POSITIONS, SEGMENTS)).compile()
    return lambda tokens, segments: np.asarray(compiled(params, *placed(tokens, POSITIONS, segments)))


@pytest.mark.parametrize("changed", [1, 2, 0], ids=["first", "second", "padding"])
def test_changing_a_document_changes_no_logit_of_another(logits, changed: int):
    """Not a bit. As one document, the same change does reach the second part: the law is not empty."""
    rng = np.random.default_rng(3)
    tokens = tokens_of(rng, *SEGMENTS.shape)
    other = np.where(changed == SEGMENTS, tokens_of(rng, *SEGMENTS.shape), tokens)
    before, after = logits(tokens, SEGMENTS), logits(other, SEGMENTS)
    untouched = (changed != SEGMENTS) & (SEGMENTS > 0)
    np.testing.assert_array_equal(before[untouched], after[untouched])
    if changed == 1:
        whole = np.ones_like(SEGMENTS)
        moved = np.abs(logits(tokens, whole) - logits(other, whole)).max(-1)
        assert (moved[SEGMENTS == 2] > 1e-3).all()
