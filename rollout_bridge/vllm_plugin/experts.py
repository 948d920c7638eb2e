"""Routed experts put together before the pause, in the few tensors that vLLM keeps a layer of them in.

vLLM's loader takes some 0.2 ms a tensor and a checkpoint has three matrices an expert, with a scale each: for
GLM-4.5 355B that is most of a pause. Stacked, a layer is two matrices and two scales. Layers whose layout is
another one (experts cut among ranks, padded, with biases) are left to the model's own loader.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

PARTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
LEAVES = ("weight", "weight_scale_inv")

Weights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class LayerExperts:
    """The routed experts of one layer on this rank.

    unit: their module in the checkpoint. module: the one that holds their parameters. local: an expert's
    number here, -1 if it is elsewhere.
    """

    unit: str
    module: torch.nn.Module
    local: Callable[[int], int]


@dataclass(frozen=True)
class Stacked:
    """All of one parameter of `experts`, as it is before packing."""

    experts: LayerExperts
    parameter: str
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return f"{self.experts.unit}.{self.parameter}"

    def load(self) -> Callable[[], None]:
        """As one tensor; the layerwise reload must have been initialised.

        The result gives the parameter its own loader back, for when the reload is finalised: what vLLM keeps
        to restore the layer from shares it, and the next reload may come expert by expert.
        """
        module = self.experts.module
        attributes = vars(module.get_parameter(self.parameter))
        own = attributes["weight_loader"]
        # The reload wraps the loader that a parameter has: here the plain one, for the whole of it.
        attributes["weight_loader"] = default_weight_loader
        loader = make_online_process_loader(module, self.parameter)
        attributes["weight_loader"] = loader
        loader(module.get_parameter(self.parameter), self.tensor)

        def give_back() -> None:
            attributes["weight_loader"] = own

        return give_back


def routed_experts(model: torch.nn.Module) -> dict[str, LayerExperts]:
    """By unit."""
    found = {}
    for name, module in model.named_modules():
        local = getattr(module, "_map_global_expert_id_to_local_expert_id", None)
        if local is not None and "w13_weight" in get_layerwise_info(module).restore_metadata[0]:
            unit = name.removesuffix(".routed_experts")
            found[unit] = LayerExperts(unit, module, local)
    return found


def stack(
    weights: Iterable[tuple[str, torch.Tensor]], experts: Mapping[str, LayerExperts], *, pin: bool
) -> tuple[list[Stacked], Weights]:
    """(what could be stacked, the rest), one layer at a time: the tensors of a unit come together.

    pin: in memory that a GPU copies from at full speed.
    """
    rest: Weights = []
    stacked: list[Stacked] = []
    for unit, members in itertools.groupby(weights, key=lambda item: _unit(item[0])):
        found = list(members)
        whole = _stack_layer(experts[unit], found, pin=pin) if unit in experts else []
        stacked += whole
        if not whole:
            rest += found
    return stacked, rest


def _unit(name: str) -> str:
    """Path of the routed experts that a tensor belongs to, empty for any other."""
    unit, inside, tail = name.partition(".experts.")
    return f"{unit}.experts" if inside and tail.partition(".")[0].isdigit() else ""


def _stack_layer(experts: LayerExperts, weights: Weights, *, pin: bool) -> list[Stacked]:
    """Empty if the tensors are not exactly what the module's parameters are made of."""
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    for name, tensor in weights:
        number, _, part = name.removeprefix(f"{experts.unit}.").partition(".")
        tensors[int(number), part] = tensor
    wanted = get_layerwise_info(experts.module).restore_metadata[0]
    numbers = sorted({number for number, _ in tensors}, key=experts.local)
    if [experts.local(number) for number in numbers] != list(range(len(numbers))):
        return []
    plan: list[tuple[str, list[list[torch.Tensor]]]] = []
    used = 0
    for parameter, meta in wanted.items():
        kind, _, leaf = parameter.partition("_")
        if kind not in PARTS or leaf not in LEAVES:
            return []
        parts = [
            [found for part in PARTS[kind] if (found := tensors.get((number, f"{part}.{leaf}"))) is not None]
            for number in numbers
        ]
        shapes = {(sum(t.shape[0] for t in row), *{t.shape[1:] for t in row}) for row in parts}
        one = torch.Size(meta.shape[1:])
        if len(numbers) != meta.shape[0] or shapes != {(one[0], one[1:])}:
            return []
        if any(t.dtype != meta.dtype for row in parts for t in row):
            return []
        used += sum(map(len, parts))
        plan.append((parameter, parts))
    if used != len(tensors):
        return []
    stacked = []
    for parameter, parts in plan:
        meta = wanted[parameter]
        whole = torch.empty(meta.shape, dtype=meta.dtype, pin_memory=pin)
        for slot, row in zip(whole, parts, strict=True):
            # Bits, whatever they mean: not every type can be concatenated.
            torch.cat([t.view(torch.uint8) for t in row], out=slot.view(torch.uint8))
        stacked.append(Stacked(experts, parameter, whole))
    return stacked
