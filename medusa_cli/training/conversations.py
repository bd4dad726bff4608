"""Whole conversations as training data: for what must run the backbone itself, where cached states will not do."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.base import Batch, Drafter
from medusa_cli.engines.trace import trace
from medusa_cli.errors import UserError
from medusa_cli.runs.usable import ReadReport
from medusa_cli.training.data import held_out_ids, parts_of, records_digest, segments
from medusa_cli.training.parsing import Record


@dataclass(frozen=True)
class Conversation:
    """A conversation cut to the training length: id, tokens [n], assistant spans [start, end)."""

    id: str
    tokens: Tensor
    spans: list[tuple[int, int]]

    @property
    def positions(self) -> int:
        """Answer tokens: what is learnt."""
        return sum(end - start for start, end in self.spans)


@dataclass
class Conversations:
    """Whole conversations for training and held out."""

    train: list[Conversation]
    held_out: list[Conversation]
    report: ReadReport
    digest: str

    def answer_tokens(self) -> list[Tensor]:
        """The tokens of every answer to train on."""
        return [one.tokens[start:end] for one in self.train for start, end in one.spans]


def split_conversations(
    records: Sequence[Record], report: ReadReport, *, max_length: int, fraction: float
) -> Conversations:
    """Split records as stage 1 does and cut them to max_length tokens; answers of one token are left out.

    UserError where none is left.
    """
    cut = [(one, [(s, min(e, max_length)) for s, e in one.spans if min(e, max_length) - s > 1]) for one in records]
    usable = [(record, spans) for record, spans in cut if spans]
    if not usable:
        raise UserError(
            f"no conversation has two tokens of an answer among its first {max_length:,}",
            "raise train.max_length and train.batch_tokens, or distil other conversations",
        )
    held = held_out_ids([record for record, _ in usable], fraction)
    parts: dict[bool, list[Conversation]] = {False: [], True: []}
    for record, spans in usable:
        whole = Conversation(record.id, torch.tensor(record.tokens[: spans[-1][1]]), spans)
        parts[record.id in held].append(whole)
    return Conversations(parts[False], parts[True], report, records_digest(records, held))


def bucketed(items: Sequence[Conversation], tokens: int, chance: random.Random) -> list[list[Conversation]]:
    """Micro-batches of conversations of like length, at most `tokens` tokens each with padding, in random order."""
    order = sorted(items, key=lambda one: (len(one.tokens), chance.random()))
    batches: list[list[Conversation]] = []
    for one in order:
        # Sorted by length, the newest is the longest: all rows are padded to it.
        if not batches or (len(batches[-1]) + 1) * len(one.tokens) > tokens:
            batches.append([])
        batches[-1].append(one)
    chance.shuffle(batches)
    return batches


def scheduled(
    items: Sequence[Conversation], tokens: int, epochs: int, seed: int, positions: int | None
) -> list[list[Conversation]]:
    """Every micro-batch of a training in order, each epoch anew; at most about so many positions."""
    found: list[list[Conversation]] = []
    left = positions
    for epoch in range(epochs):
        for batch in bucketed(items, tokens, random.Random(f"{seed}:{epoch}")):
            if left is not None and left <= 0:
                return found
            found.append(batch)
            left = None if left is None else left - sum(one.positions for one in batch)
    return found


def batch_of(
    backbone: Backbone,
    items: Sequence[Conversation],
    dtype: torch.dtype | None = None,
    *,
    taps: Sequence[int] = (-1,),
    traced: bool = False,
    prompts: bool = False,
) -> Batch:
    """The tapped states (of dtype, None: the network's) that emit the answers' tokens, in the network as it is now.

    traced: with what pseudo rows need, and without gradients of the network. prompts: those of prompts too, for a
    drafter whose layers see them.
    """
    tokens = nn.utils.rnn.pad_sequence([one.tokens for one in items], batch_first=True)
    made = trace(backbone, tokens) if traced else None
    states = (backbone.states(tokens, taps) if made is None else made.states[-1]).flatten(0, 1)  # [B * L, H ..]
    width = tokens.shape[1]
    segment = segments([parts_of(len(one.tokens), one.spans) for one in items])
    rows = torch.cat([torch.arange(row * width, row * width + len(one.tokens) - 1) for row, one in enumerate(items)])
    if not prompts:
        rows, segment = rows[segment >= 0], segment[segment >= 0]
    following = tokens.flatten()[rows + 1].to(states.device)
    sequence = (rows // width).to(states.device) if prompts else None
    rows = rows.to(states.device)
    hidden = states[rows] if dtype is None else states[rows].to(dtype)
    return Batch(hidden, following, segment.to(states.device), made, rows, sequence)


@torch.no_grad()
def whole_batch(
    backbone: Backbone, drafter: Drafter, items: Sequence[Conversation], dtype: torch.dtype | None = None
) -> Batch:
    """What a drafter learns of whole conversations beside a frozen backbone, from a pass over them."""
    if drafter.whole_sequences:
        return batch_of(backbone, items, dtype, traced=True)
    return batch_of(backbone, items, dtype, taps=drafter.taps, prompts=drafter.sees_prompt(drafter.config))
