"""Schedules over a training: the learning rate, turns, and lambda_0, the weight of the heads in the joint loss."""

import math


def learning_rate(step: int, steps: int, *, peak: float, min_ratio: float, warmup: int) -> float:
    """The rate of step `step` (from 0) of `steps`; the warmup takes a tenth of a short training at most."""
    warmup = min(warmup, steps // 10)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def turn_of(progress: float, turns: int) -> int:
    """Which of several equal turns (from 0) it is at a share of the training done."""
    return min(int(progress * turns + 1e-9), turns - 1)  # rounded, a share may fall just short of a whole turn


def lambda_0(progress: float, *, schedule: str, peak: float, share: float) -> tuple[float, bool]:
    """The heads' weight at a share of the training done, and whether the backbone learns yet (Medusa, section 3.2.2).

    constant: the peak throughout. warmup: for this share the heads learn alone (for all of it, if it is 1), then both
    do, with the weight rising in a straight line to its peak at the end. sine: it rises as a quarter of a sine to its
    peak.
    """
    if schedule == "constant":
        return peak, True
    if schedule == "sine":
        return peak * math.sin(0.5 * math.pi * progress), True
    if progress < share or share == 1:
        return 1.0, False
    return peak * (progress - share) / (1 - share), True
