"""Stage 2: backbone and heads learn together, the backbone held to what it was (Medusa-2, section 2.2.2)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.adapter import adapter_off, trained_weights
from medusa_cli.drafters.base import Batch, Drafter
from medusa_cli.recipe import TrainRecipe
from medusa_cli.training.conversations import Conversation, Conversations, batch_of, bucketed, scheduled
from medusa_cli.training.events import Found
from medusa_cli.training.schedule import lambda_0
from medusa_cli.training.task import Group


class Joint:
    """L = L_LM + lambda_0 * sum of lambda_k L_k (equation 2).

    L_LM is KL(original || trained), where the original is the same network with its adapter off (section 2.3.2), or
    with objective "ce" the cross-entropy of the answers' tokens.
    """

    def __init__(self, backbone: Backbone, drafter: Drafter, dataset: Conversations, train: TrainRecipe) -> None:
        self.backbone, self.drafter, self.dataset, self.train = backbone, drafter, dataset, train
        self.weights: dict[str, nn.Parameter] = trained_weights(backbone.model)
        self._measuring = False

    def groups(self) -> list[Group]:
        heads = [p for p in self.drafter.parameters() if p.requires_grad]
        slow = self.train.lr / 4 if self.train.backbone_lr is None else self.train.backbone_lr
        return [Group(heads, self.train.lr), Group(list(self.weights.values()), slow)]

    def batches(self) -> list[list[Conversation]]:
        train = self.train
        return scheduled(self.dataset.train, train.batch_tokens, train.epochs, train.seed, train.max_tokens)

    def held_out(self) -> list[list[Conversation]]:
        return bucketed(self.dataset.held_out, self.train.batch_tokens, random.Random(0))

    def losses(self, items: list[Conversation], progress: float) -> Found:
        """The joint loss of whole conversations, on assistant tokens alone; while evaluating, what the change costs."""
        train = self.train
        weight, learns = lambda_0(progress, schedule=train.schedule, peak=train.lambda_0, share=train.heads_first)
        if not learns and not self._measuring:  # the heads alone: the backbone is still what it was
            with torch.no_grad():
                batch = self._batch(items)
            heads = self.drafter.loss(self.backbone, batch, train.decay, train.soft)
            return Found(heads.total, heads, len(batch.next), {"lambda_0": weight})
        batch = self._batch(items)
        heads = self.drafter.loss(self.backbone, batch, train.decay, train.soft)
        scores = self.backbone.lm_head(batch.hidden).float()  # [P, V]
        plain = F.cross_entropy(scores, batch.next)
        if train.objective == "ce" and not self._measuring:
            return self._found(plain, weight, heads, len(batch.next))
        with torch.no_grad(), adapter_off(self.backbone.model):
            original = self.backbone.lm_head(self._batch(items).hidden).float()
        kl = F.kl_div(scores.log_softmax(-1), original.log_softmax(-1), reduction="batchmean", log_target=True)
        found = self._found(kl if train.objective == "kl" else plain, weight, heads, len(batch.next))
        if self._measuring:
            found.parts["kl"] = float(kl)
            found.parts["nll"] = float(plain)
            found.parts["nll_original"] = float(F.cross_entropy(original, batch.next))
            found.parts["agreement"] = float((scores.argmax(-1) == original.argmax(-1)).float().mean())
        return found

    def _found(self, model: Tensor, weight: float, heads: Any, positions: int) -> Found:
        parts = {"lambda_0": weight, "lm": float(model.detach())}
        return Found(model + weight * heads.total, heads, positions, parts)

    def _batch(self, items: list[Conversation]) -> Batch:
        """The states that emit the answers' tokens, in the network as it is now."""
        return batch_of(self.backbone, items, torch.bfloat16 if self.train.dtype == "bf16" else None)

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
