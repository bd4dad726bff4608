"""The losses of drafters' heads, over a large vocabulary without all fp32 logits at once: memory traffic costs most."""

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.backbone import Backbone, adapter
from medusa_cli.drafters.base import Batch, Losses, Objective
from medusa_cli.drafters.scored import Scored

if TYPE_CHECKING:
    from medusa_cli.drafters.heads import HeadDrafter

# ce: cross-entropy to the token, or its mixture with the teacher's distribution p; kl: KL(p || q) of the head's q;
# lk: lambda KL(p || q) + (1 - lambda) TV(p, q) with lambda = exp(-ETA alpha), where alpha = 1 - TV, the mass that p and
# q share, is the batch's mean: KL leads while they are far apart, then what is accepted counts (arXiv:2602.23881).
KINDS = ("ce", "kl", "lk")
ETA = 3.0
# Rows of fp32 logits worked on at once: 128 x 12,288 stay in the cache of a CPU.
ROWS = 128


def heads_loss(drafter: "HeadDrafter", backbone: Backbone, batch: Batch, objective: Objective) -> Losses:
    """Sum over heads k of decay^k times the loss of the token k places on, a mean over positions (equation 1).

    A target outside the draft vocabulary can be neither learnt nor guessed: it adds nothing to the loss and counts as a
    miss in the accuracy. The states of heads that see the drafted tokens are also drawn, by their smooth L1 distance,
    to those that the backbone had at the targets' places (as in EAGLE, arXiv:2401.15077), which say more than a token.
    A head that sees none could but learn the mean of the states that may come, which draws it away from any of their
    tokens. That part is in the total alone.
    """
    place, none = drafter.places(batch.next.device), batch.next.new_zeros(())
    positions = max(1, int((batch.segment >= 0).sum()))
    states_of = drafter.encode(backbone, batch)
    p = teacher(drafter, backbone, batch) if objective.soft or objective.kind != "ce" else None
    bias, scored = drafter.bias(backbone), None
    if objective.scored is not None and objective.scored < len(drafter.draft_ids) and torch.is_grad_enabled():
        targets = place[batch.next[batch.learnt]]
        counts = torch.bincount(targets[targets >= 0], minlength=len(drafter.draft_ids))
        scored = Scored.draw(counts.float() if p is None else p.sum(0, dtype=torch.float), counts > 0, objective.scored)
        place, bias = scored.places(place), scored.bias(bias)
        p = None if p is None else scored.teacher(p)
    some_rows = cache(scored.of) if scored is not None else None  # heads may share a matrix
    terms, per_head, correct, counted, learnt = [], [], [], [], []
    for k in range(1, drafter.num_heads + 1):
        rows = batch.targets(k)
        targets = place[batch.next[rows + k]]
        counted.append(none + len(rows))
        rows, targets = rows[targets >= 0], targets[targets >= 0]
        learnt.append(none + len(rows))
        states = states_of(k - 1, rows)
        if not len(rows):
            # Zero by way of the head's states: a pass back through a split model must be made all the same.
            terms.append(states.sum() * 0.0)
            per_head.append(terms[-1])
            correct.append(none)
            continue
        read, matrix = drafter.product(backbone, k - 1, states, batch.next[rows + k - 1])
        loss, hits = linear_loss(
            read,
            matrix if some_rows is None else some_rows(matrix),
            targets,
            None if p is None else p[rows + k],
            objective.soft,
            kind=objective.kind,
            bias=bias,
        )
        per_head.append(loss)
        correct.append(hits)
        if objective.regress and k <= drafter.sees_drafted:
            goals = batch.hidden[rows + k, -drafter.config.hidden_size :].detach().float()
            loss = loss + objective.regress * F.smooth_l1_loss(states.float(), goals)
        terms.append(objective.decay**k * len(rows) / positions * loss)
    sums = (torch.stack(one) for one in (correct, counted, learnt))
    return Losses(torch.stack(terms).sum(), per_head, *sums)


@torch.no_grad()
def teacher(drafter: "HeadDrafter", backbone: Backbone, batch: Batch) -> Tensor:
    """The backbone's probabilities [P, M] over the heads' vocabulary at every position.

    In stage 2 they are those of the adapted model, by its own lm_head: that is what will verify the heads' guesses.
    What ties it to the original is the model's own loss, self-distillation's KL (section 3.3.2).
    """
    final = batch.hidden[:, -drafter.config.hidden_size :]
    weight, bias = drafter.of_vocabulary(backbone.lm_head_weight), drafter.of_vocabulary(backbone.lm_head_bias)
    change = adapter.weight_change(backbone.model.get_output_embeddings(), drafter.of_vocabulary)
    weight = weight if change is None else weight + change.to(weight.dtype)
    probabilities = F.linear(final, weight.to(final.dtype), None if bias is None else bias.to(final.dtype))
    for block in probabilities.split(ROWS):
        block.copy_(block.float().softmax(-1))
    return probabilities


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Tensor | None = None,
    soft: float = 0.0,
    *,
    kind: str = "ce",
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean loss of q = softmax(hidden [n, H] @ weight [M, H]^T + bias [M]), and how many argmaxes hit targets [n].

    teacher: the probabilities p [n, M], which kl and lk need; in ce the target is the mixture (1 - soft) * one-hot +
    soft * p. The products are in hidden's dtype, the losses in fp32, and the gradients (the weight's in its own dtype;
    the bias learns nothing) are made on the way forward. n is at least 1.
    """
    assert kind == "ce" or teacher is not None
    soft = soft if teacher is not None else 0.0
    loss, hits = _LinearLoss.apply(hidden, weight, bias, targets, teacher, soft, kind, torch.is_grad_enabled())
    return loss, hits


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        teacher: Tensor | None,
        soft: float,
        kind: str,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        matrix = weight.detach().to(hidden.dtype)
        # First the logits, then, row block by row block, their gradients in the same place.
        with torch.autocast(hidden.device.type, enabled=False):
            work = F.linear(hidden.detach(), matrix, None if bias is None else bias.to(hidden.dtype))  # [n, M]
            total = torch.zeros((), device=hidden.device)
            hits = torch.zeros((), dtype=torch.long, device=hidden.device)
            share = math.exp(-ETA * _acceptance(work, teacher)) if kind == "lk" and teacher is not None else 1.0
            for first in range(0, len(targets), ROWS):
                rows = slice(first, first + ROWS)
                block, wanted = work[rows], targets[rows]
                scores = block.float()
                hits += (scores.argmax(-1) == wanted).sum()
                log_q = scores.log_softmax(-1)
                p = teacher[rows].float() if teacher is not None else None
                if kind == "ce" or p is None:
                    loss, gradient = _cross_entropy(log_q, wanted, p if soft else None, soft)
                else:
                    loss, gradient = _divergence(log_q, p, share)
                total += loss
                block.copy_(gradient)
            if learning and any(ctx.needs_input_grad):
                each = 1.0 / len(targets)
                rows_grad = work @ matrix * each if ctx.needs_input_grad[0] else None
                columns = None
                if ctx.needs_input_grad[1]:
                    columns = (work.T @ hidden.detach()).to(weight.dtype).mul_(each)
                ctx.save_for_backward(rows_grad, columns)
        ctx.mark_non_differentiable(hits)
        return total / len(targets), hits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if one is None else (one * grad).to(one.dtype) for one in ctx.saved_tensors)
        return (*found, None, None, None, None, None, None)


def _acceptance(logits: Tensor, teacher: Tensor) -> float:
    """The mean over rows of the mass that softmax(logits [n, M]) and p [n, M] share."""
    shared = torch.zeros((), device=logits.device)
    for q, p in zip(logits.split(ROWS), teacher.split(ROWS), strict=True):
        shared += torch.minimum(q.float().softmax(-1), p.float()).sum()
    return float(shared) / len(logits)


def _cross_entropy(log_q: Tensor, targets: Tensor, p: Tensor | None, soft: float) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of a block of rows, and its gradient by the logits, which takes the place of log_q."""
    total = -(1.0 - soft) * log_q.gather(1, targets[:, None]).sum()
    if p is not None:
        total -= soft * torch.dot(p.view(-1), log_q.view(-1))
    gradient = log_q.exp_()
    if p is not None:
        gradient.sub_(p, alpha=soft)
    return total, gradient.scatter_add_(1, targets[:, None], gradient.new_full((len(targets), 1), soft - 1.0))


def _divergence(log_q: Tensor, p: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The sum over a block of rows of share * KL(p || q) + (1 - share) * TV(p, q), and its gradient by the logits."""
    kl = torch.special.xlogy(p, p).sum() - torch.dot(p.view(-1), log_q.view(-1))
    q = log_q.exp_()
    apart = q - p
    if share == 1.0:
        return kl, apart
    variation = 0.5 * apart.abs().sum()
    sign = 0.5 * apart.sign()
    gradient = q * (sign - (q * sign).sum(-1, keepdim=True))  # of the total variation, by the logits
    return share * kl + (1.0 - share) * variation, apart.mul_(share).add_(gradient, alpha=1.0 - share)
