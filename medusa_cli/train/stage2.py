"""Stage 2: heads and backbone learn together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset, batch_of, micro_batches, schedule
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.lora import adapter_off, trained_weights
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.train.losses import BatchLoss, LogSoftmax, blockwise_loss, cross_entropy, drafter_loss
from medusa_cli.train.schedule import lambda_0
from medusa_cli.train.stage1 import Group, head_rate

# Rows of logits at once: 64 x 49,152 in fp32 are 12 MB, which stay near the cores.
ROWS = 64


class Stage2:
    """L = L_LM + lambda_0 * sum of lambda_k L_k (equation 2).

    L_LM is KL(original || trained), where the original is the same network with its adapter off (section 3.3.2), or
    with objective "ce" the cross-entropy of the answers' tokens.
    """

    def __init__(
        self, backbone: Backbone, drafter: HeadDrafter, dataset: Dataset[Conversation], train: TrainRecipe
    ) -> None:
        self.backbone, self.drafter, self.dataset, self.train = backbone, drafter, dataset, train
        self.weights: dict[str, nn.Parameter] = trained_weights(backbone.model)
        self._prompts = drafter.sees_prompt(drafter.config)
        self._measuring = False

    def groups(self) -> list[Group]:
        heads = [p for p in self.drafter.parameters() if p.requires_grad]
        rate = head_rate(self.drafter, self.train)
        slow = rate / 4 if self.train.backbone_lr is None else self.train.backbone_lr
        return [Group(heads, rate), Group(list(self.weights.values()), slow)]

    def batches(self) -> list[list[Conversation]]:
        train = self.train
        return schedule(self.dataset.train, train.batch_tokens, train.epochs, train.seed, train.max_tokens)

    def held_out(self) -> list[list[Conversation]]:
        return micro_batches(self.dataset.held_out, self.train.batch_tokens)

    def losses(self, items: list[Conversation], progress: float) -> BatchLoss:
        """The joint loss of whole conversations, on assistant tokens alone; while evaluating, what the change costs."""
        train = self.train
        weight, learns = lambda_0(progress, schedule=train.schedule, peak=train.lambda_0, share=train.heads_first)
        if not learns and not self._measuring:  # the heads alone: nothing reaches the backbone
            with torch.no_grad():
                batch = self._batch(items)
            heads = drafter_loss(self.drafter, self.backbone, batch, train)
            return replace(heads, parts={"lambda_0": weight})
        batch = self._batch(items)
        heads = drafter_loss(self.drafter, self.backbone, batch, train)
        teacher = None
        # Trained in full, the network keeps no original to be held against.
        if train.tuning != "full" and (train.objective == "kl" or self._measuring):
            with torch.no_grad(), adapter_off(self.backbone.model):
                teacher = self._final(self._batch(items))
        model, cost = self._model_loss(batch, teacher)
        parts = {"lambda_0": weight, "lm": float(model.detach()), **cost}
        return replace(heads, total=model + weight * heads.total, parts=parts)

    def _model_loss(self, batch: Batch, teacher: Tensor | None) -> tuple[Tensor, dict[str, float]]:
        """L_LM, and while evaluating what the change costs; teacher: the original's final states [P, H], if any."""
        lm_head: Any = self.backbone.model.get_output_embeddings()
        original = adapter.original(lm_head)
        measured = ("nll",) if teacher is None else ("nll", "nll_original", "kl", "agreement")
        cost = dict.fromkeys(measured if self._measuring else (), 0.0)
        following = batch.next[batch.learnt]
        log_softmax = LogSoftmax()

        def of(scores: Tensor, block: slice) -> tuple[Tensor, Tensor]:
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
        total = blockwise_loss(of, lm_head, self._final(batch), weights, ROWS) / count
        return total, {key: value / count for key, value in cost.items()}

    def _batch(self, items: list[Conversation]) -> Batch:
        """The states that emit the answers' tokens, and those of prompts that are seen, in the network as it is now."""
        dtype = torch.bfloat16 if self.train.dtype == "bf16" else None
        return batch_of(self.backbone, items, dtype, taps=self.drafter.taps, prompts=self._prompts)

    def _final(self, batch: Batch) -> Tensor:
        """The states [n, H] that the lm_head reads, of the positions that are learnt."""
        return batch.hidden[batch.learnt, -self.backbone.hidden_size :]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While it lasts, losses also say how far the network has moved from the original."""
        self._measuring = True
        training = self.backbone.model.training
        self.backbone.model.eval()
        try:
            yield
        finally:
            self._measuring = False
            self.backbone.model.train(training)

    def state(self) -> dict[str, Any]:
        return {name: weight.detach() for name, weight in self.weights.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state[name])
