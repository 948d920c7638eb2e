"""Muon against torch.optim.Muon on one device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jaxtrain.optim.muon import MuonConfig
from tests.jaxtrain.optim.muon_steps import STEPS, directions_of, gradients_of


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_equals_torch_muon_in_float32(monkeypatch, nesterov, shape):
    """torch.optim.Muon casts to bfloat16 to iterate; here the cast is taken out, the rest is torch's."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    gradients = gradients_of({"w": shape})
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon(
        [parameter],
        lr=1.0,
        weight_decay=0.0,
        momentum=0.95,
        nesterov=nesterov,
        adjust_lr_fn="match_rms_adamw",
    )
    expected = []
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = torch.from_numpy(np.array(gradient["w"]))
        optimizer.step()
        expected.append((before - parameter.detach()).numpy())
    found, _ = directions_of(MuonConfig(nesterov=nesterov), gradients)
    for step in range(STEPS):
        np.testing.assert_allclose(found[step]["w"], expected[step], atol=1e-4)
