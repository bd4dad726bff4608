"""The Triton kernel of the loss on a GPU; `fused_linear.PlainLoss` computes the same in plain torch."""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of logits of a row that a program reads at a time.
BLOCK = 4096


@triton.jit
def cross_entropy_kernel(
    logits, targets, weights, right, p, p_rows, losses, width, soft, BLOCK: tl.constexpr
):
    """Reads a row of logits twice: for its maximum and its sums, then for the gradient, which replaces the row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    weight = tl.load(weights + row)
    if p is not None:
        p += tl.load(p_rows + row) * width
    top = -float("inf")
    best = 0
    total = 0.0
    mass = 0.0
    dot = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
        largest = tl.max(x, 0)
        first = tl.min(tl.where(x == largest, column, width), 0)
        best = tl.where(largest > top, first, best)
        above = tl.maximum(top, largest)
        total = total * tl.exp(top - above) + tl.sum(tl.exp(x - above), 0)
        top = above
        if p is not None:
            share = tl.load(p + column, mask=inside, other=0.0).to(tl.float32)
            mass += tl.sum(share, 0)
            dot += tl.sum(tl.where(inside, share * x, 0.0), 0)
    log_sum = top + tl.log(total)
    loss = (1.0 - soft) * (log_sum - tl.load(logits + target).to(tl.float32))
    if p is not None:
        loss += soft * (mass * log_sum - dot)
    tl.store(losses + row, loss * weight)
    tl.store(right + row, (best == target).to(tl.uint8))
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
        slope = tl.exp(x - log_sum) - tl.where(column == target, 1.0 - soft, 0.0)
        if p is not None:
            slope -= soft * tl.load(p + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(logits + column, (slope * weight).to(logits.dtype.element_ty), mask=inside)


def cross_entropy(logits: Tensor, targets: Any) -> Tensor:
    """Returns the same loss as `fused_linear.PlainLoss`, with one kernel launch and one sum."""
    losses = torch.empty(len(logits), device=logits.device)
    cross_entropy_kernel[(len(logits),)](
        logits,
        targets.ids,
        targets.weights,
        targets.right,
        targets.teacher,
        targets.teacher_rows,
        losses,
        logits.shape[1],
        targets.soft if targets.teacher is not None else 0.0,
        BLOCK,
        num_warps=8,
    )
    return losses.sum()
