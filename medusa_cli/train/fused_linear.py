"""Fused linear cross-entropy: the loss on a linear layer's logits and the loss's gradients, in blocks of rows.

The gradients overwrite the logits, so the two are never in memory together. This saves memory and the time to fill it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Number of rows of fp32 logits processed at once. 128 rows of 12,288 logits stay in a CPU's cache.
# Such small blocks would leave a GPU idle.
ROWS = 128
GPU_ROWS = 4096
# Takes the logits [n, M] of a block of rows, and the block's place among all rows, as a slice. Returns
# the block's summed loss, and overwrites the logits with the loss's gradient.
RowLoss = Callable[[Tensor, slice], Tensor]


def rows_at_once(device: torch.device) -> int:
    """Returns how many rows of fp32 logits are processed at once."""
    return ROWS if device.type == "cpu" else GPU_ROWS


@dataclass(frozen=True)
class Targets:
    """Holds the target distributions of n rows: (1 - soft) * one-hot(ids [n]) + soft * teacher[teacher_rows [n]].

    weights [n]: a factor for each row's loss; 0 for rows without a target. right [n]: is set to 1 for each row whose
    highest logit is that of its token in `ids`, and to 0 for other rows. teacher [m, M]: the teacher's probabilities.
    """

    ids: Tensor
    weights: Tensor
    right: Tensor
    teacher: Tensor | None = None
    teacher_rows: Tensor | None = None
    soft: float = 0.0

    def __getitem__(self, rows: slice) -> "Targets":
        return replace(
            self,
            ids=self.ids[rows],
            weights=self.weights[rows],
            right=self.right[rows],
            teacher_rows=None if self.teacher_rows is None else self.teacher_rows[rows],
        )


def linear_loss(
    hidden: Tensor, matrix: Tensor, targets: Targets, bias: Tensor | None = None
) -> Tensor:
    """Returns the weighted sum of cross-entropies of the rows of softmax(hidden [n, H] @ matrix [M, H]^T + bias [M]).

    The matmul runs in the dtype of `hidden`, and the loss is computed in fp32. The bias is not trained.
    """
    bias = None if bias is None else bias.to(hidden.dtype)
    compute = kernel_of(hidden.device) or PlainLoss()

    def linear(rows: Tensor) -> Tensor:
        with torch.autocast(rows.device.type, enabled=False):
            return F.linear(rows, matrix.to(rows.dtype), bias)

    def loss(logits: Tensor, block: slice) -> Tensor:
        return compute(logits, targets[block])

    return blockwise_loss(loss, linear, hidden, [matrix])


@cache
def kernel_of(device: torch.device) -> "Callable[..., Tensor] | None":
    """Returns the GPU kernel that computes the loss, or None if the device cannot run it or it gives wrong results."""
    if device.type != "cuda":
        return None
    try:
        from medusa_cli.train.loss_kernel import cross_entropy as kernel

        numbers = torch.arange(300, device=device).sin().view(3, 100)
        ids = torch.tensor([0, 50, 99], device=device)
        results = []
        for compute in (kernel, PlainLoss()):
            logits = 3 * numbers
            right = torch.empty(3, dtype=torch.uint8, device=device)
            targets = Targets(ids, numbers[0, :3], right, numbers.softmax(-1), ids % 3, 0.5)
            results.append((compute(logits, targets), right.float(), logits))
        same = all(
            torch.allclose(ours, plain, atol=1e-5) for ours, plain in zip(*results, strict=True)
        )
        return kernel if same else None
    except Exception:  # many types of errors, without Triton or on GPUs unknown to Triton
        return None


class PlainLoss:
    """Computes cross-entropies as the kernel does, in plain torch."""

    def __init__(self) -> None:
        self._log_softmax = LogSoftmax()

    def __call__(self, logits: Tensor, targets: Targets) -> Tensor:
        """Returns the weighted sum of cross-entropies of logits [n, M], and overwrites the logits with its gradient."""
        log_q = self._log_softmax(logits)
        torch.eq(log_q.argmax(-1), targets.ids, out=targets.right)
        columns = targets.ids[:, None]
        weights = targets.weights
        soft = targets.soft
        hard = weights * (soft - 1.0 if targets.teacher is not None else -1.0)
        total = torch.dot(log_q.gather(1, columns)[:, 0], hard)
        shares = None
        if targets.teacher is not None:
            shares = targets.teacher[targets.teacher_rows].float()
            # In mixed precision, bmm would round to bf16.
            with torch.autocast(logits.device.type, enabled=False):
                expected = torch.bmm(shares[:, None], log_q[:, :, None])
            total -= soft * torch.dot(expected.view(-1), weights)
        gradient = torch.exp(log_q, out=logits if logits.dtype == log_q.dtype else log_q)
        if shares is not None:
            gradient.sub_(shares, alpha=soft)
        gradient.mul_(weights[:, None]).scatter_add_(1, columns, hard[:, None])
        if gradient is not logits:
            logits.copy_(gradient)
        return total


class LogSoftmax:
    """Computes fp32 log-probabilities of blocks of logits, each block in the same buffer as the block before.

    Allocating memory for every block costs more than the computation, because the system zeroes each page.
    """

    def __init__(self) -> None:
        self._logits = self._result = torch.empty(0)

    def __call__(self, logits: Tensor) -> Tensor:
        if self._logits.shape[1:] != logits.shape[1:] or len(self._logits) < len(logits):
            self._logits, self._result = (
                logits.new_empty(logits.shape, dtype=torch.float32) for _ in range(2)
            )
        wide = logits
        if logits.dtype != torch.float32:
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
    """Returns the sum of a loss over the rows of logits linear(hidden [n, H]), and computes the sum's gradients.

    Logits exist for `rows` rows at a time (None: for all), and fp32 logits for `rows_at_once` rows.
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
        total: Tensor | None = None
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
                value = loss(block, slice(start + first, start + first + len(block)))
                total = value if total is None else total + value
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
            (hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads))
            if to_hidden
            else None,
            *(next(by_weight) if needed else None for needed in to_weights),
        )
        return torch.zeros((), device=hidden.device) if total is None else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if saved is None else (saved * grad).to(saved.dtype) for saved in ctx.saved_tensors
        )
        return (None, None, None, None, *scaled)
