"""Calibration: how often the i-th guess of each head is right on held-out conversations (section 2.3.3)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.base import Drafter
from medusa_cli.errors import UsageError, UserError
from medusa_cli.training.data import Answer, Dataset, pack

# A batch's scores of all heads [P, K, M] are held at once.
POSITIONS = 512


@dataclass(frozen=True)
class Calibration:
    """accuracies[k][i]: share of `counted[k]` positions where guess i of head k was the token."""

    accuracies: list[list[float]]
    counted: list[int]
    positions: int
    answers: int


def calibrate(
    backbone: Backbone,
    drafter: Drafter,
    dataset: Dataset,
    *,
    top: int = 10,
    answers: Sequence[Answer] | None = None,
    on_progress: Callable[[int], None] = lambda positions: None,
) -> Calibration:
    """Measure every head's `top` best guesses on the data set's held-out answers (or those given).

    A token that the heads' vocabulary does not hold counts as missed. UserError where no answer reaches a
    head.
    """
    if top < 1:
        raise UsageError(f"--top {top} is too small", "use 1 or more")
    vocabulary = len(getattr(drafter, "draft_ids", ())) or backbone.vocab_size
    if top > vocabulary:
        raise UsageError(
            f"--top {top} is more than the {vocabulary} tokens the heads know", f"use {vocabulary} or less"
        )
    chosen = dataset.held_out if answers is None else answers
    if not chosen:
        raise UserError("no conversation is held out for calibration", "distil more than one conversation")
    drafter.eval()
    heads = drafter.num_heads
    hits = torch.zeros(heads, top, dtype=torch.long)
    counted = torch.zeros(heads, dtype=torch.long)
    positions = 0
    for piece in pack(chosen, POSITIONS):
        batch = dataset.batch(piece, backbone.device, backbone.dtype)
        with torch.inference_mode():
            guesses = drafter.guesses(backbone, batch, top)  # [P, K, top]
        for head in range(heads):
            ahead = head + 1  # head k (from 1) guesses the token k places after the backbone's own next one
            if len(batch.next) <= ahead:
                continue
            same = batch.segment[ahead:] == batch.segment[:-ahead]
            right = guesses[:-ahead, head] == batch.next[ahead:, None]  # [P - ahead, top]
            hits[head] += right[same].sum(0).cpu()
            counted[head] += same.sum().cpu()
        positions += len(batch.next)
        on_progress(len(batch.next))
    if not counted.all():
        raise UserError(
            f"the held-out answers are too short to calibrate {heads} heads", "distil longer or more answers"
        )
    shares = hits.double() / counted[:, None]
    return Calibration(shares.tolist(), counted.tolist(), positions, len(chosen))
