"""Which tensor of a checkpoint is stored how: one object shared by publisher, exporter and agent."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from rollout_bridge.architectures.tensors import Role, TensorSource
from rollout_bridge.errors import ExpectedError

BLOCK = (128, 128)


class Format(enum.StrEnum):
    """How a tensor is stored; the values are the dtype strings of safetensors."""

    fp8_block = "F8_E4M3"
    bf16 = "BF16"
    f32 = "F32"


@dataclasses.dataclass(frozen=True)
class ServingLayout:
    """How the engine splits the model.

    tensor_parallel: ranks that slice every layer. data_parallel: engines side by side, which slice routed
    experts among all their ranks. expert_parallel: experts are spread whole over those ranks instead.
    """

    tensor_parallel: int = 1
    expert_parallel: bool = False
    data_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "data_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not a positive number of ranks")

    @property
    def expert_slices(self) -> int:
        """Parts that a routed expert is cut into."""
        return 1 if self.expert_parallel else self.tensor_parallel * self.data_parallel


@dataclasses.dataclass(frozen=True)
class QuantizationPlan:
    """Format of every tensor by Hugging Face name, and the modules an FP8 engine must leave unquantised."""

    formats: dict[str, Format]
    block: tuple[int, int] = BLOCK
    modules_to_not_convert: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as kept in run.json."""
        return {
            "formats": {name: str(self.formats[name]) for name in sorted(self.formats)},
            "block": list(self.block),
            "modules_to_not_convert": list(self.modules_to_not_convert),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QuantizationPlan:
        """The plan of a JSON object of `to_json`; ValueError names what is missing or unknown."""
        try:
            formats = {str(name): Format(value) for name, value in data["formats"].items()}
            rows, columns = (int(side) for side in data["block"])
            modules = tuple(str(module) for module in data["modules_to_not_convert"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"not a quantization plan ({error!r}); expected formats (name -> one of "
                f"{[str(f) for f in Format]}), block [rows, columns] and modules_to_not_convert, as "
                "QuantizationPlan.to_json writes"
            ) from error
        if (rows, columns) != BLOCK:
            raise ValueError(
                f"quantization plan: block: {[rows, columns]} is not {list(BLOCK)}, the only one implemented"
            )
        return cls(formats, (rows, columns), modules)

    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, in hex; the order in which a plan was built does not matter."""
        return hashlib.sha256(
            json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()

    def hf_quantization_config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json: it tells an engine that the checkpoint is block FP8."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": list(self.block),
            "activation_scheme": "dynamic",
            "modules_to_not_convert": list(self.modules_to_not_convert),
        }


def scale_name(name: str) -> str:
    """Name of the scales of an FP8 tensor: `x.weight` -> `x.weight_scale_inv`."""
    return f"{name}_scale_inv"


def plan_for(
    sources: Iterable[TensorSource],
    *,
    serving: ServingLayout | None,
    quantize: bool = True,
    head_dim: int | None = None,
) -> QuantizationPlan:
    """Plan for the tensors of a checkpoint, by the role that its architecture gives each.

    A matrix of a role that engines quantise is block FP8, unless an engine with the `serving` layout cannot
    take its layer in 128-blocks; then the whole layer is BF16 and listed in modules_to_not_convert.
    `serving=None` is for engines that are given dequantised BF16 weights: no layer is refused. `head_dim`
    tells how far key and value heads can be split before they are replicated (more ranks than key/value
    heads); without it they are taken to split evenly. `quantize=False`: everything BF16.

    The rule of refusal is vLLM 0.32's (`validate_fp8_block_shape` and its MoE twin). Raises ValueError for a
    layout whose ranks cannot share a layer evenly, which no engine loads in any format.
    """
    sources = tuple(sources)
    formats = {source.name: _unquantized_format(source) for source in sources}
    unquantized = {_module(source.name) for source in sources if len(source.shape) >= 2}
    if not quantize:
        return QuantizationPlan(formats, BLOCK, tuple(sorted(unquantized)))
    refused_experts: set[str] = set()
    for layer in _layers(sources):
        if serving is not None:
            _check_even(layer, serving, head_dim)
            if not _accepts(layer, serving, head_dim):
                if layer[0].role in _EXPERT:
                    refused_experts.add(_experts_module(layer[0].name))
                continue
        formats |= dict.fromkeys((source.name for source in layer), Format.fp8_block)
    quantized = {_module(name) for name, chosen in formats.items() if chosen is Format.fp8_block}
    plain = {module for module in unquantized - quantized if ".experts." not in module}
    return QuantizationPlan(formats, BLOCK, tuple(sorted(plain | refused_experts)))


class Fp8ShareError(ExpectedError, ValueError):
    """Less of a model would be FP8 than was asked for."""


@dataclasses.dataclass(frozen=True)
class Fp8Share:
    """share: of all parameters that a plan stores as FP8. refused: matrices that it could not, by module name
    without layer and expert numbers. serving: the layout that it is for.
    """

    share: float
    refused: dict[str, int]
    serving: ServingLayout

    def __str__(self) -> str:
        text = f"{self.share:.1%} of the parameters in FP8"
        if not self.refused:
            return text
        names = ", ".join(f"{count} {name}" for name, count in self.refused.items())
        whole = self.serving.expert_parallel or not any("experts." in name for name in self.refused)
        remedy = "" if whole else "; expert parallelism keeps experts whole"
        return (
            f"{text}; BF16 because their slices for {self.serving.tensor_parallel} x "
            f"{self.serving.data_parallel} ranks are not whole blocks of {BLOCK[0]}: {names}{remedy}"
        )

    def check(self, least: float, *, field: str) -> None:
        """Raises `Fp8ShareError` below `least`."""
        if self.share < least:
            raise Fp8ShareError(f"{field}: {least:g} is more than what this layout gives: {self}")


def fp8_share(sources: Iterable[TensorSource], plan: QuantizationPlan, serving: ServingLayout) -> Fp8Share:
    total = quantized = 0
    refused: dict[str, int] = {}
    for source in sources:
        size = math.prod(source.shape)
        total += size
        if plan.formats[source.name] is Format.fp8_block:
            quantized += size
        elif source.role not in (Role.BF16, Role.FLOAT32):
            kind = ".".join(part for part in _module(source.name).split(".")[-3:] if not part.isdecimal())
            refused[kind] = refused.get(kind, 0) + 1
    return Fp8Share(quantized / max(total, 1), refused, serving)


# Matrices that the engine runs as one layer, and therefore quantises all or none; all of one role, but for
# experts.
_Layer = tuple[TensorSource, ...]
_EXPERT = (Role.EXPERT_IN, Role.EXPERT_OUT)
_COLUMNS_SPLIT = (Role.ROW, Role.EXPERT_OUT)


def _layers(sources: Iterable[TensorSource]) -> list[_Layer]:
    """Query, key and value are merged, gate and up are merged, experts of a layer are fused, as in vLLM."""
    grouped: dict[tuple[str, Role], list[TensorSource]] = {}
    for source in sources:
        if source.role in (Role.BF16, Role.FLOAT32):
            continue
        module = _module(source.name)
        if source.role in _EXPERT:
            key = (_experts_module(source.name), Role.EXPERT_IN)
        else:
            key = (module if source.role is Role.ROW else module.rpartition(".")[0], source.role)
        grouped.setdefault(key, []).append(source)
    return [tuple(layer) for layer in grouped.values()]


def _check_even(layer: _Layer, serving: ServingLayout, head_dim: int | None) -> None:
    ranks = serving.expert_slices if layer[0].role in _EXPERT else serving.tensor_parallel
    for source in layer:
        size, unit = _split(source), "rows or columns"
        if source.role is Role.QKV and head_dim is not None:
            size, unit = size // head_dim, "heads"
            if source is not layer[0] and ranks % size == 0:
                continue  # key and value heads are repeated
        if size % ranks:
            raise ValueError(f"{serving}: {ranks} ranks cannot share the {size} {unit} of {source.name}")


def _accepts(layer: _Layer, serving: ServingLayout, head_dim: int | None) -> bool:
    role, ranks, sizes = layer[0].role, serving.tensor_parallel, [_split(source) for source in layer]
    if role in _EXPERT:
        return all(_slices_into_blocks(size, serving.expert_slices) for size in set(sizes))
    if role is Role.ROW:
        return ranks == 1 or all(_slices_into_blocks(size, ranks) for size in sizes)
    if role is Role.QKV and head_dim is not None:
        # More ranks than key/value heads: each rank holds one whole head.
        query, key, value = sizes
        sizes = [query, max(key, head_dim * ranks), max(value, head_dim * ranks)]
    if ranks == 1:
        sizes = sizes[:-1]  # the last of a merged, unsplit layer may end in a partial block
    return all(_slices_into_blocks(size, ranks) for size in sizes)


def _split(source: TensorSource) -> int:
    """Extent of the axis that ranks share."""
    return source.shape[1 if source.role in _COLUMNS_SPLIT else 0]


def _slices_into_blocks(size: int, ranks: int) -> bool:
    return size % ranks == 0 and size // ranks % BLOCK[0] == 0


def _experts_module(name: str) -> str:
    """What modules_to_not_convert lists for the experts of a layer."""
    return name.partition(".experts.")[0] + ".experts"


def _module(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


def _unquantized_format(source: TensorSource) -> Format:
    if len(source.shape) > 2:
        raise ValueError(
            f"{source.name}: shape {list(source.shape)}; Hugging Face tensors here have at most two axes"
        )
    return Format.f32 if source.role is Role.FLOAT32 else Format.bf16
