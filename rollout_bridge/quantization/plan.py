"""Which tensor of a checkpoint is stored how: one object shared by publisher, exporter and agent."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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


# Tensors that stay unquantised in every layout. Matched against the whole name.
_ALWAYS_FLOAT32 = re.compile(r".*\.e_score_correction_bias")
_ALWAYS_BF16 = re.compile(
    # eh_proj joins the next-token-prediction layer to the model.
    r"(.*\.)?(embed_tokens|lm_head|shared_head\.head|mlp\.gate|eh_proj)\.weight"
    r"|.*norm\.weight|.*\.bias"
)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Matrices that the engine runs as one layer, and therefore quantises all or none."""

    module: str  # the name vLLM gives the layer; of experts, what modules_to_not_convert lists
    role: str  # "qkv", "gate_up", "row" or "experts"
    names: tuple[str, ...]


def plan_for(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    architecture: str,
    serving: ServingLayout | None,
    quantize: bool = True,
    head_dim: int | None = None,
) -> QuantizationPlan:
    """Plan for the tensors `shapes` (Hugging Face name -> shape) of `architecture` (`model_type` of
    config.json).

    Embedding, head, router, norms and biases are BF16, the router's correction bias float32, every other
    matrix block FP8 unless an engine with the `serving` layout cannot take the layer it belongs to in
    128-blocks; then the whole layer is BF16 and listed in modules_to_not_convert. `serving=None` is for
    engines that are given dequantised BF16 weights: no layer is refused. `head_dim` tells how far key and
    value heads can be split before they are replicated (more ranks than key/value heads); without it they are
    taken to split evenly. `quantize=False`: everything BF16.

    The rule of refusal is vLLM 0.32's (`validate_fp8_block_shape` and its MoE twin). Raises ValueError for a
    layout whose ranks cannot share a layer evenly, which no engine loads in any format.
    """
    if architecture not in _LAYERS:
        raise ValueError(f"architecture: no quantization plan for {architecture!r}; known: {sorted(_LAYERS)}")
    formats = {name: _unquantized_format(name, shape) for name, shape in shapes.items()}
    unquantized = {_module(name) for name, shape in shapes.items() if len(shape) >= 2}
    if not quantize:
        return QuantizationPlan(formats, BLOCK, tuple(sorted(unquantized)))
    refused_modules: set[str] = set()
    candidates = [
        name for name, shape in shapes.items() if len(shape) == 2 and not _ALWAYS_BF16.fullmatch(name)
    ]
    for layer in _LAYERS[architecture](candidates):
        if serving is not None:
            _check_even(layer, shapes, serving, head_dim)
            if not _accepts(layer, shapes, serving, head_dim):
                refused_modules.add(layer.module)
                continue
        for name in layer.names:
            formats[name] = Format.fp8_block
    quantized = {_module(name) for name, chosen in formats.items() if chosen is Format.fp8_block}
    plain = {module for module in unquantized - quantized if ".experts." not in module}
    experts = {module for module in refused_modules if module.endswith(".experts")}
    return QuantizationPlan(formats, BLOCK, tuple(sorted(plain | experts)))


def check_servable(
    plan: QuantizationPlan,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    architecture: str,
    serving: ServingLayout,
    head_dim: int | None = None,
) -> None:
    """Raises ValueError naming a matrix that an FP8 engine of this layout refuses."""
    mine = plan_for(shapes, architecture=architecture, serving=serving, head_dim=head_dim)
    refused = [
        name
        for name, chosen in plan.formats.items()
        if chosen is Format.fp8_block and mine.formats.get(name) is not Format.fp8_block
    ]
    if refused:
        raise ValueError(
            f"quantization plan: {serving} cannot take {len(refused)} FP8 matrices in blocks of {BLOCK[0]}, "
            f"the first is {refused[0]}. Serve with the layout the run was planned for, serve BF16, or start "
            "a run whose plan is made for this layout"
        )


def _check_even(
    layer: _Layer, shapes: Mapping[str, tuple[int, ...]], serving: ServingLayout, head_dim: int | None
) -> None:
    ranks = serving.expert_slices if layer.role == "experts" else serving.tensor_parallel
    for name in layer.names:
        rows, columns = shapes[name]
        size = columns if layer.role == "row" or name.endswith("down_proj.weight") else rows
        unit = "rows or columns"
        if layer.role == "qkv" and head_dim is not None:
            size, unit = size // head_dim, "heads"
            if name != layer.names[0] and ranks % size == 0:
                continue  # key and value heads are repeated
        if size % ranks:
            raise ValueError(f"{serving}: {ranks} ranks cannot share the {size} {unit} of {name}")


def _accepts(
    layer: _Layer, shapes: Mapping[str, tuple[int, ...]], serving: ServingLayout, head_dim: int | None
) -> bool:
    ranks = serving.tensor_parallel
    if layer.role == "experts":
        slices = serving.expert_slices
        # Gate and up are [expert hidden, model], down is [model, expert hidden]; only the hidden axis is
        # sliced.
        hidden = {shapes[name][1 if name.endswith("down_proj.weight") else 0] for name in layer.names}
        return all(_slices_into_blocks(size, slices) for size in hidden)
    if layer.role == "row":
        return ranks == 1 or all(_slices_into_blocks(shapes[name][1], ranks) for name in layer.names)
    sizes = [shapes[name][0] for name in layer.names]
    if layer.role == "qkv" and head_dim is not None:
        # More ranks than key/value heads: each rank holds one whole head.
        query, key, value = sizes
        sizes = [query, max(key, head_dim * ranks), max(value, head_dim * ranks)]
    if ranks == 1:
        sizes = sizes[:-1]  # the last of a merged, unsplit layer may end in a partial block
    return all(_slices_into_blocks(size, ranks) for size in sizes)


def _slices_into_blocks(size: int, ranks: int) -> bool:
    return size % ranks == 0 and size // ranks % BLOCK[0] == 0


def _merged_layers(names: Iterable[str]) -> list[_Layer]:
    """Layers as vLLM builds them for Glm4Moe, Qwen3Moe, Qwen3 and Llama.

    Query, key and value are merged, gate and up are merged, experts of a layer are fused.
    """
    grouped: dict[tuple[str, str], list[str]] = {}
    for name in names:
        module = _module(name)
        parent, _, leaf = module.rpartition(".")
        if ".experts." in module:
            key = (module.split(".experts.")[0] + ".experts", "experts")
        elif leaf in ("q_proj", "k_proj", "v_proj"):
            key = (f"{parent}.qkv_proj", "qkv")
        elif leaf in ("gate_proj", "up_proj"):
            key = (f"{parent}.gate_up_proj", "gate_up")
        elif leaf in ("o_proj", "down_proj"):
            key = (module, "row")
        else:
            raise ValueError(
                f"{name}: no rule says how an engine runs this matrix; add it to the layers of its "
                "architecture in rollout_bridge/quantization/plan.py, or to the tensors that stay BF16"
            )
        grouped.setdefault(key, []).append(name)
    order = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}
    return [
        _Layer(
            module, role, tuple(sorted(members, key=lambda n: order.get(_module(n).rpartition(".")[2], 0)))
        )
        for (module, role), members in grouped.items()
    ]


_LAYERS: dict[str, Callable[[Iterable[str]], list[_Layer]]] = dict.fromkeys(
    ("glm4_moe", "qwen3_moe", "qwen3", "llama"), _merged_layers
)


def _module(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


def _unquantized_format(name: str, shape: tuple[int, ...]) -> Format:
    if len(shape) > 2:
        raise ValueError(f"{name}: shape {list(shape)}; Hugging Face tensors here have at most two axes")
    return Format.f32 if _ALWAYS_FLOAT32.fullmatch(name) else Format.bf16
