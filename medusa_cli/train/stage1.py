"""What a stage of training trains, on which batches, by which loss; and stage 1, the heads on a frozen backbone."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset, Example, micro_batches, schedule, whole_batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.model import Backbone
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.train.losses import BatchLoss, drafter_loss
from medusa_cli.train.schedule import turn_of


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


def head_rate(drafter: HeadDrafter, train: TrainRecipe) -> float:
    """The peak learning rate of the heads: the recipe's, or else the one that suits this kind of drafter."""
    return drafter.learning_rate if train.lr is None else train.lr


class _Stage1:
    """What the two ways of stage 1 share: the drafter alone learns, and the backbone has no state of its own."""

    backbone: Backbone
    drafter: HeadDrafter
    train: TrainRecipe

    def groups(self) -> list[Group]:
        return [Group([p for p in self.drafter.parameters() if p.requires_grad], head_rate(self.drafter, self.train))]

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.train.dtype == "bf16" else torch.float32

    def evaluating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The backbone is frozen: there is nothing to load."""


class Stage1Cached(_Stage1):
    """Stage 1: heads learn from the frozen backbone's cached states; the backbone never runs (section 3.2.1)."""

    def __init__(self, backbone: Backbone, drafter: HeadDrafter, dataset: Dataset[Example], train: TrainRecipe) -> None:
        self.backbone, self.drafter, self.dataset, self.train = backbone, drafter, dataset, train

    def batches(self) -> list[list[Example]]:
        train = self.train
        return schedule(self.dataset.train, train.batch_tokens, train.epochs, train.seed, train.max_tokens)

    def held_out(self) -> list[list[Example]]:
        return micro_batches(self.dataset.held_out, self.train.batch_tokens)

    def losses(self, items: list[Example], progress: float) -> BatchLoss:
        """The heads' loss on the answers' cached states."""
        batch = self.dataset.batch(items, self.backbone.device, self._dtype)
        return drafter_loss(self.drafter, self.backbone, batch, self.train)


class Stage1Online(_Stage1):
    """Stage 1 beside the frozen backbone, which runs whole conversations in every step: for drafters that ride in it,
    and where no states are kept."""

    def __init__(
        self, backbone: Backbone, drafter: HeadDrafter, dataset: Dataset[Conversation], train: TrainRecipe
    ) -> None:
        self.backbone, self.drafter, self.dataset, self.train = backbone, drafter, dataset, train

    def batches(self) -> list[list[Conversation]]:
        train = self.train
        return schedule(self.dataset.train, train.batch_tokens, train.epochs, train.seed, train.max_tokens)

    def held_out(self) -> list[list[Conversation]]:
        return micro_batches(self.dataset.held_out, self.train.batch_tokens)

    def losses(self, items: list[Conversation], progress: float) -> BatchLoss:
        """The heads' loss beside a pass over the conversations; gradients of rows that ride alone go through it.

        With heads_in_turn it is the loss of the head whose turn it is, and no other head learns.
        """
        batch = whole_batch(self.backbone, self.drafter, items, self._dtype)
        if not self.train.heads_in_turn:
            return drafter_loss(self.drafter, self.backbone, batch, self.train)
        turn = turn_of(progress, self.drafter.num_heads)
        for head, part in enumerate(self.drafter.head_modules):
            part.requires_grad_(head == turn)
        found = drafter_loss(self.drafter, self.backbone, batch, self.train)
        share = int(found.learnt[turn]) / found.positions
        return replace(found, total=share * found.per_head[turn])
