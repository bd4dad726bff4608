"""The two stages of training: the loss of heads on a frozen model, and the joint loss of heads and model."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset, batch_of
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.lora import adapter_off
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.train.losses import BatchLoss, LogSoftmax, blockwise_loss, cross_entropy, drafter_loss

# Rows of logits at once: 64 x 49,152 in fp32 are 12 MB, which stay near the cores.
ROWS = 64


def stage_1_loss(
    backbone: Backbone, drafter: HeadDrafter, dataset: Dataset, train: TrainRecipe, items: list[Conversation]
) -> BatchLoss:
    """Returns the loss of heads on a frozen backbone (Medusa, section 3.2.1)."""
    dtype = torch.bfloat16 if train.dtype == "bf16" else torch.float32
    return drafter_loss(drafter, backbone, dataset.batch(backbone, drafter, items, dtype), train)


def stage_2_loss(
    backbone: Backbone, drafter: HeadDrafter, train: TrainRecipe, items: list[Conversation], progress: float
) -> BatchLoss:
    """Returns L = L_LM + lambda_0 * sum of lambda_k L_k (Medusa, equation 2), at a share of the training.

    L_LM is KL(original || trained), where the original is the same network with its adapter off (section 3.3.2), or
    with objective "ce" the cross-entropy of the answers' tokens. Without gradients the parts of the loss also hold what
    training changed of the model.
    """
    dtype = torch.bfloat16 if train.dtype == "bf16" else None
    measure = not torch.is_grad_enabled()
    weight, learns = lambda_0(progress, schedule=train.schedule, peak=train.lambda_0, share=train.heads_first)
    with torch.set_grad_enabled(learns and not measure):
        batch = batch_of(backbone, drafter, items, dtype)
    heads = drafter_loss(drafter, backbone, batch, train)
    if not learns and not measure:
        return replace(heads, parts={"lambda_0": weight})
    original = None
    # Trained in full, the network keeps no original to compare with.
    if train.tuning != "full" and (train.objective == "kl" or measure):
        with torch.no_grad(), adapter_off(backbone.model):
            original = batch_of(backbone, drafter, items, dtype)
    model, cost = model_loss(backbone, batch, original, train.objective, measure)
    parts = {"lambda_0": weight, "lm": float(model.detach()), **cost}
    return replace(heads, total=model + weight * heads.total, parts=parts)


def model_loss(
    backbone: Backbone, batch: Batch, original: Batch | None, objective: str, measure: bool
) -> tuple[Tensor, dict[str, float]]:
    """Returns L_LM of the answers' tokens, a mean, and with `measure` the cost of the model's change.

    original: the batch as the original model computes it; None where it is not kept, or not needed.
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
        original_scores = log_softmax(own_head(teacher[block]))
        shares = torch.exp(original_scores, out=log_softmax.spare[: len(original_scores)])
        kl = torch.dot(shares.view(-1), original_scores.view(-1)) - torch.dot(shares.view(-1), scores.view(-1))
        if cost:
            cost["kl"] += float(kl)
            cost["nll_original"] += float(F.nll_loss(original_scores, targets, reduction="sum"))
            cost["agreement"] += float((scores.argmax(-1) == original_scores.argmax(-1)).sum())
        if objective == "kl":
            return kl, scores.exp_().sub_(shares)
        return cross_entropy(scores, targets)

    count = len(following)
    weights = [weight for weight in lm_head.parameters() if weight.requires_grad]
    total = blockwise_loss(loss, lm_head, states, weights, ROWS) / count
    return total, {key: value / count for key, value in cost.items()}


def lambda_0(progress: float, *, schedule: str, peak: float, share: float) -> tuple[float, bool]:
    """Returns the heads' weight at a share of the training, and True if the backbone learns (Medusa, section 3.2.2).

    constant: the peak throughout. warmup: the heads learn alone for a `share` of the training (always, if it is 1);
    then the weight rises in a straight line to its peak. sine: it rises as a quarter of a sine to its peak.
    """
    if schedule == "constant":
        return peak, True
    if schedule == "sine":
        return peak * math.sin(0.5 * math.pi * progress), True
    if progress < share or share == 1:
        return 1.0, False
    return peak * (progress - share) / (1 - share), True
