"""The two stages of training: the loss of heads on a frozen model, and the joint loss of heads and model."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset, batch_of, whole_batch
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.lora import adapter_off, trained_weights
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.train.losses import BatchLoss, LogSoftmax, blockwise_loss, cross_entropy, drafter_loss

# Rows of logits at once: 64 x 49,152 in fp32 are 12 MB, which stay near the cores.
ROWS = 64


class Stage1:
    """Heads learn on a frozen backbone (Medusa, section 3.2.1): from cached states, or beside whole passes.

    weights: the backbone's weights that learn, by name: none.
    """

    def __init__(self, backbone: Backbone, drafter: HeadDrafter, dataset: Dataset[Any], train: TrainRecipe) -> None:
        self.backbone, self.drafter, self.dataset, self.train = backbone, drafter, dataset, train
        self.weights: dict[str, nn.Parameter] = {}

    def loss(self, items: list[Any], progress: float) -> BatchLoss:
        """Returns the heads' loss on a micro-batch."""
        dtype = torch.bfloat16 if self.train.dtype == "bf16" else torch.float32
        if self.dataset.states is None:
            batch = whole_batch(self.backbone, self.drafter, items, dtype)
        else:
            batch = self.dataset.batch(items, self.backbone.device, dtype)
        return drafter_loss(self.drafter, self.backbone, batch, self.train)


class Stage2:
    """L = L_LM + lambda_0 * sum of lambda_k L_k (Medusa, equation 2).

    L_LM is KL(original || trained), where the original is the same network with its adapter off (section 3.3.2), or
    with objective "ce" the cross-entropy of the answers' tokens. weights: the backbone's weights that learn, by name.
    """

    def __init__(
        self, backbone: Backbone, drafter: HeadDrafter, dataset: Dataset[Conversation], train: TrainRecipe
    ) -> None:
        self.backbone, self.drafter, self.train = backbone, drafter, train
        self.weights = trained_weights(backbone.model)

    def loss(self, items: list[Conversation], progress: float) -> BatchLoss:
        """Returns the joint loss of whole conversations; without gradients also the cost of the model's change."""
        train, measure = self.train, not torch.is_grad_enabled()
        weight, learns = lambda_0(progress, schedule=train.schedule, peak=train.lambda_0, share=train.heads_first)
        with torch.set_grad_enabled(learns and not measure):
            batch = self._batch(items)
        heads = drafter_loss(self.drafter, self.backbone, batch, train)
        if not learns and not measure:
            return replace(heads, parts={"lambda_0": weight})
        teacher = None
        # Trained in full, the network keeps no original to compare with.
        if train.tuning != "full" and (train.objective == "kl" or measure):
            with torch.no_grad(), adapter_off(self.backbone.model):
                teacher = self._final(self._batch(items))
        model, cost = self._model_loss(batch, teacher, measure)
        parts = {"lambda_0": weight, "lm": float(model.detach()), **cost}
        return replace(heads, total=model + weight * heads.total, parts=parts)

    def _model_loss(self, batch: Batch, teacher: Tensor | None, measure: bool) -> tuple[Tensor, dict[str, float]]:
        """Returns L_LM and the measured costs; teacher: the original's final states [P, H], if any."""
        lm_head: Any = self.backbone.model.get_output_embeddings()
        original = adapter.original(lm_head)
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
            original_scores = log_softmax(original(teacher[block]))
            shares = torch.exp(original_scores, out=log_softmax.spare[: len(original_scores)])
            kl = torch.dot(shares.view(-1), original_scores.view(-1)) - torch.dot(shares.view(-1), scores.view(-1))
            if cost:
                cost["kl"] += float(kl)
                cost["nll_original"] += float(F.nll_loss(original_scores, targets, reduction="sum"))
                cost["agreement"] += float((scores.argmax(-1) == original_scores.argmax(-1)).sum())
            if self.train.objective == "kl":
                return kl, scores.exp_().sub_(shares)
            return cross_entropy(scores, targets)

        count = len(following)
        weights = [weight for weight in lm_head.parameters() if weight.requires_grad]
        total = blockwise_loss(loss, lm_head, self._final(batch), weights, ROWS) / count
        return total, {key: value / count for key, value in cost.items()}

    def _batch(self, items: list[Conversation]) -> Batch:
        """Returns the states of the network as it is now: of answers, and of prompts that the drafter sees."""
        dtype = torch.bfloat16 if self.train.dtype == "bf16" else None
        prompts = self.drafter.sees_prompt(self.drafter.config)
        return batch_of(self.backbone, items, dtype, taps=self.drafter.taps, prompts=prompts)

    def _final(self, batch: Batch) -> Tensor:
        """Returns the lm_head's input [n, H] at the positions that are learnt."""
        return batch.hidden[batch.learnt, -self.backbone.hidden_size :]


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
