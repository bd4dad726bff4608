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
from medusa_cli.device import upload
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.train.fused_linear import (
    LogSoftmax,
    PlainLoss,
    Targets,
    blockwise_loss,
    linear_loss,
    rows_at_once,
)
from medusa_cli.train.schedules import lambda_0

# Number of rows of full-vocabulary logits processed at once. 64 x 49,152 logits in fp32 are 12 MB,
# which stay in a CPU's cache. Each block reads the whole lm_head; a GPU's larger blocks read it less often.
LM_ROWS = 64
GPU_LM_ROWS = 1024
# Share of the tokens in sampled softmax that are drawn at random from the less likely tokens.
DRAWN = 0.25
# One of this many positions is used to find the teacher's most likely tokens in a batch.
ASKED = 8


@dataclass(frozen=True)
class BatchLoss:
    """Holds the loss of a micro-batch and its parts.

    total: the value to minimize, a mean over all `positions`. A head without a target at a position adds nothing there.
    by_head [K]: each head's part of `total`. learned [K]: the number of each head's targets in the draft vocabulary.
    scale [K]: the factors that turn `by_head` into sums over these targets. correct, counted [K]: the numbers of each
    head's top-1 hits and of all its targets. `scale` and `counted` are in the host's memory. parts: the other parts of
    the loss by name.
    """

    total: Tensor
    by_head: Tensor
    scale: Tensor
    correct: Tensor
    counted: Tensor
    learned: Tensor
    positions: int
    parts: dict[str, Tensor | float]

    @property
    def figures(self) -> Tensor:
        """Returns one vector of all numbers that are on the device; `sums` takes the vector apart."""
        heads = [self.by_head, self.correct, self.learned]
        parts = [part for part in self.parts.values() if isinstance(part, Tensor)]
        return torch.cat([*heads, torch.stack([self.total.detach(), *parts])])

    def sums(self, figures: Tensor) -> dict[str, Any]:
        """Returns sums over positions from `figures`, which the host has read."""
        count = len(self.counted)
        by_head, correct, learned, rest = figures.split(
            [count, count, count, len(figures) - 3 * count]
        )
        total, *measured = rest.tolist()
        values = iter(measured)
        parts = {
            name: next(values) if isinstance(part, Tensor) else part
            for name, part in self.parts.items()
        }
        return {
            "loss": self.positions * total,
            "head_losses": by_head * self.scale,
            "correct": correct,
            "counted": self.counted,
            "learned": learned,
            "positions": self.positions,
            "parts": {name: self.positions * part for name, part in parts.items()},
        }


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
    original is the same network with its adapter off (section 3.3.2). With objective "ce", L_LM is
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
    parts: dict[str, Tensor | float] = {"lambda_0": weight, "lm": model.detach(), **cost}
    return replace(heads, total=model + weight * heads.total, parts=parts)


def model_loss(
    backbone: Backbone, batch: Batch, original: Batch | None, objective: str, measure: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the mean L_LM over the answer tokens and, with `measure`, figures on the model's change.

    original: the batch that the original model computed, or None if this model is not kept or not
    needed.
    """
    final = slice(-backbone.hidden_size, None)  # the lm_head's input
    states = batch.hidden[batch.learned, final]
    teacher = None if original is None else original.hidden[batch.learned, final]
    lm_head: Any = backbone.model.get_output_embeddings()
    own_head = adapter.original(lm_head)
    measured = ("nll",) if teacher is None else ("nll", "nll_original", "kl", "agreement")
    cost = dict.fromkeys(measured if measure else (), torch.zeros((), device=states.device))
    following = batch.next[batch.learned]
    everywhere = torch.ones(len(following), device=states.device)
    right = torch.empty(len(following), dtype=torch.uint8, device=states.device)
    targets = Targets(following, everywhere, right)
    log_softmax, original_softmax, plain = LogSoftmax(), LogSoftmax(), PlainLoss()

    def loss(logits: Tensor, block: slice) -> Tensor:
        if teacher is None and not cost:
            return plain(logits, targets[block])
        ids = following[block]
        scores = log_softmax(logits)
        if cost:
            cost["nll"] = cost["nll"] + F.nll_loss(scores, ids, reduction="sum")
        if teacher is None:
            return plain(logits, targets[block])
        original_scores = original_softmax(backbone.finish_logits(own_head(teacher[block])))
        shares = torch.exp(original_scores, out=original_softmax.spare[: len(original_scores)])
        kl = torch.dot(shares.view(-1), original_scores.view(-1)) - torch.dot(
            shares.view(-1), scores.view(-1)
        )
        if cost:
            nll = F.nll_loss(original_scores, ids, reduction="sum")
            alike = scores.argmax(-1) == original_scores.argmax(-1)
            cost["kl"] = cost["kl"] + kl
            cost["nll_original"] = cost["nll_original"] + nll
            cost["agreement"] = cost["agreement"] + alike.sum()
        if objective == "kl":
            logits.copy_(scores.exp_().sub_(shares))
            return kl
        return plain(logits, targets[block])

    count = len(following)
    weights = [weight for weight in lm_head.parameters() if weight.requires_grad]

    def logits(states: Tensor) -> Tensor:
        return backbone.finish_logits(lm_head(states))

    rows = LM_ROWS if states.device.type == "cpu" else GPU_LM_ROWS
    total = blockwise_loss(loss, logits, states, weights, rows) / count
    return total, {key: value / count for key, value in cost.items()}


def drafter_loss(
    drafter: HeadDrafter, backbone: Backbone, batch: Batch, train: TrainRecipe
) -> BatchLoss:
    """Returns the sum over heads k of decay^k times the loss on the token k places ahead (Medusa, equation 1).

    A target outside the draft vocabulary adds nothing to the loss and counts as a miss in the
    accuracy. Heads that read the draft tokens also learn the backbone's hidden states at the
    positions of their targets, with a smooth L1 loss (`train.regress`; EAGLE, arXiv:2401.15077).
    Only `total` includes this regression, not `by_head`. Heads that do not read the draft tokens could
    only learn the mean of the possible states.
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
        rows, index, log_weight = sample_vocabulary(
            batch, train.scored, index, len(drafter.draft_ids), mass
        )
        bias = log_weight if bias is None else bias[rows] + log_weight
    p = None
    if lm_head is not None:
        p = teacher_probabilities(backbone, lm_head, final, rows, log_weight)

    scored: Callable[[Tensor], Tensor] = nn.Identity()  # selects the rows of a matrix to score
    if rows is not None:
        scored = cache(partial(torch.index_select, dim=0, index=rows))  # heads may share a matrix
    regress = regression_weight(drafter, train)

    heads = drafter.num_heads
    ahead = batch.ahead(heads)  # [K + 1, n]
    tokens = batch.next[ahead]
    targets = index[tokens[1:]]  # [K, n]
    have_targets = batch.have_targets(heads)
    known = upload(have_targets, device) & (targets >= 0)
    targets = targets.clamp(min=0)
    positions = max(1, len(batch.learned))
    shares = train.decay ** torch.arange(1, heads + 1) / positions
    weights = known * upload(shares[:, None], device)  # [K, n]
    right = torch.empty(known.shape, dtype=torch.uint8, device=device)
    every = []
    losses = []
    for k, states in enumerate(drafter.head_states(backbone, batch)):
        hidden, matrix = drafter.factors(backbone, k, states, tokens[k])
        wanted = Targets(targets[k], weights[k], right[k], p, ahead[k + 1], soft)
        losses.append(linear_loss(hidden, scored(matrix), wanted, bias))
        every.append(states)
    by_head = torch.stack(losses)
    total = by_head.sum()
    if regress:
        own = final[ahead[1:]].detach().float()
        apart = F.smooth_l1_loss(torch.stack(every).float(), own, reduction="none").mean(-1)
        total = total + regress * torch.dot(apart.flatten(), weights.flatten())
    return BatchLoss(
        total,
        by_head.detach(),
        1 / shares,
        (known * right).sum(1),
        have_targets.sum(1),
        known.sum(1),
        len(batch.learned),
        {},
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
    batch: Batch, count: int, index: Tensor, size: int, mass: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns at least `count` vocabulary rows [m] to score, each token's place [V] among them, and log weights [m].

    The place is -1 for a token that is not among them. The log weights are those of `sample_rows`. index [V]: each
    token's row among all `size` rows, or -1 for a token without a row. mass [M]: the teacher's probabilities of all
    rows, summed over positions. If `mass` is None, the tokens of the batch are counted instead.
    """
    emitted = index[batch.next[batch.learned]]
    # The last entry counts tokens without a row (-1).
    counts = torch.zeros(size + 1, device=index.device)
    counts = counts.index_add(
        0, emitted % (size + 1), torch.ones_like(emitted, dtype=counts.dtype)
    )[:size]
    rows, log_weight = sample_rows(counts if mass is None else mass, counts > 0, count)
    # The index of each row among `rows`. The last entry is for tokens without a row (-1).
    number = rows.new_full((size + 1,), -1)
    number[rows] = torch.arange(len(rows), device=rows.device)
    return rows, number[index], log_weight


def sample_rows(mass: Tensor, required: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the vocabulary rows [m] that a batch scores, and the log [m] of how many rows each row represents.

    The `required` rows [M] and the rows with the largest mass [M] are always scored. Rows drawn at
    random represent all other rows (sampled softmax, Jean et al., arXiv:1412.2007). With the log weights
    added to the scores, the softmax matches the softmax over all rows in expectation.
    """
    order = torch.where(required, torch.inf, mass).argsort(descending=True)
    # The host waits once for both numbers.
    likely, needed = torch.stack([((mass > 0) | required).sum(), required.sum()]).tolist()
    first = max(needed, min(count - int(DRAWN * count), likely))
    rest = order[first:]
    some = torch.randperm(len(rest))[: max(int(DRAWN * count), count - first)]
    drawn = rest[upload(some, rest.device)]
    each = math.log(len(rest) / len(drawn)) if len(drawn) else 0.0
    return torch.cat([order[:first], drawn]), torch.cat(
        [mass.new_zeros(first), mass.new_full((len(drawn),), each)]
    )


@torch.no_grad()
def teacher_head(drafter: HeadDrafter, backbone: Backbone) -> tuple[Tensor, Tensor | None]:
    """Returns the lm_head's weight [M, H], and its bias [M] if it has one, for the heads' vocabulary.

    In stage 2, the lm_head is the adapted model's, because that model verifies the drafts. The KL
    loss of self-distillation keeps the adapted model close to the original (Medusa, section 3.3.2).
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

    rows [m]: limits the vocabulary to these rows. log_weight [m]: the log of how many rows each row
    represents.
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
