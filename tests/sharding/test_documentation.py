"""The page and the examples in docs/ are true: their code runs and shows what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from sharding.mesh import MeshSpec

DOCS = Path(__file__).parents[2] / "docs"


def test_the_code_of_the_page_runs_and_prints_the_table_it_shows(capsys):
    page = (DOCS / "sharding.md").read_text()
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 8
    for block in blocks:
        exec(compile(block, "docs/sharding.md", "exec"), namespace)
    shown = re.search(r"```\n(leaf .*?)```", page, re.DOTALL)
    assert shown is not None
    assert capsys.readouterr().out.startswith(shown[1])


EXAMPLES = {
    "sharding_linen.py": r"params/Dense_0/kernel +16x64 +float32 +\(fsdp, tensor\) +8x16 ",
    "sharding_equinox.py": r"layers/0/weight +64x16 +float32 +\(tensor, fsdp\) +16x8 ",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_without_jaxtrain_and_its_mesh_does_not_change_the_losses(
    name, monkeypatch, capsys
):
    for package in ("jaxtrain", "rollout_bridge"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it raises ImportError
    example = runpy.run_path(str(DOCS / "examples" / name))
    losses = example["main"](MeshSpec({"fsdp": 2, "tensor": 4}), steps=10)
    printed = capsys.readouterr().out
    alone = example["main"](MeshSpec({"fsdp": 1, "tensor": 1}), steps=10, devices=jax.devices()[:1])
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    assert re.search(EXAMPLES[name], printed)
    assert re.search(r"all-gather +fsdp ", printed)
    assert re.search(r"all-reduce +tensor ", printed)
