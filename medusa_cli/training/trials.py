"""How well FIRP's heads guess by where their pseudo states enter, and with or without the earlier ones in sight."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.drafters import Firp
from medusa_cli.errors import UserError
from medusa_cli.runs.recipe import Recipe
from medusa_cli.runs.run import Run
from medusa_cli.training.build import build_drafter
from medusa_cli.training.conversations import Conversations
from medusa_cli.training.events import Stepped, Validated
from medusa_cli.training.loop import Trainer

Choice = tuple[tuple[int, ...], bool]


@dataclass(frozen=True)
class Trial:
    """A short training: entry layers, masked or not, then held-out loss and top-1 accuracy of each head."""

    layers: tuple[int, ...]
    masked: bool
    losses: list[float]
    accuracies: list[float]


def figures(depth: int) -> dict[int, list[Choice]]:
    """What the paper's Figures 5 to 7 vary, at a model's depth: the first head's layer, the second's, the mask.

    UserError for a model of one layer, which has none to enter at.
    """
    if depth < 2:
        raise UserError("a model of one layer has none that FIRP's heads could enter at", "give another @model")

    def entry(share: float) -> int:
        """The layer at that share of the depth, and in any case one that heads can enter at."""
        return min(max(1, round(share * depth)), depth - 1)

    half, third = max(1, depth // 2), entry(2 / 3)
    first = sorted({entry(sixths / 6) for sixths in range(1, 6)} | {depth - 1})
    second = [layer for layer in first if layer > half] or [depth - 1]
    return {
        5: [((layer,), False) for layer in first],
        6: [((half, layer), False) for layer in second],
        7: [((half, third), False), ((half, third), True)],
    }


def try_layers(
    backbone: Backbone,
    dataset: Conversations,
    recipe: Recipe,
    choices: Sequence[Choice],
    on_progress: Callable[[int], None] = lambda positions: None,
) -> Iterator[Trial]:
    """Train a drafter for each choice alone, by the recipe and from the same seed; what comes of each as it comes.

    UserError where nothing is held out to compare them on.
    """
    if not dataset.held_out:
        share = f"train.validation_fraction={recipe.train.validation_fraction:g}"
        raise UserError(f"no conversation is held out to compare on ({share})", "give several, and a fraction above 0")
    for layers, masked in choices:
        own = dataclasses.replace(recipe.drafter, name="firp", num_heads=len(layers), layers=layers, masked=masked)
        plan = dataclasses.replace(recipe, drafter=own)
        torch.manual_seed(plan.train.seed)
        drafter = build_drafter(backbone, own, dataset)
        with tempfile.TemporaryDirectory() as folder:
            for event in Trainer(backbone, drafter, dataset, plan, Run(Path(folder))).events():
                if isinstance(event, Stepped):
                    on_progress(event.positions)
                elif isinstance(event, Validated):
                    last = event
        assert isinstance(drafter, Firp)
        yield Trial(drafter.config.layers, drafter.config.masked, last.head_losses, last.accuracies)
