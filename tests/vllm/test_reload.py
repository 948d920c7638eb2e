"""The plugin inside a worker, without a server: vLLM's own layerwise reload of one block-FP8 module.

Stands for an FP8 engine, which a CPU cannot run. The oracle is the mirror's content.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rollout_bridge.vllm_plugin.transfer import MirrorUpdateInfo, MirrorWeightTransferEngine, StageRequest
from rollout_bridge.weights.read.mirror import Mirror
from tests.vllm import tiny_model
from tests.vllm.tiny_model import Tensors

MODULE = "model.layers.1.mlp.shared_experts.down_proj"
WEIGHT, SCALE = f"{MODULE}.weight", f"{MODULE}.weight_scale_inv"


class Model(torch.nn.Module):
    """One linear layer of the tiny model under its name. ignores: names that loading passes over."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.ignores: tuple[str, ...] = ()
        module: torch.nn.Module = self
        for part in MODULE.split("."):
            child = torch.nn.Module()
            module.add_module(part, child)
            module = child
        for name in (WEIGHT, SCALE):
            value = torch.nn.Parameter(tensors[name].clone(), requires_grad=False)
            module.register_parameter(name.rpartition(".")[2], value)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        taken = set()
        for name, tensor in weights:
            if name not in self.ignores:
                parameter: Any = self.get_parameter(name)
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
                taken.add(name)
        return taken


@dataclass
class Worker:
    engine: MirrorWeightTransferEngine
    model: Model
    mirror: Mirror
    tensors: Tensors
    reports: Path
    version: int = 1

    def move(self, name: str, value: torch.Tensor) -> dict[str, Any]:
        """The mirror's next version changes one tensor; it is staged."""
        self.version += 1
        self.tensors[name] = value
        run = tiny_model.run_info()
        tiny_model.set_mirror(self.mirror, run, self.tensors, self.version)
        self.engine.stage(self._request(name))
        while not (self.reports / "staged-5.json").exists():
            time.sleep(0.005)
        (self.reports / "staged-5.json").unlink()
        return self.engine.stage_status()

    def _request(self, name: str) -> StageRequest:
        return StageRequest(
            version=self.version, mirror=self.mirror.directory, changed=(name,), reports=self.reports
        )

    def update(self) -> None:
        self.engine.start_weight_update()
        self.engine.receive_weights(MirrorUpdateInfo(version=self.version))
        self.engine.finish_weight_update()

    def assert_holds(self) -> None:
        for name in (WEIGHT, SCALE):
            held = self.model.get_parameter(name)
            assert torch.equal(held.view(torch.uint8), self.tensors[name].view(torch.uint8)), name


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    tensors = tiny_model.random_tensors(tiny_model.run_info(), 1)
    model = Model(tensors)
    record_metadata_for_reloading(model)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=1, world_size=4, rank=1, enable_eplb=False),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(num_hidden_layers=2), dtype=torch.bfloat16
        ),
        quant_config="fp8",
    )
    nothing: Any = None
    engine = MirrorWeightTransferEngine(nothing, config, torch.device("cpu"), model)
    mirror = Mirror(tmp_path / "mirror")
    tiny_model.set_mirror(mirror, tiny_model.run_info(), tensors, 1)
    yield Worker(engine, model, mirror, tensors, tmp_path)
    mirror.close()


def test_a_module_updated_twice_in_part_holds_the_mirrors_codes_and_scales(worker: Worker) -> None:
    """A change of codes alone leaves no scale uninitialised, and the same again."""
    for seed in (2, 3):
        new = tiny_model.random_tensors(tiny_model.run_info(), seed, lambda name: name == WEIGHT)
        assert worker.move(WEIGHT, new[WEIGHT])["tensors"] == 2
        worker.update()
        worker.assert_holds()
    worker.move(SCALE, 2 * worker.tensors[SCALE])
    worker.update()
    worker.assert_holds()
    assert (worker.reports / "loaded-5.json").exists(), "rank 1 of 4 of the second engine"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_scale_that_no_checkpoint_has_is_found_before_anything_is_loaded(
    worker: Worker, bad: float
) -> None:
    good = worker.tensors[SCALE]
    status = worker.move(SCALE, torch.full_like(good, bad))
    assert status["state"] == "failed" and SCALE in status["error"]
    with pytest.raises(RuntimeError, match="stage a version first"):
        worker.engine.start_weight_update()
    worker.tensors[SCALE] = good
    worker.assert_holds()


def test_a_tensor_that_the_model_does_not_take_fails_the_update(worker: Worker) -> None:
    worker.model.ignores = (WEIGHT, SCALE)
    worker.move(WEIGHT, worker.tensors[WEIGHT])
    worker.engine.start_weight_update()
    with pytest.raises(RuntimeError, match=f"no tensor of 1 modules, .*{MODULE}.*older weights"):
        worker.engine.receive_weights(MirrorUpdateInfo(version=worker.version))


def test_only_the_staged_version_is_loaded(worker: Worker) -> None:
    worker.move(WEIGHT, worker.tensors[WEIGHT])
    worker.engine.start_weight_update()
    with pytest.raises(RuntimeError, match="version 9 asked for"):
        worker.engine.receive_weights(MirrorUpdateInfo(version=9))
