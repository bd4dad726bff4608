"""Training data: answers, the hidden state that emitted each of their tokens, and packed batches of both."""

import hashlib
import json
import random
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.drafters.base import Batch
from medusa_cli.errors import UserError
from medusa_cli.runs.usable import ReadReport
from medusa_cli.training.parsing import Record

# A part of a ShareGPT conversation: seven letters and digits, not all of them small letters, and a number.
_PART = re.compile(r"(?=[a-z]*[A-Z0-9])([A-Za-z0-9]{7})_\d+")


@dataclass(frozen=True)
class Example:
    """One answer, a conversation, or a piece of either: its record's id, tokens [n], the number of its first state row.

    parts [n]: which answer of a conversation each token is of, -1 for what is seen and not learnt; None: all of one.
    """

    id: str
    tokens: Tensor
    first_row: int
    parts: Tensor | None = None

    @property
    def positions(self) -> int:
        """How many positions are trained on."""
        return len(self.tokens) if self.parts is None else int((self.parts >= 0).sum())

    def pieces(self, positions: int) -> "Iterator[Example]":
        """Pieces of at most so many positions to train on, each with what is not learnt before and after it."""
        if self.positions <= positions:
            yield self
            return
        learnt = torch.ones(len(self.tokens), dtype=torch.long) if self.parts is None else (self.parts >= 0).long()
        number = (learnt.cumsum(0) - 1).clamp(min=0) // positions
        first = 0
        for rows in torch.bincount(number).tolist():
            parts = None if self.parts is None else self.parts[first : first + rows]
            yield Example(self.id, self.tokens[first : first + rows], self.first_row + first, parts)
            first += rows


@dataclass
class Dataset:
    """Answers (or conversations) for training and held out, and the state rows [rows, W] they point into.

    columns [H * taps]: which of a row's numbers a drafter reads; None: all.
    """

    train: list[Example]
    held_out: list[Example]
    states: Tensor
    report: ReadReport
    digest: str  # names this data: the same conversations in the same order
    kept: bool = False  # the states are those of distilling: whatever backbone is loaded, they stay the same
    columns: Tensor | None = None

    def answer_tokens(self) -> list[Tensor]:
        """The tokens of every answer to train on."""
        return [one.tokens if one.parts is None else one.tokens[one.parts >= 0] for one in self.train]

    def batch(self, answers: Sequence[Example], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Batch:
        """Side by side: hidden [P, H * taps], next [P], segment [P] (each position's answer) and sequence [P]."""
        hidden = torch.cat([self.states[a.first_row : a.first_row + len(a.tokens)] for a in answers])
        hidden = hidden if self.columns is None else hidden[:, self.columns]
        segment = segments([torch.zeros(len(a.tokens)).long() if a.parts is None else a.parts for a in answers])
        sequence = torch.repeat_interleave(torch.tensor([len(a.tokens) for a in answers]))
        tokens = torch.cat([a.tokens for a in answers]).to(device)
        return Batch(hidden.to(device, dtype), tokens, segment.to(device), sequence=sequence.to(device))


def parts_of(length: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Which answer the token after each position of a conversation is of [length - 1]; -1 where none is learnt.

    An answer of one token has no target that a head could learn.
    """
    parts = torch.full((length - 1,), -1)
    for number, (start, end) in enumerate(spans):
        if end - start > 1:
            parts[start - 1 : end - 1] = number
    return parts


def segments(parts: Sequence[Tensor]) -> Tensor:
    """The parts of conversations side by side [P], each answer with a number of its own, -1 as it is."""
    found, first = [], 0
    for one in parts:
        found.append(torch.where(one >= 0, one + first, one))
        first += int(one.max()) + 1 if len(one) else 0
    return torch.cat(found)


def held_out_ids(records: Sequence[Record], fraction: float) -> set[str]:
    """The records kept from training, decided by the hash of a conversation's name, so that more data moves none.

    The parts that ShareGPT's long conversations are cut into (CsuNKMw_0, CsuNKMw_17) go together: held out beside its
    other parts in training, a part would be easier than a conversation never seen. Of two conversations or more at
    least one is held out (unless the fraction is 0); never all are.
    """
    parts: dict[str, list[str]] = {}
    for record in records:
        whole = _PART.fullmatch(record.id)
        parts.setdefault(whole[1] if whole else record.id, []).append(record.id)
    order = sorted(parts, key=_hash)
    held = bisect_left(order, int(fraction * 2**64), key=_hash)
    kept = max(min(held, len(order) - 1), int(fraction > 0 and len(order) > 1))
    return {id for name in order[:kept] for id in parts[name]}


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def records_digest(records: Sequence[Record], held: Collection[str]) -> str:
    """What tells one set of conversations, and what of it is held out, from another."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record.id, record.tokens, record.spans, record.id in held]).encode())
    return digest.hexdigest()[:16]


def learnable(records: Sequence[Record]) -> list[Record]:
    """The records with an answer of two tokens or more; UserError where there is none."""
    found = [one for one in records if any(end - start > 1 for start, end in one.spans)]
    if not found:
        raise UserError("the training data holds no answer of two tokens or more", "distil more conversations")
    return found


def split(
    records: Sequence[Record],
    states: Tensor,
    report: ReadReport,
    held: Collection[str],
    digest: str,
    prompts: bool = False,
) -> Dataset:
    """Answers of two tokens or more, those `held` out apart; records without kept rows take theirs in order.

    prompts: not each answer alone but conversations, whose prompts are seen; the rows of all positions are there.
    """
    parts: dict[bool, list[Example]] = {False: [], True: []}
    row = 0
    for record in records:
        row = row if record.first_row is None else record.first_row
        usable = [(start, end) for start, end in record.spans if end - start > 1]
        if prompts and usable:
            tokens = torch.tensor(record.tokens[: usable[-1][1]])
            parts[record.id in held].append(Example(record.id, tokens[1:], row, parts_of(len(tokens), usable)))
        elif usable:
            for (start, end), at in zip(record.spans, record.rows_of_answers, strict=True):
                if end - start > 1:
                    parts[record.id in held].append(
                        Example(record.id, torch.tensor(record.tokens[start:end]), row + at)
                    )
        row += record.rows
    return Dataset(parts[False], parts[True], states, report, digest)


def pack(answers: Sequence[Example], positions: int) -> list[list[Example]]:
    """Micro-batches of at most `positions` positions from whole answers in order; a longer answer is cut."""
    batches: list[list[Example]] = []
    room = 0
    for answer in answers:
        for piece in answer.pieces(positions):
            if piece.positions > room:
                batches.append([])
                room = positions
            batches[-1].append(piece)
            room -= piece.positions
    return batches


def plan(
    answers: Sequence[Example], positions: int, epochs: int, seed: int, max_tokens: int | None
) -> list[list[Example]]:
    """Every micro-batch of a training in order, each epoch shuffled anew; at most about max_tokens positions.

    The same for the same seed, so that a resumed training needs only its place in it.
    """
    batches: list[list[Example]] = []
    left = max_tokens if max_tokens is not None else sum(a.positions for a in answers) * epochs
    for epoch in range(epochs):
        order = list(answers)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        for batch in pack(order, positions):
            if left <= 0:
                return batches
            batches.append(batch)
            left -= sum(answer.positions for answer in batch)
    return batches


def frequent_tokens(answers: Sequence[Tensor], size: int, vocab_size: int) -> Tensor:
    """The `size` tokens that stand in most answers [size], ties by id.

    Not those that stand there most often: an answer that repeats itself to its end says one rare token a hundred times.
    """
    counts = torch.bincount(torch.cat([one.unique() for one in answers]), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size]


def coverage(ids: Tensor, answers: Sequence[Tensor]) -> float:
    """The share of answer tokens that a vocabulary of some ids holds."""
    counts = torch.bincount(torch.cat(list(answers)), minlength=int(ids.max()) + 1)
    return float(counts[ids.cpu()].sum() / counts.sum())
