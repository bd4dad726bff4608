"""Training data: answers with the hidden states that emitted their tokens, or whole conversations, in micro-batches."""

import hashlib
import json
import random
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from medusa_cli.data.conversation import Conversation
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine.extra_rows import trace
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.io import ReadReport

# A part of a ShareGPT conversation: seven letters and digits, not all of them small letters, and a number.
_PART = re.compile(r"(?=[a-z]*[A-Z0-9])([A-Za-z0-9]{7})_\d+")


@dataclass(frozen=True)
class Example:
    """An answer, a conversation, or a piece of either, whose hidden states lie in rows of a file.

    tokens [n]: the token emitted at each position. segments [n]: number of the answer that the token belongs to, -1
    for a position that is seen and not learnt.
    """

    id: str
    tokens: Tensor
    first_row: int
    segments: Tensor

    @property
    def positions(self) -> int:
        """Number of positions that are trained on."""
        return int((self.segments >= 0).sum())

    def pieces(self, positions: int) -> "Iterator[Example]":
        """Yields pieces with at most `positions` trained positions, and the other positions around them."""
        if self.positions <= positions:
            yield self
            return
        piece_of = ((self.segments >= 0).cumsum(0) - 1).clamp(min=0) // positions
        row, sizes = self.first_row, torch.bincount(piece_of).tolist()
        for tokens, segments in zip(self.tokens.split(sizes), self.segments.split(sizes), strict=True):
            yield Example(self.id, tokens, row, segments)
            row += len(tokens)


# What a micro-batch consists of: answers with cached states, or whole conversations that the model runs.
Item = TypeVar("Item", Example, Conversation)


@dataclass
class Dataset(Generic[Item]):
    """Items for training and held out.

    digest: names the conversations, their order and the split. states [rows, W]: rows that examples point into; None
    for whole conversations. kept: the states were kept while distilling, whatever backbone is loaded. columns
    [H * taps]: the columns of a row that a drafter reads; None: all.
    """

    train: list[Item]
    held_out: list[Item]
    report: ReadReport
    digest: str
    states: Tensor | None = None
    kept: bool = False
    columns: Tensor | None = None

    def answer_tokens(self) -> list[Tensor]:
        """Returns the tokens of the answers to train on."""
        answers: list[Tensor] = []
        for item in self.train:
            if isinstance(item, Conversation):
                answers += [torch.tensor(item.tokens[start:end]) for start, end in item.spans]
            else:
                answers.append(item.tokens[item.segments >= 0])
        return answers

    def batch(self, examples: Sequence[Example], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Batch:
        """Returns examples side by side: hidden [P, H * taps], next [P], segment [P] and sequence [P]."""
        assert self.states is not None
        hidden = torch.cat([self.states[e.first_row : e.first_row + len(e.tokens)] for e in examples])
        hidden = hidden if self.columns is None else hidden[:, self.columns]
        segment = number_segments([e.segments for e in examples])
        sequence = torch.repeat_interleave(torch.tensor([len(e.tokens) for e in examples]))
        tokens = torch.cat([e.tokens for e in examples]).to(device)
        return Batch(hidden.to(device, dtype), tokens, segment.to(device), sequence=sequence.to(device))


def segments_of(length: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Returns which answer the token after each position belongs to [length - 1], -1 where none is learnt.

    An answer of one token has no target that a head could learn.
    """
    segments = torch.full((length - 1,), -1)
    for number, (start, end) in enumerate(spans):
        if end - start > 1:
            segments[start - 1 : end - 1] = number
    return segments


def number_segments(segments: Sequence[Tensor]) -> Tensor:
    """Returns the segments of several items side by side [P], each answer with a number of its own, -1 unchanged."""
    numbered, first = [], 0
    for segment in segments:
        numbered.append(torch.where(segment >= 0, segment + first, segment))
        first += int(segment.max()) + 1 if len(segment) else 0
    return torch.cat(numbered)


def held_out_ids(ids: Sequence[str], fraction: float) -> set[str]:
    """Returns the ids of conversations kept from training.

    The hash of an id decides, so that more data moves none. The parts that ShareGPT's long conversations are cut into
    (CsuNKMw_0, CsuNKMw_17) go together: beside its other parts in training, a held-out part would be easier than an
    unseen conversation. Of two or more at least one is held out (unless fraction is 0), and never all.
    """
    parts: dict[str, list[str]] = {}
    for id in ids:
        part = _PART.fullmatch(id)
        parts.setdefault(part[1] if part else id, []).append(id)
    order = sorted(parts, key=_hash)
    below = bisect_left(order, int(fraction * 2**64), key=_hash)
    count = max(min(below, len(order) - 1), int(fraction > 0 and len(order) > 1))
    return {id for name in order[:count] for id in parts[name]}


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def split_conversations(
    conversations: Sequence[Conversation], report: ReadReport, *, fraction: float, max_length: int | None = None
) -> Dataset[Conversation]:
    """Splits off a fraction of the conversations; they are cut to max_length tokens, and to answers of two or more.

    Raises UserError where none is left.
    """
    kept = []
    for conversation in conversations:
        ends = [(start, min(end, max_length or end)) for start, end in conversation.spans]
        spans = [(start, end) for start, end in ends if end - start > 1]
        if spans:
            kept.append(replace(conversation, tokens=conversation.tokens[: spans[-1][1]], spans=spans))
    if not kept:
        raise UserError(
            f"the training data holds no answer of two tokens or more (train.max_length={max_length})",
            "distil more or longer conversations, or raise train.max_length and train.batch_tokens",
        )
    held_out = held_out_ids([conversation.id for conversation in kept], fraction)
    digest = hashlib.sha256()
    for item in kept:
        digest.update(json.dumps([item.id, item.tokens, item.spans, item.id in held_out]).encode())
    train = [conversation for conversation in kept if conversation.id not in held_out]
    others = [conversation for conversation in kept if conversation.id in held_out]
    return Dataset(train, others, report, digest.hexdigest()[:16])


def with_states(dataset: Dataset[Conversation], states: Tensor, prompts: bool = False) -> Dataset[Example]:
    """Returns the answers of conversations that name their rows in `states` [rows, W].

    prompts: an example is a whole conversation, whose prompts are seen, instead of an answer.
    """

    def examples(conversations: Sequence[Conversation]) -> Iterator[Example]:
        for item in conversations:
            assert item.state_rows is not None
            tokens, segments = torch.tensor(item.tokens), segments_of(len(item.tokens), item.spans)
            if prompts:
                yield Example(item.id, tokens[1:], item.state_rows[0], segments)
                continue
            for start, end in item.spans:
                answer = tokens[start:end]
                yield Example(item.id, answer, item.state_rows[0] + start - 1, torch.zeros_like(answer))

    train, held_out = list(examples(dataset.train)), list(examples(dataset.held_out))
    return Dataset(train, held_out, dataset.report, dataset.digest, states)


def micro_batches(items: Sequence[Item], limit: int, chance: random.Random | None = None) -> list[list[Item]]:
    """Returns micro-batches of items, examples in order unless `chance` shuffles them.

    Examples stand one after another: at most `limit` positions, a longer one is cut.
    Conversations are padded to the longest: at most `limit` tokens with padding, of like length, in random order.
    """
    batches: list[list[Any]] = []
    if items and isinstance(items[0], Conversation):
        chance = chance or random.Random(0)
        ties = chance
        for item in sorted(items, key=lambda item: (len(item.tokens), ties.random())):
            # Sorted by length, the newest is the longest: all rows are padded to it.
            if not batches or (len(batches[-1]) + 1) * len(item.tokens) > limit:
                batches.append([])
            batches[-1].append(item)
        chance.shuffle(batches)
        return batches
    order: list[Any] = list(items)
    if chance is not None:
        chance.shuffle(order)
    left = 0
    for example in order:
        for piece in example.pieces(limit):
            if piece.positions > left:
                batches.append([])
                left = limit
            batches[-1].append(piece)
            left -= piece.positions
    return batches


def schedule(items: Sequence[Item], limit: int, epochs: int, seed: int, max_positions: int | None) -> list[list[Item]]:
    """Returns every micro-batch of a training in order, each epoch shuffled anew; at most about max_positions.

    The same for the same seed, so that a resumed training needs only its place in it.
    """
    batches: list[list[Item]] = []
    left = sum(item.positions for item in items) * epochs if max_positions is None else max_positions
    for epoch in range(epochs):
        for batch in micro_batches(items, limit, random.Random(f"{seed}:{epoch}")):
            if left <= 0:
                return batches
            batches.append(batch)
            left -= sum(item.positions for item in batch)
    return batches


def frequent_tokens(answers: Sequence[Tensor], size: int, vocab_size: int) -> Tensor:
    """Returns the `size` tokens that stand in the largest number of answers [size], ties by id.

    The number of occurrences would mislead: an answer that repeats itself says one rare token a hundred times.
    """
    counts = torch.bincount(torch.cat([answer.unique() for answer in answers]), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size]


def coverage(ids: Tensor, answers: Sequence[Tensor]) -> float:
    """Returns the share of answer tokens that a vocabulary of some ids holds."""
    counts = torch.bincount(torch.cat(list(answers)), minlength=int(ids.max()) + 1)
    return float(counts[ids.cpu()].sum() / counts.sum())


def batch_of(
    backbone: Backbone,
    conversations: Sequence[Conversation],
    dtype: torch.dtype | None = None,
    *,
    taps: Sequence[int] = (-1,),
    traced: bool = False,
    prompts: bool = False,
) -> Batch:
    """Runs conversations through the network as it is now and returns the tapped states that emit answers' tokens.

    dtype None: the network's. traced: with what extra rows need, and without gradients of the network. prompts: also
    the states of prompts, for a drafter whose layers see them.
    """
    tokens = nn.utils.rnn.pad_sequence(
        [torch.tensor(conversation.tokens) for conversation in conversations], batch_first=True
    )  # [B, L]
    traces = trace(backbone, tokens) if traced else None
    states = (backbone.states(tokens, taps) if traces is None else traces.states[-1]).flatten(0, 1)  # [B * L, H ..]
    width = tokens.shape[1]
    segment = number_segments(
        [segments_of(len(conversation.tokens), conversation.spans) for conversation in conversations]
    )
    rows = torch.cat(
        [
            torch.arange(row * width, row * width + len(conversation.tokens) - 1)
            for row, conversation in enumerate(conversations)
        ]
    )
    if not prompts:
        rows, segment = rows[segment >= 0], segment[segment >= 0]
    following = tokens.flatten()[rows + 1].to(states.device)
    sequence = (rows // width).to(states.device) if prompts else None
    rows = rows.to(states.device)
    hidden = states[rows] if dtype is None else states[rows].to(dtype)
    return Batch(hidden, following, segment.to(states.device), traces, rows, sequence)


@torch.no_grad()
def whole_batch(
    backbone: Backbone, drafter: HeadDrafter, conversations: Sequence[Conversation], dtype: torch.dtype | None = None
) -> Batch:
    """Returns the batch that a drafter learns from beside a frozen backbone, from a pass over whole conversations."""
    if drafter.uses_verify_pass:
        return batch_of(backbone, conversations, dtype, traced=True)
    return batch_of(backbone, conversations, dtype, taps=drafter.taps, prompts=drafter.sees_prompt(drafter.config))
