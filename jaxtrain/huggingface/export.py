"""Writes parameters on a mesh to a Hugging Face directory, tensor by tensor.

Stacked parameters are loaded one at a time and cut into tensors on the devices; one tensor at a time is on
the host. Files hold the tensors in the order of the parameters; the index gives the file of each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.huggingface.layout import ExportFormat, check_destination, copy_companions, write_config
from rollout_bridge import architectures
from rollout_bridge.architectures import DecoderConfig
from rollout_bridge.architectures.tensors import TensorSource, leading_shape, paths
from rollout_bridge.files import whole_directory
from rollout_bridge.quantization.host import quantize_block_fp8, scale_shape
from rollout_bridge.quantization.plan import (
    Format,
    QuantizationPlan,
    ServingLayout,
    fp8_share,
    plan_for,
    scale_name,
)
from rollout_bridge.safetensors_files import TensorOutput, write_tensors
from sharding import processes

log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9  # the size the Hugging Face hub recommends


def export(
    destination: Path,
    hf_config: Mapping[str, Any],
    parameter: Callable[[str], jax.Array],
    *,
    companions: Path,
    export_format: ExportFormat = ExportFormat.BF16,
    serving: ServingLayout | None = None,
    shard_bytes: int = SHARD_BYTES,
    min_fp8_share: float = 0.0,
) -> Path:
    """Writes the directory and returns it; all processes of the mesh call it, process 0 writes.

    parameter: a stacked parameter by path, float32; called once a path.
    companions: directory of the tokenizer's files, which are copied.
    serving: layout of the FP8 engine, whose slices must be whole blocks; None: one rank.
    min_fp8_share: of the parameters, for FP8.
    Raises `Fp8ShareError` before anything is written, `DestinationError` if the directory exists already or
    the disk has no room. A failure leaves nothing behind.
    """
    decoder = architectures.read(hf_config)
    sources = architectures.tensors(decoder)
    layout = serving or ServingLayout()
    plan = _plan(decoder, sources, export_format, layout)
    if export_format is ExportFormat.FP8:
        share = fp8_share(sources, plan, layout)
        share.check(min_fp8_share, field="--min-fp8-share")
        log.info("%s", share)
    outputs = list(_outputs(sources, plan, parameter))
    with ExitStack() as stack:
        if processes.process_index() == 0:
            check_destination(destination, nbytes=sum(output.nbytes for output in outputs))
            directory = stack.enter_context(whole_directory(destination))
            write_tensors(outputs, directory, shard_bytes)
            copy_companions(companions, directory)
            write_config(directory, _config(hf_config, plan, export_format))
        else:
            for output in outputs:  # takes part in gathering it
                output.bits()
    processes.barrier("export")
    return destination


def _plan(
    decoder: DecoderConfig,
    sources: Iterable[TensorSource],
    export_format: ExportFormat,
    serving: ServingLayout,
) -> QuantizationPlan:
    if export_format is ExportFormat.F32:
        return QuantizationPlan({source.name: Format.f32 for source in sources})
    quantize = export_format is ExportFormat.FP8
    return plan_for(sources, serving=serving, quantize=quantize, head_dim=decoder.head_dim)


_OURS = ("torch_dtype", "architectures", architectures.REFERENCE)  # written anew, or read by jaxtrain only


def _config(
    hf_config: Mapping[str, Any], plan: QuantizationPlan, export_format: ExportFormat
) -> dict[str, Any]:
    config = {key: value for key, value in hf_config.items() if key not in _OURS}
    config["architectures"] = [architectures.class_name(hf_config)]
    config["dtype"] = "float32" if export_format is ExportFormat.F32 else "bfloat16"
    if Format.fp8_block in plan.formats.values():
        config["quantization_config"] = plan.hf_quantization_config()
    return config


def _outputs(
    sources: tuple[TensorSource, ...], plan: QuantizationPlan, parameter: Callable[[str], jax.Array]
) -> Iterable[TensorOutput]:
    """In the order of the parameters, so that only one at a time is loaded."""
    held: dict[str, jax.Array] = {}

    def tensor(source: TensorSource, lead: int, stored: Format) -> np.ndarray:
        if source.path not in held:
            held.clear()
            held[source.path] = parameter(source.path)
        return _tensor(held[source.path], source, lead, stored)

    for group in paths(sources).values():
        lead = len(leading_shape(group))
        for source in group:
            stored, size = plan.formats[source.name], math.prod(source.shape)
            if stored is Format.fp8_block:
                yield from _quantized(source, size, lambda s=source, n=lead: tensor(s, n, Format.bf16))
                continue
            nbytes = size * (4 if stored is Format.f32 else 2)
            yield TensorOutput(
                source.name,
                str(stored),
                source.shape,
                nbytes,
                lambda s=source, n=lead, f=stored: tensor(s, n, f),
            )


def _quantized(
    source: TensorSource, size: int, bf16_bits: Callable[[], np.ndarray]
) -> Iterable[TensorOutput]:
    """Codes, then scales; computing the codes keeps the scales for the next output."""
    scales: list[np.ndarray] = []

    def codes() -> np.ndarray:
        found, scale = quantize_block_fp8(bf16_bits(), name=source.name)
        scales.append(scale)
        return found

    blocks = scale_shape(source.shape)
    yield TensorOutput(source.name, str(Format.fp8_block), source.shape, size, codes)
    yield TensorOutput(scale_name(source.name), str(Format.f32), blocks, 4 * math.prod(blocks), scales.pop)


def _tensor(parameter: jax.Array, source: TensorSource, lead: int, stored: Format) -> np.ndarray:
    """Bits of one tensor, whole, in every process."""
    if not isinstance(parameter.sharding, NamedSharding):
        raise TypeError(f"{source.path}: sharding {parameter.sharding}, expected one on a mesh")
    index = np.asarray(source.index, np.int32).reshape(lead)
    return np.asarray(_taker(parameter.sharding, lead, source.transpose, stored)(parameter, index))


@lru_cache(maxsize=256)
def _taker(
    sharding: NamedSharding, lead: int, transpose: bool, stored: Format
) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """Cuts one position of the leading axes out of the shard that has it, as bits, replicated.

    The other shards add zeros to those bits, so that only this one tensor is communicated.
    """
    mesh, spec = sharding.mesh, tuple(sharding.spec)
    axes = [_axis_names(spec[axis]) if axis < len(spec) else () for axis in range(lead)]
    split = tuple(name for group in axes for name in group)

    def take(shard: jax.Array, index: jax.Array) -> jax.Array:
        start, mine = [], jnp.bool_(True)
        for axis, group in enumerate(axes):
            local = index[axis] - (jax.lax.axis_index(group) if group else 0) * shard.shape[axis]
            mine &= (local >= 0) & (local < shard.shape[axis])
            start.append(jnp.clip(local, 0, shard.shape[axis] - 1))
        sizes = (*([1] * lead), *shard.shape[lead:])
        zero = [jnp.int32(0)] * (shard.ndim - lead)
        tensor = jax.lax.dynamic_slice(shard, [*start, *zero], sizes).reshape(sizes[lead:])
        wide = stored is Format.f32
        tensor = tensor.astype(jnp.float32 if wide else jnp.bfloat16)
        bits = jax.lax.bitcast_convert_type(tensor, jnp.uint32 if wide else jnp.uint16)
        if split:
            bits = jax.lax.psum(jnp.where(mine, bits, 0).astype(jnp.uint32), split).astype(bits.dtype)
        return bits.swapaxes(-1, -2) if transpose else bits

    trailing = [*spec[lead:]]
    if transpose:
        trailing = [*trailing, *([None] * (2 - len(trailing)))]
        trailing[-2:] = trailing[:-3:-1]
    mapped = jax.shard_map(
        take,
        mesh=mesh,
        in_specs=(sharding.spec, PartitionSpec()),
        out_specs=PartitionSpec(*trailing),
        check_vma=False,
    )
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _axis_names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
