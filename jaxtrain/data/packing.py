"""Best-fit packing of whole documents into fixed rows, and rows into microbatches.

Pure and global: the same documents in the same order give the same batch in every process. Documents are
never cut; one longer than a row is an error, since its source decides what to leave out.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data.batch import Batch
from rollout_bridge.errors import ExpectedError


class PackingError(ExpectedError, ValueError):
    """A document that fits no row; names its length and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """T tokens. `loss_weights[t]` weighs the prediction *of* token t; so do the RL arrays.

    The first is never predicted.
    tokens int32 [T], loss_weights float32 [T]; behavior_logprobs, versions [T] or None; routed_experts
    int16 [T, MoE layers, k] or None: of each token as an input, -1 = unknown; advantage and
    temperature of the whole document.
    """

    tokens: np.ndarray
    loss_weights: np.ndarray
    behavior_logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    advantage: float = 0.0
    temperature: float = 1.0


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of document indices, best-fit decreasing; ties keep the order given."""
    free: list[tuple[int, int]] = []  # (space left, bin), sorted
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise PackingError(
                f"document {index} has {length} tokens, more than batch.sequence_length {capacity}: "
                "raise batch.sequence_length or lower the limits of prompts and answers"
            )
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            bins.append([])
            space, bin_index = capacity, len(bins) - 1
        else:
            space, bin_index = free.pop(at)
        bins[bin_index].append(index)
        bisect.insort(free, (space - length, bin_index))
    return bins


def pack(
    documents: Sequence[Document],
    *,
    rows: int,
    sequence_length: int,
    routed_experts: tuple[int, int] | None = None,
) -> Batch:
    """Packs into as many microbatches of [rows, sequence_length] as needed, the last padded with empty rows.

    routed_experts: (MoE layers, k) of the batch's array of that name, which it then has whatever the
        documents have, so that one program takes every batch; None: the batch has one if a document has.

    A row holds sequence_length predictions, so a document of T tokens takes T - 1 positions.
    """
    bins = best_fit([max(len(d.tokens) - 1, 1) for d in documents], sequence_length)
    microbatches = max(-(-len(bins) // rows), 1)
    shape = (microbatches * rows, sequence_length)
    arrays = {
        name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segment_ids", "positions")
    } | {name: np.zeros(shape, np.float32) for name in ("loss_weights", "behavior_logprobs", "advantages")}
    arrays["temperature"] = np.ones(shape, np.float32)
    arrays["versions"] = np.full(shape, -1, np.int32)
    routed = {d.routed_experts.shape[1:] for d in documents if d.routed_experts is not None}
    routed |= {routed_experts} if routed_experts is not None else set()
    if len(routed) > 1:
        raise PackingError(
            f"routed experts of documents have shapes [T, *] with {sorted(routed)}, expected one (layers, "
            "k): they were sampled by different models"
        )
    for layers_and_k in routed:
        arrays["routed_experts"] = np.full((*shape, *layers_and_k), -1, np.int16)
    for row, members in enumerate(bins):
        start = 0
        for segment, index in enumerate(members, start=1):
            start = _place(arrays, row, start, segment, documents[index])
    split = {k: v.reshape(microbatches, rows, *v.shape[1:]) for k, v in arrays.items()}
    return Batch(**split)


def _place(arrays: dict[str, np.ndarray], row: int, start: int, segment: int, document: Document) -> int:
    size = len(document.tokens) - 1
    if size < 1:
        return start
    at = (row, slice(start, start + size))
    arrays["tokens"][at] = document.tokens[:-1]
    arrays["targets"][at] = document.tokens[1:]
    arrays["segment_ids"][at] = segment
    arrays["positions"][at] = np.arange(size)
    arrays["loss_weights"][at] = document.loss_weights[1:]
    arrays["temperature"][at] = document.temperature
    arrays["advantages"][at] = document.advantage
    if document.behavior_logprobs is not None:
        arrays["behavior_logprobs"][at] = document.behavior_logprobs[1:]
    if document.versions is not None:
        arrays["versions"][at] = document.versions[1:]
    if document.routed_experts is not None:
        arrays["routed_experts"][at] = document.routed_experts[:-1]
    return start + size
