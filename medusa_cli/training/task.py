"""What a stage of training trains, on which batches, by which loss; and stage 1, the heads on a frozen backbone."""

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.base import Batch, Drafter, Losses, Objective
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.training.conversations import Conversation, Conversations, bucketed, scheduled, whole_batch
from medusa_cli.training.data import Dataset, Example, pack, plan
from medusa_cli.training.events import BatchLoss
from medusa_cli.training.schedule import turn_of


@dataclass(frozen=True)
class Group:
    """Parameters that share a peak learning rate."""

    parameters: list[nn.Parameter]
    lr: float


class Task(Protocol):
    """A stage: items (with id and positions) in micro-batches, their loss, and the backbone weights it trains."""

    def groups(self) -> list[Group]: ...

    def batches(self) -> list[list[Any]]: ...

    def held_out(self) -> list[list[Any]]: ...

    def losses(self, items: list[Any], progress: float) -> BatchLoss: ...

    def evaluating(self) -> AbstractContextManager[Any]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


def head_rate(drafter: Drafter, train: TrainRecipe) -> float:
    """The peak learning rate of the heads: the recipe's, or else the one that suits this kind of drafter."""
    return drafter.learning_rate if train.lr is None else train.lr


def head_losses(backbone: Backbone, drafter: Drafter, batch: Batch, train: TrainRecipe) -> Losses:
    """The heads' losses with the recipe's weights, or, where it names none, those that suit this kind of drafter."""
    # In stage 2 the backbone's states are no fixed mark: they move to please the heads.
    own = drafter.regress if train.stage == 1 else 0.0
    regress = own if train.regress is None else train.regress
    return drafter.loss(backbone, batch, Objective(train.decay, train.soft, regress, train.loss, train.scored))


class _Stage1:
    """What the two ways of stage 1 share: the drafter alone learns, and the backbone has no state of its own."""

    backbone: Backbone
    drafter: Drafter
    train: TrainRecipe

    def groups(self) -> list[Group]:
        return [Group([p for p in self.drafter.parameters() if p.requires_grad], head_rate(self.drafter, self.train))]

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.train.dtype == "bf16" else torch.float32

    def _found(self, batch: Batch) -> BatchLoss:
        found = head_losses(self.backbone, self.drafter, batch, self.train)
        return BatchLoss(found.total, found, len(batch.learnt), {})

    def evaluating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The backbone is frozen: there is nothing to load."""


class Frozen(_Stage1):
    """Stage 1: heads learn from the frozen backbone's cached states; the backbone never runs (section 3.2.1)."""

    def __init__(self, backbone: Backbone, drafter: Drafter, dataset: Dataset, train: TrainRecipe) -> None:
        self.backbone, self.drafter, self.dataset, self.train = backbone, drafter, dataset, train

    def batches(self) -> list[list[Example]]:
        train = self.train
        return plan(self.dataset.train, train.batch_tokens, train.epochs, train.seed, train.max_tokens)

    def held_out(self) -> list[list[Example]]:
        return pack(self.dataset.held_out, self.train.batch_tokens)

    def losses(self, items: list[Example], progress: float) -> BatchLoss:
        """The heads' loss on the answers' cached states."""
        return self._found(self.dataset.batch(items, self.backbone.device, self._dtype))


class Traced(_Stage1):
    """Stage 1 beside the frozen backbone, which runs whole conversations in every step: for drafters that ride in it,
    and where no states are kept."""

    def __init__(self, backbone: Backbone, drafter: Drafter, dataset: Conversations, train: TrainRecipe) -> None:
        self.backbone, self.drafter, self.dataset, self.train = backbone, drafter, dataset, train

    def batches(self) -> list[list[Conversation]]:
        train = self.train
        return scheduled(self.dataset.train, train.batch_tokens, train.epochs, train.seed, train.max_tokens)

    def held_out(self) -> list[list[Conversation]]:
        return bucketed(self.dataset.held_out, self.train.batch_tokens, random.Random(0))

    def losses(self, items: list[Conversation], progress: float) -> BatchLoss:
        """The heads' loss beside a pass over the conversations; gradients of rows that ride alone go through it.

        With heads_in_turn it is the loss of the head whose turn it is, and no other head learns.
        """
        batch = whole_batch(self.backbone, self.drafter, items, self._dtype)
        if not self.train.heads_in_turn:
            return self._found(batch)
        turn = turn_of(progress, self.drafter.num_heads)
        for head, part in enumerate(self.drafter.own_parts):
            part.requires_grad_(head == turn)
        found = self._found(batch)
        share = int(found.heads.learnt[turn]) / found.positions
        return replace(found, total=share * found.heads.per_head[turn])
