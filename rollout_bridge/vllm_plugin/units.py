"""Which tensors have to be loaded together.

vLLM reloads a leaf module as a whole: it is put back on the meta device, filled, processed (packed, on CPU),
and copied over the old one. A tensor left out leaves uninitialised memory, so a change of one Hugging Face
tensor brings every tensor of the vLLM module it lands in: weight, scale and bias; q, k and v; gate and up;
all routed experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence


def unit_of(name: str, packed: Mapping[str, Sequence[str]]) -> str:
    """The vLLM leaf module that a Hugging Face tensor is loaded into.

    packed: a model's `packed_modules_mapping`, e.g. {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    """
    path = name.split(".")[:-1]
    for position, part in enumerate(path):
        if part == "experts" and position + 1 < len(path) and path[position + 1].isdigit():
            return ".".join(path[: position + 1])
    if path:
        for merged, parts in packed.items():
            if path[-1] in parts:
                path[-1] = merged
                break
    return ".".join(path)


def whole_units(
    changed: Iterable[str], names: Iterable[str], packed: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Names to load for `changed`: with each, all of its unit, units kept together, in the order of `names`.

    Raises `KeyError` if a changed tensor is not among `names`.
    """
    units: dict[str, list[str]] = {}
    known = set()
    for name in names:
        known.add(name)
        units.setdefault(unit_of(name, packed), []).append(name)
    touched = set()
    for name in changed:
        if name not in known:
            raise KeyError(f"tensor {name!r} changed but the mirror's index does not have it")
        touched.add(unit_of(name, packed))
    return tuple(name for unit, members in units.items() if unit in touched for name in members)


def held_here(
    names: Iterable[str],
    local_expert: Mapping[str, Callable[[int], int]],
    packed: Mapping[str, Sequence[str]],
) -> list[str]:
    """`names` without the experts that another expert-parallel rank holds.

    local_expert: by unit of routed experts, an expert's number on this rank, -1 if it is not here.
    """
    kept = []
    for name in names:
        local = local_expert.get(unit_of(name, packed)) if ".experts." in name else None
        if local is None or local(int(name.partition(".experts.")[2].partition(".")[0])) >= 0:
            kept.append(name)
    return kept


def units_of(names: Iterable[str], packed: Mapping[str, Sequence[str]], *, layers: int) -> list[str]:
    """Modules that a model of so many decoder layers loads the Hugging Face tensors `names` into, in order.

    What lies beyond its layers (multi-token prediction) belongs to another model.
    """
    units = dict.fromkeys(unit_of(name, packed) for name in names)
    return [unit for unit in units if not _beyond(unit, layers)]


def untouched_units(units: Iterable[str], loaded: Iterable[str]) -> list[str]:
    """Those of `units` of which the model loaded no parameter.

    loaded: names of vLLM parameters, as `load_weights` returns them.
    """
    # A merged module may be loaded by way of a child (routed experts), so a prefix is what counts.
    found = {
        ".".join(parts[:end]) for name in loaded for parts in [name.split(".")] for end in range(len(parts))
    }
    return [unit for unit in units if unit not in found]


def _beyond(unit: str, layers: int) -> bool:
    parts = unit.split(".")
    return any(
        part == "layers" and number.isdigit() and int(number) >= layers
        for part, number in zip(parts, parts[1:], strict=False)
    )
