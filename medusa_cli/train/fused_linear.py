"""Fused linear cross-entropy: the loss on a linear layer's logits and its gradients, in blocks of rows.

The full logits and their gradients are never in memory at the same time. This saves memory and the
time to fill it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows of fp32 logits processed at once: 128 x 12,288 stay in a CPU's cache. On a GPU, small blocks
# would leave it idle.
ROWS = 128
GPU_ROWS = 4096
# Takes fp32 log-probabilities [n, V] and the slice of rows they belong to. Returns the summed loss
# and its gradient with respect to the logits [n, V], which may reuse the argument's memory.
RowLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def rows_at_once(device: torch.device) -> int:
    """Returns how many rows of fp32 logits are processed at once."""
    return ROWS if device.type == "cpu" else GPU_ROWS


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Tensor | None = None,
    *,
    soft: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the mean loss of softmax(hidden [n, H] @ weight [M, H]^T + bias [M]) and the top-1 hits on targets [n].

    The loss is the cross-entropy against (1 - soft) * one-hot + soft * teacher [n, M], or 0 if
    there are no rows. The matmul runs in the dtype of `hidden`, and the loss is computed in fp32.
    The bias is not trained.
    """
    bias = None if bias is None else bias.to(hidden.dtype)
    hits = torch.zeros((), dtype=torch.long, device=hidden.device)

    def linear(rows: Tensor) -> Tensor:
        with torch.autocast(rows.device.type, enabled=False):
            return F.linear(rows, weight.to(rows.dtype), bias)

    def loss(log_q: Tensor, block: slice) -> tuple[Tensor, Tensor]:
        nonlocal hits
        hits = hits + (log_q.argmax(-1) == targets[block]).sum()
        return cross_entropy(
            log_q, targets[block], None if teacher is None else teacher[block].float(), soft
        )

    total = blockwise_loss(loss, linear, hidden, [weight])
    return total / max(1, len(targets)), hits


def cross_entropy(
    log_q: Tensor, targets: Tensor, p: Tensor | None = None, soft: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns the summed cross-entropy of rows [n, M] and its gradient with respect to the logits.

    The target distribution is (1 - soft) * one-hot + soft * p. The gradient overwrites log_q.
    """
    total = -(1.0 - soft) * log_q.gather(1, targets[:, None]).sum()
    if p is not None and soft:
        total -= soft * torch.dot(p.view(-1), log_q.view(-1))
    gradient = log_q.exp_()
    if p is not None and soft:
        gradient.sub_(p, alpha=soft)
    return total, gradient.scatter_add_(
        1, targets[:, None], gradient.new_full((len(targets), 1), soft - 1.0)
    )


class LogSoftmax:
    """Computes fp32 log-probabilities of blocks of logits in one buffer, which the next block overwrites.

    Allocating memory for every block costs more than the computation, because the system zeroes
    each page.
    """

    def __init__(self) -> None:
        self._logits = self._result = torch.empty(0)

    def __call__(self, logits: Tensor) -> Tensor:
        if self._logits.shape[1:] != logits.shape[1:] or len(self._logits) < len(logits):
            self._logits, self._result = (
                logits.new_empty(logits.shape, dtype=torch.float32) for _ in range(2)
            )
        wide = self._logits[: len(logits)].copy_(logits)
        return torch.log_softmax(wide, dim=-1, out=self._result[: len(logits)])

    @property
    def spare(self) -> Tensor:
        """Returns the logits buffer, which is free once the log-probabilities are computed."""
        return self._logits


def blockwise_loss(
    loss: RowLoss,
    linear: Callable[[Tensor], Tensor],
    hidden: Tensor,
    weights: Sequence[Tensor],
    rows: int | None = None,
) -> Tensor:
    """Returns the sum of a loss over the rows of softmax(linear(hidden [n, H])), and computes its gradients.

    Logits exist for `rows` rows at a time (None: for all), and fp32 logits for `rows_at_once`.
    Gradients reach `hidden` and `weights`, which must include every trainable weight of `linear`.
    """
    rows = rows or max(1, len(hidden))
    total: Tensor = _BlockwiseLoss.apply(
        loss, linear, rows, torch.is_grad_enabled(), hidden, *weights
    )
    return total


class _BlockwiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: RowLoss,
        linear: Callable[[Tensor], Tensor],
        rows: int,
        learning: bool,
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        to_hidden, *to_weights = (learning and needed for needed in ctx.needs_input_grad[4:])
        leaves = [weight for weight, needed in zip(weights, to_weights, strict=True) if needed]
        total = torch.zeros((), device=hidden.device)
        log_softmax = LogSoftmax()
        at_once = rows_at_once(hidden.device)
        hidden_grads: list[Tensor] = []
        weight_grads: list[Tensor] = []
        for start in range(0, max(1, len(hidden)), rows):
            part = hidden[start : start + rows].detach().requires_grad_(to_hidden)
            with torch.set_grad_enabled(to_hidden or bool(leaves)):
                logits = linear(part)
            # The gradient overwrites the logits, block by block.
            gradient = logits.detach()
            for first in range(0, len(part), at_once):
                block = gradient[first : first + at_once]
                value, slope = loss(
                    log_softmax(block), slice(start + first, start + first + len(block))
                )
                total += value
                block.copy_(slope)
            if logits.requires_grad:
                inputs = [part, *leaves] if to_hidden else leaves
                grads = list(torch.autograd.grad(logits, inputs, gradient))
                if to_hidden:
                    hidden_grads.append(grads.pop(0))
                if weight_grads:
                    torch._foreach_add_(weight_grads, grads)
                else:
                    weight_grads = grads
        by_weight = iter(weight_grads)
        ctx.save_for_backward(
            torch.cat(hidden_grads) if to_hidden else None,
            *(next(by_weight) if needed else None for needed in to_weights),
        )
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if saved is None else (saved * grad).to(saved.dtype) for saved in ctx.saved_tensors
        )
        return (None, None, None, None, *scaled)
