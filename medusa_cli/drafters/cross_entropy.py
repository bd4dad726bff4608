"""Cross-entropy over a large vocabulary without all fp32 logits at once: memory traffic costs most."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows of fp32 logits worked on at once: 128 x 12,288 stay in the cache of a CPU.
ROWS = 128


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor | None = None, soft: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of hidden [n, H] @ weight [M, H]^T against targets [n], and how many argmaxes hit.

    With a teacher's probabilities [n, M] the target is the mixture (1 - soft) * one-hot + soft * teacher. The same as
    F.cross_entropy over F.linear(hidden, weight).float(), with the products in hidden's dtype and the gradients
    (the weight's in its own dtype) made on the way forward. n is at least 1.
    """
    loss, hits = _LinearCrossEntropy.apply(
        hidden, weight, targets, teacher, soft if teacher is not None else 0.0, torch.is_grad_enabled()
    )
    return loss, hits


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        teacher: Tensor | None,
        soft: float,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        matrix = weight.detach().to(hidden.dtype)
        # First the logits, then, row block by row block, their gradients in the same place.
        with torch.autocast(hidden.device.type, enabled=False):
            work = F.linear(hidden.detach(), matrix)  # [n, M]
            total = torch.zeros((), device=hidden.device)
            hits = torch.zeros((), dtype=torch.long, device=hidden.device)
            for first in range(0, len(targets), ROWS):
                block, wanted = work[first : first + ROWS], targets[first : first + ROWS]
                scores = block.float()
                hits += (scores.argmax(-1) == wanted).sum()
                scores = scores.log_softmax(-1)
                total -= (1.0 - soft) * scores.gather(1, wanted[:, None]).sum()
                if soft and teacher is not None:
                    aim = teacher[first : first + ROWS].float()
                    total -= soft * torch.dot(aim.view(-1), scores.view(-1))
                    scores.exp_().sub_(aim, alpha=soft)
                else:
                    scores.exp_()
                scores.scatter_add_(1, wanted[:, None], scores.new_full((len(wanted), 1), soft - 1.0))
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
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        rows, columns = ctx.saved_tensors
        return (
            None if rows is None else (rows * grad).to(rows.dtype),
            None if columns is None else (columns * grad).to(columns.dtype),
            None,
            None,
            None,
            None,
        )
