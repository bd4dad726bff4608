"""Cross-entropy over a large vocabulary without all fp32 logits at once: memory traffic costs most."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows of fp32 logits worked on at once: 128 x 12,288 stay in the cache of a CPU.
ROWS = 128


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of hidden [n, H] @ weight [M, H]^T against targets [n], and how many argmaxes hit.

    The same as F.cross_entropy(F.linear(hidden, weight).float(), targets), with the products in hidden's
    dtype and the gradients (the weight's in its own dtype) made on the way forward. n is at least 1.
    """
    loss, hits = _LinearCrossEntropy.apply(hidden, weight, targets, torch.is_grad_enabled())
    return loss, hits


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, learning: bool) -> tuple[Tensor, Tensor]:
        matrix = weight.detach().to(hidden.dtype)
        # First the logits, then, row block by row block, their gradients in the same place.
        with torch.autocast(hidden.device.type, enabled=False):
            work = F.linear(hidden.detach(), matrix)  # [n, M]
            total = torch.zeros((), device=hidden.device)
            hits = torch.zeros((), dtype=torch.long, device=hidden.device)
            for block, wanted in zip(work.split(ROWS), targets.split(ROWS), strict=True):
                scores = block.float()
                hits += (scores.argmax(-1) == wanted).sum()
                scores = scores.log_softmax(-1)
                total -= scores.gather(1, wanted[:, None]).sum()
                scores.exp_()
                scores.scatter_add_(1, wanted[:, None], scores.new_full((len(wanted), 1), -1.0))
                block.copy_(scores)
            if learning and any(ctx.needs_input_grad):
                share = 1.0 / len(targets)
                rows = work @ matrix * share if ctx.needs_input_grad[0] else None
                columns = None
                if ctx.needs_input_grad[1]:
                    columns = (work.T @ hidden.detach()).to(weight.dtype).mul_(share)
                ctx.save_for_backward(rows, columns)
        ctx.mark_non_differentiable(hits)
        return total / len(targets), hits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, columns = ctx.saved_tensors
        return (
            None if rows is None else (rows * grad).to(rows.dtype),
            None if columns is None else (columns * grad).to(columns.dtype),
            None,
            None,
        )
