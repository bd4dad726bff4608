"""What happens during a training: each event is a dataclass, logged and shown by whoever runs it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from medusa_cli.train.losses import BatchLoss


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
    parts: dict[str, float]  # what else the loss is made of: lambda_0 and the language model's own loss in stage 2
    memory: int = 0  # bytes the process has held at most


@dataclass(frozen=True)
class Validated:
    """Loss and top-1 accuracy per head on held-out conversations, after `step` steps."""

    step: int
    loss: float
    head_losses: list[float]
    accuracies: list[float]
    positions: int
    total_positions: int
    parts: dict[str, float]  # stage 2: what the backbone's change costs


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


class Averages:
    """Sums losses and hits per head over micro-batches, weighed as in the gradient of a step.

    Each weighs its positions, and a head's loss the targets it learnt, so that their means do not hang on how answers
    were gathered into micro-batches.
    """

    def __init__(self) -> None:
        self.loss = 0.0
        self.head_losses: Tensor | None = None
        self.learnt: Tensor | None = None
        self.correct: Tensor | None = None
        self.counted: Tensor | None = None
        self.parts: dict[str, float] = {}
        self.positions = 0

    def add(self, found: BatchLoss) -> None:
        losses, learnt = found.per_head.detach().double().cpu(), found.learnt.cpu()
        self.loss += found.positions * float(found.total.detach())
        for name, value in found.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + found.positions * value
        self.head_losses = _plus(self.head_losses, learnt * losses)
        self.learnt = _plus(self.learnt, learnt)
        self.correct = _plus(self.correct, found.correct.cpu())
        self.counted = _plus(self.counted, found.counted.cpu())
        self.positions += found.positions

    @classmethod
    def of(cls, meters: "Sequence[Averages]") -> "Averages":
        """The sums of several meters."""
        total = cls()
        for one in meters:
            total.head_losses = _plus(total.head_losses, one.head_losses)
            total.learnt = _plus(total.learnt, one.learnt)
            total.correct = _plus(total.correct, one.correct)
            total.counted = _plus(total.counted, one.counted)
            total.loss += one.loss
            total.positions += one.positions
            for name, value in one.parts.items():
                total.parts[name] = total.parts.get(name, 0.0) + value
        return total

    def mean_parts(self) -> dict[str, float]:
        """The mean of every other part."""
        return {name: value / self.positions for name, value in self.parts.items()}

    def means(self) -> tuple[float, list[float], list[float]]:
        """Mean loss, mean loss per head, top-1 accuracy per head."""
        assert self.head_losses is not None and self.learnt is not None
        assert self.correct is not None and self.counted is not None
        accuracies = self.correct.double() / self.counted.clamp(min=1)
        losses = self.head_losses / self.learnt.clamp(min=1)
        return self.loss / self.positions, losses.tolist(), accuracies.tolist()


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of what there is."""
    return other if one is None else one if other is None else one + other
