"""A mirror's tensors as torch tensors, in the form a model loads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from rollout_bridge.quantization.host import MAXIMUM_SCALE, MINIMUM_SCALE, dequantize_block_fp8
from rollout_bridge.quantization.plan import Format, scale_name
from rollout_bridge.weights.read.mirror_view import TENSORS, MirrorView

_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}


class MirrorTensors:
    """The tensors of one version. The mirror's owner must hold still while they are in use."""

    def __init__(self, directory: Path, *, version: int) -> None:
        """Maps the mirror. Raises `MirrorError` if it has none, ValueError if it holds another version."""
        view = MirrorView.open(directory)
        if view.version != version:
            raise ValueError(
                f"mirror {directory}: holds version {view.version}, version {version} was asked for; an "
                "agent must not move its mirror before the engine has taken the version it is at"
            )
        # Copy-on-write pages: torch wants memory it may write to, and the file is never written.
        pages = np.memmap(directory / TENSORS, mode="c", dtype=np.uint8)
        self._view = dataclasses.replace(view, data=pages)
        self._quantized = {name for name, form in view.run.plan.formats.items() if form is Format.fp8_block}
        self._scales = {scale_name(name) for name in self._quantized}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._view.specs)

    def canonical(self, name: str) -> torch.Tensor:
        """The tensor as stored (float8_e4m3fn, bfloat16 or float32), backed by the mapped file."""
        bits = self._view.writable(name)
        return torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}")).view(
            _DTYPES[self._view.specs[name].dtype]
        )

    def bfloat16(self, name: str) -> torch.Tensor:
        """The BF16 weight that FP8 codes and their scales stand for, exactly, in memory of its own."""
        scales = self._view.tensor(scale_name(name)).view(np.float32)
        bits = dequantize_block_fp8(self._view.tensor(name), scales, name=name)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)

    def load(self, names: Iterable[str], *, native_fp8: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs for `model.load_weights`.

        native_fp8: codes and scales as stored, mapped, so that all workers of a host share one copy in the
            page cache. Otherwise FP8 tensors come as BF16 and scales do not come.
        """
        for name in names:
            if native_fp8 and name in self._scales:
                scales = self.canonical(name)
                mantissas, _ = torch.frexp(scales)
                inside = (scales >= MINIMUM_SCALE) & (scales <= MAXIMUM_SCALE) & (mantissas == 0.5)
                if not bool(inside.all()):  # NaN and packed exponents too
                    raise ValueError(
                        f"{name}: scale {scales[~inside].flatten()[0].item()!r} is not a power of two in "
                        f"[{MINIMUM_SCALE}, {MAXIMUM_SCALE}]; nothing was loaded"
                    )
                yield name, scales
            elif native_fp8 or not (name in self._quantized or name in self._scales):
                yield name, self.canonical(name)
            elif name in self._quantized:
                yield name, self.bfloat16(name)
