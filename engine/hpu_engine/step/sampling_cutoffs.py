"""Which tokens a row may draw: the smallest weight that stays, by top-k, then top-p of what that leaves, then min-p.

Most rows are decided by their largest weights, which are sorted. The nucleus of a flatter row is found without sorting:
weights are summed in buckets of nearly equal weight, and only the bucket that holds the edge is put in order. A `top_k`
beyond the sorted weights is selected without sorting, in its own row: it costs the others nothing. Tokens as likely as
the last one that stays stay too, so that the order in which a library sorts equals decides nothing. What is done for a
row depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpu_engine.device.base import HOST
from hpu_engine.scheduling.sampling_params import SamplingParams

HEAD = 256
"""How many of a row's largest weights are sorted at most to find its edges among them."""

_BUCKET_SHIFT = 17
"""A bucket is a float32's exponent and first 6 digits: weights in it differ by 1.6 % at most."""
_BUCKETS = (0x3F800000 >> _BUCKET_SHIFT) + 1
"""Weights are at most 1, and floats that are not negative lie in the order of their bits."""


def cutoffs(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[rows, 1] for `weights` [rows, vocab] float32, 1 for the most likely token and not negative."""
    vocab = weights.shape[-1]
    head = min(HEAD, vocab)
    chosen = [index for index, own in enumerate(params) if own.top_p < 1.0]
    widest = max((own.top_k for own in params if own.top_k <= head), default=0)
    ordered = weights.topk(max(head if chosen else 1, widest)).values
    top_k = torch.tensor([[min(own.top_k or vocab, vocab)] for own in params], device=HOST)
    kth = torch.where(top_k < vocab, ordered.gather(1, (top_k - 1).clamp_max(ordered.shape[-1] - 1)), 0.0)
    for index, own in enumerate(params):
        if head < own.top_k < vocab:
            kth[index] = float(np.partition(weights[index].numpy(), vocab - own.top_k)[vocab - own.top_k])
    min_p = torch.tensor([[own.min_p] for own in params], dtype=torch.float32, device=HOST)
    edges = torch.maximum(kth, min_p)
    if chosen:
        rows = slice(None) if len(chosen) == len(params) else torch.tensor(chosen, device=HOST)
        top_p = torch.tensor([[params[index].top_p] for index in chosen], dtype=torch.float64, device=HOST)
        pth = _nucleus_edges(weights[rows], ordered[rows, :head], kth[rows], top_k[rows], top_p)
        edges[rows] = torch.maximum(edges[rows], pth)
    return edges


def drop_below(weights: Tensor, edges: Tensor) -> None:
    """Makes 0 what is below its row's edge: `weights` [rows, vocab] in place, `edges` [rows, 1]."""
    # One pass for each row. A mask of all of them is written and read again, and takes five times as long.
    below = torch.nextafter(edges, edges.new_tensor(-1.0))[:, 0].tolist()
    for row, most_dropped in zip(weights, below, strict=True):
        torch.threshold_(row, most_dropped, 0.0)


def _nucleus_edges(weights: Tensor, head: Tensor, kth: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[rows, 1]; `head` holds the largest of `weights` in order, what is below `kth` is out already."""
    left = weights
    if bool(kth.any()):
        left = weights.clone()
        drop_below(left, kth)
    # A cumulated sum runs through a row in one order; a plain sum of few long rows is cut among threads.
    wanted = top_p * left.cumsum(-1)[:, -1:].double()
    # A token stays while the mass before it is below what is wanted: the first always does.
    before = (head.cumsum(-1) - head).double()
    inside = ((before < wanted) & (head >= kth)).sum(-1, keepdim=True)
    edges = head.gather(1, (inside - 1).clamp_min(0))
    is_beyond = (inside == head.shape[-1]) & (top_k > head.shape[-1])
    flat = is_beyond[:, 0].nonzero()[:, 0]
    if flat.shape[0]:
        edges[flat] = _edges_in_buckets(left[flat], top_p[flat])
    return edges


def _edges_in_buckets(weights: Tensor, top_p: Tensor) -> Tensor:
    rows = weights.shape[0]
    bucket_of = (weights.view(torch.int32) >> _BUCKET_SHIFT).long()
    sums = weights.new_zeros(rows, _BUCKETS).scatter_add_(1, bucket_of, weights).double()
    through = sums.flip(1).cumsum(1).flip(1)
    wanted = top_p * through[:, :1]
    # The last bucket with a weight in it of which the heaviest still stays holds the edge.
    holds = (through - sums < wanted) & (sums > 0)
    edge_bucket = holds.to(torch.int8).argmax(1, keepdim=True)
    above = (through - sums).gather(1, edge_bucket)
    edges = weights.new_empty(rows, 1)
    for row in range(rows):
        inside = weights[row][bucket_of[row] == edge_bucket[row]].sort(descending=True).values
        before = above[row] + inside.double().cumsum(0) - inside
        edges[row] = inside[max(int((before < wanted[row]).sum()) - 1, 0)]
    return edges
