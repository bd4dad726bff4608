"""Calibration: how often the i-th guess of each head is right on held-out conversations (section 3.3.3)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset, Example, micro_batches, whole_batch
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone

# A batch's scores of one head [P, M] are held at once.
POSITIONS = 512
# Tokens of whole conversations, prompts and padding included, run at once.
TOKENS = 1024
# Temperatures tried for a head's confidences, and on how many positions: a smooth curve needs no more.
TEMPERATURES = tuple(round(0.6 + 0.05 * step, 2) for step in range(29))
FIT_POSITIONS = 4096


@dataclass(frozen=True)
class Calibration:
    """accuracies[k][i]: share of `counted[k]` positions where guess i of head k was the token.

    temperatures[k] is what head k's softmax must be taken at for its confidences to fit (least log loss).
    """

    accuracies: list[list[float]]
    temperatures: list[float]
    counted: list[int]
    positions: int
    answers: int


def calibrate(
    backbone: Backbone,
    drafter: HeadDrafter,
    dataset: Dataset[Any],
    *,
    top: int = 10,
    answers: Sequence[Example | Conversation] | None = None,
    on_progress: Callable[[int], None] = lambda positions: None,
) -> Calibration:
    """Measure every head's `top` best guesses on the data set's held-out answers (or those given).

    A token that the heads' vocabulary does not hold counts as missed. UserError where no answer reaches a
    head.
    """
    if top < 1:
        raise UsageError(f"@top {top} is too small", "use 1 or more")
    vocabulary = len(drafter.draft_ids)
    if top > vocabulary:
        raise UsageError(f"@top {top} is more than the {vocabulary} tokens the heads know", f"use {vocabulary} or less")
    chosen = dataset.held_out if answers is None else answers
    if not chosen:
        raise UserError("no conversation is held out for calibration", "distil more than one conversation")
    drafter.eval()
    heads = drafter.num_heads
    hits = torch.zeros(heads, top, dtype=torch.long)
    counted = torch.zeros(heads, dtype=torch.long)
    log_loss = torch.zeros(heads, len(TEMPERATURES), dtype=torch.double)
    places = drafter.vocabulary_index(backbone.device)
    positions = 0
    for batch in _batches(backbone, drafter, dataset, chosen):
        for head, scores in enumerate(drafter.logits(backbone, batch)):
            ahead = head + 1  # head k (from 1) guesses the token k places after the backbone's own next one
            rows = batch.targets(ahead)
            if not len(rows):
                continue
            scores, targets = scores[batch.learnt_index[rows]], batch.next[rows + ahead]
            right = drafter.draft_ids[scores.topk(top, dim=-1).indices] == targets[:, None]  # [rows, top]
            hits[head] += right.sum(0).cpu()
            counted[head] += len(rows)
            if positions < FIT_POSITIONS:
                log_loss[head] += _log_losses(scores, places[targets])
        positions += len(batch.learnt)
        on_progress(len(batch.learnt))
    if not counted.all():
        raise UserError(
            f"the held-out answers are too short to calibrate {heads} heads", "distil longer or more answers"
        )
    shares = hits.double() / counted[:, None]
    temperatures = [TEMPERATURES[int(row.argmin())] for row in log_loss]
    number = sum(len(one.spans) if isinstance(one, Conversation) else 1 for one in chosen)
    return Calibration(shares.tolist(), temperatures, counted.tolist(), positions, number)


def _batches(backbone: Backbone, drafter: HeadDrafter, dataset: Dataset[Any], chosen: Sequence[Any]) -> Iterator[Batch]:
    """The chosen answers or conversations of a data set, in batches."""
    if dataset.states is None:
        for items in micro_batches(chosen, TOKENS):
            yield whole_batch(backbone, drafter, items)
        return
    # A piece of a conversation whose prompt is seen would be measured without what came before it.
    whole = [one.positions for one in chosen if one.segments is not None]
    for piece in micro_batches(chosen, max([POSITIONS, *whole])):
        yield dataset.batch(piece, backbone.device, backbone.dtype)


def _log_losses(scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sum of the log losses of targets at `places` in scores [n, M] at each temperature; -1 is no target."""
    known = places >= 0
    scores, wanted = scores[known], places[known]
    picked = scores.gather(1, wanted[:, None]).squeeze(1)
    sums = [(scores / heat).logsumexp(-1).sum() - picked.sum() / heat for heat in TEMPERATURES]
    return torch.stack(sums).double().cpu()
