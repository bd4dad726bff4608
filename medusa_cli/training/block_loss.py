"""A loss over logits taken a few rows at a time, its gradients made on the way: all logits at once fill the memory."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Rows of fp32 logits worked on at once: 64 x 49,152 are 12 MB, which stay near the cores.
ROWS = 64


class LogSoftmax:
    """fp32 log-probabilities of blocks of logits, in one buffer that the next block overwrites.

    Fresh megabytes for every block cost more than the work on them: the system hands out and zeroes each page anew.
    """

    def __init__(self) -> None:
        self._wide = self._found = torch.empty(0)

    def __call__(self, logits: Tensor) -> Tensor:
        if self._wide.shape[1:] != logits.shape[1:] or len(self._wide) < len(logits):
            self._wide, self._found = (logits.new_empty(logits.shape, dtype=torch.float32) for _ in range(2))
        wide = self._wide[: len(logits)].copy_(logits)
        return torch.log_softmax(wide, dim=-1, out=self._found[: len(logits)])

    @property
    def spare(self) -> Tensor:
        """The second buffer, free once the log-probabilities are made."""
        return self._wide


# Of fp32 log-probabilities [n, V] of the rows at a place: their summed loss, and its gradient by the logits [n, V],
# which may take the place of what was given.
Loss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def loss_by_blocks(
    loss: Loss, linear: Callable[[Tensor], Tensor], hidden: Tensor, weights: Sequence[Tensor], rows: int = ROWS
) -> Tensor:
    """The sum over blocks of rows of a loss of softmax(linear(hidden [P, H])), with no more than a block's logits.

    Gradients reach hidden and the weights, which must be all that `linear` learns by.
    """
    total: Tensor = _LossByBlocks.apply(loss, linear, rows, torch.is_grad_enabled(), hidden, *weights)
    return total


class _LossByBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: Loss,
        linear: Callable[[Tensor], Tensor],
        rows: int,
        learning: bool,
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[4:] if learning else (False,) * (1 + len(weights))
        sums = [torch.zeros_like(one) if want else None for one, want in zip((hidden, *weights), wanted, strict=True)]
        leaves = [one for one, want in zip(weights, wanted[1:], strict=True) if want]
        total = torch.zeros((), device=hidden.device)
        log_softmax = LogSoftmax()
        for first in range(0, len(hidden), rows):
            block = slice(first, first + rows)
            part = hidden[block].detach().requires_grad_(wanted[0])
            with torch.set_grad_enabled(any(wanted)):
                logits = linear(part)
            found, gradient = loss(log_softmax(logits.detach()), block)
            total += found
            if any(wanted):
                made = torch.autograd.grad(logits, [part, *leaves] if wanted[0] else leaves, gradient.to(logits.dtype))
                for kept, new in zip((one for one in sums if one is not None), made, strict=True):
                    (kept[block] if kept is sums[0] else kept).add_(new)
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if one is None else (one * grad).to(one.dtype) for one in ctx.saved_tensors)
        return (None, None, None, None, *found)
