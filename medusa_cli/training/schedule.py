"""The learning rate over a training: linear warmup, then half a cosine down to a share of the peak."""

import math


def learning_rate(step: int, steps: int, *, peak: float, min_ratio: float, warmup: int) -> float:
    """The rate of step `step` (from 0) of `steps`; the warmup takes a tenth of a short training at most."""
    warmup = min(warmup, steps // 10)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
