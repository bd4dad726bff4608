"""The schedules of a training run: learning rates, and the weight of the heads' loss in stage 2."""

import math

from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.runs.recipe import TrainRecipe


def peak_rates(drafter: HeadDrafter, train: TrainRecipe) -> list[float]:
    """Returns the peak learning rates of the heads and the backbone.

    By default, the heads have the rate of their drafter kind, and the backbone a quarter of the heads' rate.
    """
    heads = drafter.learning_rate if train.lr is None else train.lr
    return [heads, heads / 4 if train.backbone_lr is None else train.backbone_lr]


def learning_rate(step: int, steps: int, *, min_ratio: float, warmup: int) -> float:
    """Returns the fraction of the peak learning rate at step `step` (from 0) of `steps`.

    The warm-up takes at most a tenth of the steps.
    """
    warmup = min(warmup, steps // 10)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def lambda_0(progress: float, *, schedule: str, peak: float, share: float) -> tuple[float, bool]:
    """Returns the weight of the heads' loss, and True if the backbone is trained (Medusa, section 3.2.2).

    progress: the fraction of the training that is done. With the schedule "constant", the weight is at its peak
    throughout. With "warmup", only the heads are trained for the first `share` of the training, or throughout if
    `share` is 1. After that, the weight rises linearly to its peak. With "sine", the weight rises to its peak along a
    quarter of a sine wave.
    """
    if schedule == "constant":
        return peak, True
    if schedule == "sine":
        return peak * math.sin(0.5 * math.pi * progress), True
    if progress < share or share == 1:
        return 1.0, False
    return peak * (progress - share) / (1 - share), True
