"""What a training's events are beside its log: scalars for TensorBoard, where that is installed."""

import importlib.util
from pathlib import Path
from typing import Any

from medusa_cli.training.events import Event, Stepped, Validated


class Board:
    """Scalars by step in a folder for `tensorboard --logdir`; nothing where tensorboard is not installed."""

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:  # one that does not fit this torch is as good as none
                return
            purge = None if resumed_at is None else resumed_at + 1  # what a resumed training does again
            self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, event: Event) -> None:
        """Add a step's or a validation's scalars."""
        if self._writer is not None and isinstance(event, Stepped | Validated):
            for name, value in scalars(event).items():
                self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(event: Stepped | Validated) -> dict[str, float]:
    """An event's numbers by name: train/... of a step, held_out/... of a validation."""
    found = {"loss": event.loss, **event.parts}
    for head, (loss, accuracy) in enumerate(zip(event.head_losses, event.accuracies, strict=True), 1):
        found |= {f"head_{head}/loss": loss, f"head_{head}/top_1": accuracy}
    if isinstance(event, Stepped):
        found |= {"lr": event.lr, "grad_norm": event.grad_norm, "memory_gb": event.memory / 1e9}
        found["tokens_per_s"] = event.positions / max(event.seconds, 1e-9)
    return {f"{'train' if isinstance(event, Stepped) else 'held_out'}/{name}": one for name, one in found.items()}
