"""Losses of both training stages: heads on a frozen model, and heads and model together."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset, batch_of
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.train.fused_linear import (
    LogSoftmax,
    blockwise_loss,
    cross_entropy,
    linear_loss,
    rows_at_once,
)

# Rows of full-vocabulary logits processed at once: 64 x 49,152 in fp32 are 12 MB, which stay in the
# CPU's cache. Each block reads the whole lm_head, so a GPU takes larger ones.
LM_ROWS = 64
GPU_LM_ROWS = 1024
# Share of its tokens that sampled softmax draws from the less likely ones.
DRAWN = 0.25
# One position in this many is used to find the teacher's most likely tokens in a batch.
ASKED = 8


@dataclass(frozen=True)
class BatchLoss:
    """Holds the loss of a micro-batch and its parts.

    total: the value to minimize, a mean over all `positions`. A head without a target at a position
    adds nothing there. per_head [K]: each head's mean loss over its `learnt` [K] targets. correct,
    counted [K]: each head's top-1 hits and targets. parts: the other parts of the loss by name.
    """

    total: Tensor
    per_head: Tensor
    correct: Tensor
    counted: Tensor
    learnt: Tensor
    positions: int
    parts: dict[str, float]


def stage_1_loss(
    backbone: Backbone,
    drafter: HeadDrafter,
    dataset: Dataset,
    train: TrainRecipe,
    items: list[Conversation],
) -> BatchLoss:
    """Returns the loss of heads on a frozen backbone (Medusa, section 3.2.1)."""
    dtype = torch.bfloat16 if train.dtype == "bf16" else torch.float32
    return drafter_loss(drafter, backbone, dataset.batch(backbone, drafter, items, dtype), train)


def stage_2_loss(
    backbone: Backbone,
    drafter: HeadDrafter,
    train: TrainRecipe,
    items: list[Conversation],
    progress: float,
) -> BatchLoss:
    """Returns L = L_LM + lambda_0 * sum of lambda_k L_k (Medusa, equation 2).

    progress: the fraction of the training that is done. L_LM is KL(original || trained), where the
    original is the same network with its adapter off (section 3.3.2). With objective "ce", it is
    the cross-entropy of the answer tokens. If gradients are disabled, the parts also report how
    much training has changed the model.
    """
    dtype = torch.bfloat16 if train.dtype == "bf16" else None
    measure = not torch.is_grad_enabled()
    weight, learns = lambda_0(
        progress, schedule=train.schedule, peak=train.lambda_0, share=train.heads_first
    )
    with torch.set_grad_enabled(learns and not measure):
        batch = batch_of(backbone, drafter, items, dtype)
    heads = drafter_loss(drafter, backbone, batch, train)
    if not learns and not measure:
        return replace(heads, parts={"lambda_0": weight})

    original = None
    # With full tuning, there is no original left to compare with.
    if train.tuning != "full" and (train.objective == "kl" or measure):
        with torch.no_grad(), adapter.adapter_off(backbone.model):
            original = batch_of(backbone, drafter, items, dtype)

    model, cost = model_loss(backbone, batch, original, train.objective, measure)
    parts = {"lambda_0": weight, "lm": float(model.detach()), **cost}
    return replace(heads, total=model + weight * heads.total, parts=parts)


def model_loss(
    backbone: Backbone, batch: Batch, original: Batch | None, objective: str, measure: bool
) -> tuple[Tensor, dict[str, float]]:
    """Returns the mean L_LM over the answer tokens and, with `measure`, figures on how far the model has moved.

    original: the batch as computed by the original model, or None if that is not kept or not
    needed.
    """
    final = slice(-backbone.hidden_size, None)  # the lm_head's input
    states = batch.hidden[batch.learnt, final]
    teacher = None if original is None else original.hidden[batch.learnt, final]
    lm_head: Any = backbone.model.get_output_embeddings()
    own_head = adapter.original(lm_head)
    measured = ("nll",) if teacher is None else ("nll", "nll_original", "kl", "agreement")
    cost = dict.fromkeys(measured if measure else (), 0.0)
    following = batch.next[batch.learnt]
    log_softmax = LogSoftmax()

    def loss(scores: Tensor, block: slice) -> tuple[Tensor, Tensor]:
        targets = following[block]
        if cost:
            cost["nll"] += float(F.nll_loss(scores, targets, reduction="sum"))
        if teacher is None:
            return cross_entropy(scores, targets)
        original_scores = log_softmax(backbone.finish_logits(own_head(teacher[block])))
        shares = torch.exp(original_scores, out=log_softmax.spare[: len(original_scores)])
        kl = torch.dot(shares.view(-1), original_scores.view(-1)) - torch.dot(
            shares.view(-1), scores.view(-1)
        )
        if cost:
            cost["kl"] += float(kl)
            cost["nll_original"] += float(F.nll_loss(original_scores, targets, reduction="sum"))
            cost["agreement"] += float((scores.argmax(-1) == original_scores.argmax(-1)).sum())
        if objective == "kl":
            return kl, scores.exp_().sub_(shares)
        return cross_entropy(scores, targets)

    count = len(following)
    weights = [weight for weight in lm_head.parameters() if weight.requires_grad]

    def logits(states: Tensor) -> Tensor:
        return backbone.finish_logits(lm_head(states))

    rows = LM_ROWS if states.device.type == "cpu" else GPU_LM_ROWS
    total = blockwise_loss(loss, logits, states, weights, rows) / count
    return total, {key: value / count for key, value in cost.items()}


def lambda_0(progress: float, *, schedule: str, peak: float, share: float) -> tuple[float, bool]:
    """Returns the weight of the heads' loss, and True if the backbone is trained (Medusa, section 3.2.2).

    progress: the fraction of the training that is done. constant: the peak throughout. warmup: only
    the heads are trained for the first `share` of the training, or throughout if `share` is 1.
    After that, the weight rises linearly to its peak. sine: the weight rises to its peak along a
    quarter of a sine wave.
    """
    if schedule == "constant":
        return peak, True
    if schedule == "sine":
        return peak * math.sin(0.5 * math.pi * progress), True
    if progress < share or share == 1:
        return 1.0, False
    return peak * (progress - share) / (1 - share), True


def drafter_loss(
    drafter: HeadDrafter, backbone: Backbone, batch: Batch, train: TrainRecipe
) -> BatchLoss:
    """Returns the sum over heads k of decay^k times the loss on the token k places ahead (Medusa, equation 1).

    A target outside the draft vocabulary adds nothing to the loss and counts as a miss in the
    accuracy. Heads that read the draft tokens also learn the backbone's hidden states at the
    positions of their targets, with a smooth L1 loss (`train.regress`; EAGLE, arXiv:2401.15077).
    Only the total includes that part. Heads that do not read the draft tokens could only learn the
    mean of the possible states.
    """
    device = batch.next.device
    index = drafter.vocabulary_index(device)
    bias = drafter.bias(backbone)
    soft = train.soft if drafter.soft is None else drafter.soft
    final = batch.hidden[:, -drafter.config.hidden_size :]  # the lm_head's input
    lm_head = teacher_head(drafter, backbone) if soft else None
    rows: Tensor | None = None
    log_weight: Tensor | None = None
    if (
        train.scored is not None
        and train.scored < len(drafter.draft_ids)
        and torch.is_grad_enabled()
    ):
        mass = None
        if lm_head is not None:
            some = teacher_probabilities(backbone, lm_head, final[::ASKED])
            mass = some.sum(0, dtype=torch.float)
        rows, index, log_weight = sample_vocabulary(batch, train.scored, index, mass)
        bias = log_weight if bias is None else bias[rows] + log_weight
    p = None
    if lm_head is not None:
        p = teacher_probabilities(backbone, lm_head, final, rows, log_weight)

    scored: Callable[[Tensor], Tensor] = nn.Identity()  # selects the rows of a matrix to score
    if rows is not None:
        scored = cache(partial(torch.index_select, dim=0, index=rows))  # heads may share a matrix
    regress = regression_weight(drafter, train)

    heads = range(1, drafter.num_heads + 1)
    positions = [batch.targets(k) for k in heads]
    known = [at[index[batch.next[at + k]] >= 0] for k, at in zip(heads, positions, strict=True)]
    total = torch.zeros((), device=device)
    per_head = []
    correct = []
    for k, at, states in zip(
        heads, known, drafter.head_states(backbone, batch, known), strict=True
    ):
        hidden, matrix = drafter.factors(backbone, k - 1, states, batch.next[at + k - 1])
        targets = index[batch.next[at + k]]
        teacher = None if p is None else p[at + k]
        loss, hits = linear_loss(hidden, scored(matrix), targets, teacher, soft=soft, bias=bias)
        per_head.append(loss)
        correct.append(hits)
        if regress and len(at):
            own = batch.hidden[at + k, -drafter.config.hidden_size :].detach()
            loss = loss + regress * F.smooth_l1_loss(states.float(), own.float())
        total = total + train.decay**k * len(at) / max(1, len(batch.learnt)) * loss

    counted = torch.tensor([len(at) for at in positions], device=device)
    learnt = torch.tensor([len(at) for at in known], device=device)
    return BatchLoss(
        total, torch.stack(per_head), torch.stack(correct), counted, learnt, len(batch.learnt), {}
    )


def regression_weight(drafter: HeadDrafter, train: TrainRecipe) -> float:
    """Returns the weight of the regression to the backbone's states, or 0 for drafters without it."""
    if drafter.regress is None:
        return 0.0
    if train.regress is not None:
        return train.regress
    # In stage 2, the backbone's states are not a fixed target: they change along with the heads.
    return drafter.regress if train.stage == 1 else 0.0


def sample_vocabulary(
    batch: Batch, count: int, index: Tensor, mass: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `count` vocabulary rows [m] to score, an index [V] into these rows, and their log weights [m].

    index [V]: the row of each token, or -1 if it has none. mass [M]: the teacher's probabilities of
    the rows, summed over positions. If it is None, the tokens of the batch are counted instead.
    """
    size = int(index.max()) + 1
    emitted = index[batch.next[batch.learnt]]
    counts = torch.bincount(emitted[emitted >= 0], minlength=size)
    rows, log_weight = sample_rows(counts.float() if mass is None else mass, counts > 0, count)
    # The index of each row among `rows`. The last entry serves tokens without a row (-1).
    number = rows.new_full((size + 1,), -1)
    number[rows] = torch.arange(len(rows), device=rows.device)
    return rows, number[index], log_weight


def sample_rows(mass: Tensor, required: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the vocabulary rows [m] that a batch scores, and the log [m] of how many rows each represents.

    The `required` rows [M] and the rows with the largest mass [M] are always scored. Rows drawn at
    random represent the rest (sampled softmax, Jean et al., arXiv:1412.2007). With the log weights
    added to the scores, the softmax matches the softmax over all rows in expectation.
    """
    order = torch.where(required, torch.inf, mass).argsort(descending=True)
    certain = min(count - int(DRAWN * count), int(((mass > 0) | required).sum()))
    first = max(certain, int(required.sum()))
    rest = order[first:]
    drawn = rest[
        torch.randperm(len(rest))[: max(int(DRAWN * count), count - first)].to(rest.device)
    ]
    each = math.log(len(rest) / len(drawn)) if len(drawn) else 0.0
    return torch.cat([order[:first], drawn]), torch.cat(
        [mass.new_zeros(first), mass.new_full((len(drawn),), each)]
    )


@torch.no_grad()
def teacher_head(drafter: HeadDrafter, backbone: Backbone) -> tuple[Tensor, Tensor | None]:
    """Returns the lm_head's weight [M, H], and its bias [M] if it has one, for the heads' vocabulary.

    In stage 2, it is the lm_head of the adapted model, because that model verifies the drafts. The
    KL loss of self-distillation keeps the adapted model close to the original (Medusa, section
    3.3.2).
    """
    if drafter.config.vocabulary == "draft":
        weight, bias = backbone.lm_head_rows(drafter.draft_ids)
    else:
        weight = backbone.lm_head_weight
        bias = backbone.lm_head_bias
    change = adapter.weight_change(backbone.model.get_output_embeddings(), drafter.of_vocabulary)
    return weight if change is None else weight + change.to(weight.dtype), bias


@torch.no_grad()
def teacher_probabilities(
    backbone: Backbone,
    lm_head: tuple[Tensor, Tensor | None],
    states: Tensor,
    rows: Tensor | None = None,
    log_weight: Tensor | None = None,
) -> Tensor:
    """Returns the backbone's probabilities [n, M] over the vocabulary of a `teacher_head`, given states [n, H].

    rows [m]: limits the vocabulary to these rows. log_weight [m]: the log of how many rows each of
    them represents.
    """
    weight, bias = lm_head
    if rows is not None:
        weight = weight[rows]
        bias = None if bias is None else bias[rows]
    scores = F.linear(
        states, weight.to(states.dtype), None if bias is None else bias.to(states.dtype)
    )
    probabilities = backbone.finish_logits(scores)
    for block in probabilities.split(rows_at_once(states.device)):
        logits = block.float()
        if log_weight is not None:
            logits += log_weight
        block.copy_(logits.softmax(-1))
    return probabilities
