"""What happens during a training: each event is a dataclass, logged and shown by whoever runs it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stepped:
    """One optimiser step: loss in nats (weighted over heads), each head's loss and top-1 accuracy."""

    step: int
    steps: int
    loss: float
    head_losses: list[float]
    accuracies: list[float]
    lr: float
    grad_norm: float
    positions: int  # of this step
    total_positions: int  # since the training began
    seconds: float


@dataclass(frozen=True)
class Validated:
    """Loss and top-1 accuracy per head on held-out conversations, after `step` steps."""

    step: int
    loss: float
    head_losses: list[float]
    accuracies: list[float]
    positions: int
    total_positions: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written after `step` steps."""

    step: int


@dataclass(frozen=True)
class Stopped:
    """The training was asked to stop after `step` steps; its checkpoint is written."""

    step: int
    steps: int


Event = Stepped | Validated | Saved | Stopped


class Meter:
    """Sums losses and hits per head over micro-batches."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.head_losses: Tensor | None = None
        self.correct: Tensor | None = None
        self.counted: Tensor | None = None
        self.batches = self.positions = 0

    def add(self, loss: float, per_head: list[Tensor], correct: Tensor, counted: Tensor, positions: int) -> None:
        losses = torch.stack([one.detach().float() for one in per_head]).cpu()
        correct, counted = correct.cpu(), counted.cpu()
        self.loss += loss
        self.head_losses = losses if self.head_losses is None else self.head_losses + losses
        self.correct = correct if self.correct is None else self.correct + correct
        self.counted = counted if self.counted is None else self.counted + counted
        self.batches += 1
        self.positions += positions

    def means(self) -> tuple[float, list[float], list[float]]:
        """Mean loss, mean loss per head, top-1 accuracy per head."""
        assert self.head_losses is not None and self.correct is not None and self.counted is not None
        accuracies = self.correct.double() / self.counted.clamp(min=1)
        return self.loss / self.batches, (self.head_losses / self.batches).tolist(), accuracies.tolist()
