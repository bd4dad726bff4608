"""Training data: training and held-out conversations, micro-batches, and the hidden states that drafters read."""

import hashlib
import json
import random
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from medusa_cli.data.conversation import Conversation, read_conversations
from medusa_cli.device import upload
from medusa_cli.drafters.base import Batch
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine.eager import EagerEngine
from medusa_cli.engine.extra_rows import trace
from medusa_cli.errors import UserError
from medusa_cli.files.io import ReadReport
from medusa_cli.model import Backbone

# Id of a part or turn of a ShareGPT conversation: seven letters and digits, not all lowercase,
# followed by one or two numbers.
_PART = re.compile(r"(?=[a-z]*[A-Z0-9])([A-Za-z0-9]{7})_\d+(?:/\d+)?")

# Id of a row in speculators data, which holds one turn of a conversation.
_GENERATION = re.compile(r"(.+)_gen\d+")

# Id of a prompt about code: its kind, a digest of its file, and a digest of the code.
_CODE = re.compile(r"code-[a-z]+-([0-9a-f]{8})-[0-9a-f]{12}")


@dataclass(frozen=True)
class Dataset:
    """Holds training conversations and held-out conversations.

    digest: identifies the conversations, their order and the split. states [rows, W]: the rows to which the
    conversations refer; None: the model computes them in every training step. kept: the states were stored during
    distillation, perhaps by another backbone. columns [H * taps]: the columns of a row that a drafter reads; None: all.
    """

    train: list[Conversation]
    held_out: list[Conversation]
    report: ReadReport
    digest: str
    states: Tensor | None = None
    kept: bool = False
    columns: Tensor | None = None

    def answers(self, items: Sequence[Conversation] | None = None) -> list[Tensor]:
        """Returns the tokens of each answer in the conversations, by default in the training conversations."""
        items = self.train if items is None else items
        return [torch.tensor(item.tokens[start:end]) for item in items for start, end in item.spans]

    def texts(self) -> list[Tensor]:
        """Returns the tokens of each training answer, and the other tokens of each training conversation."""
        prompts = []
        for item in self.train:
            tokens = torch.tensor(item.tokens)
            asked = torch.ones(len(tokens), dtype=torch.bool)
            for start, end in item.spans:
                asked[start:end] = False
            prompts.append(tokens[asked])
        return [*self.answers(), *prompts]

    @torch.no_grad()
    def batch(
        self,
        backbone: Backbone,
        drafter: HeadDrafter,
        items: Sequence[Conversation],
        dtype: torch.dtype | None = None,
    ) -> Batch:
        """Packs conversations for a drafter on a frozen backbone; with dtype None, the states keep their dtype."""
        if self.states is None:
            return batch_of(backbone, drafter, items, dtype)
        starts = [item.state_rows[0] for item in items if item.state_rows is not None]
        batch = _pick(self.states, starts, items, drafter, backbone.device)
        hidden = batch.hidden if self.columns is None else batch.hidden[:, self.columns]
        return replace(batch, hidden=upload(hidden, backbone.device).to(dtype or hidden.dtype))

    def micro_batches(
        self, items: Sequence[Conversation], limit: int, chance: random.Random | None = None
    ) -> list[list[Conversation]]:
        """Returns micro-batches of whole conversations, because a part would lack the text before it.

        With stored states, a batch has at most `limit` trained positions, and conversations stay in order unless
        `chance` shuffles them. Without stored states, a batch has at most `limit` tokens including padding, and its
        conversations are of similar length. A conversation longer than the limit forms a batch by itself.
        """
        batches: list[list[Conversation]] = []
        if self.states is None:
            ties = chance or random.Random(0)
            for item in sorted(items, key=lambda item: (len(item.tokens), ties.random())):
                # Items are sorted by length, so all rows are padded to the length of the last one.
                if not batches or (len(batches[-1]) + 1) * len(item.tokens) > limit:
                    batches.append([])
                batches[-1].append(item)
            ties.shuffle(batches)
            return batches

        order = list(items)
        left = 0
        if chance is not None:
            chance.shuffle(order)
        for item in order:
            if item.positions > left:
                batches.append([])
                left = limit
            batches[-1].append(item)
            left -= item.positions
        return batches

    def schedule(
        self, limit: int, epochs: int, seed: int, max_positions: int | None
    ) -> list[list[Conversation]]:
        """Returns all micro-batches of a training run in order, reshuffled in each epoch, up to about max_positions.

        The same seed gives the same schedule, so a resumed run needs only its position in the
        schedule.
        """
        batches: list[list[Conversation]] = []
        left = positions_of(self.train) * epochs if max_positions is None else max_positions
        for epoch in range(epochs):
            for batch in self.micro_batches(self.train, limit, random.Random(f"{seed}:{epoch}")):
                if left <= 0:
                    return batches
                batches.append(batch)
                left -= positions_of(batch)
        return batches


def positions_of(items: Sequence[Conversation]) -> int:
    """Returns the number of answer tokens, which are the positions to train on."""
    return sum(item.positions for item in items)


def read_dataset(
    path: Path, backbone: Backbone, fraction: float, max_length: int | None = None
) -> Dataset:
    """Reads a file of conversations and holds out a fraction; raises UserError for missing or unusable data.

    Conversations are truncated to max_length tokens. Conversations without an answer of at least
    two tokens are left out, because no head could learn from them.
    """
    return split_conversations(
        *read_conversations(path, backbone), fraction=fraction, max_length=max_length
    )


def split_conversations(
    conversations: Sequence[Conversation],
    report: ReadReport,
    *,
    fraction: float,
    max_length: int | None = None,
) -> Dataset:
    """Truncates conversations to max_length tokens and holds out a fraction; raises UserError if none is left.

    The report counts the conversations that are left out.
    """
    kept = []
    within = "" if max_length is None else f" within {max_length:,} tokens"
    for item in conversations:
        spans = [(start, min(end, max_length or end)) for start, end in item.spans]
        if any(end - start > 1 for start, end in spans):
            if max_length is not None:
                spans = [(start, end) for start, end in spans if start < end]
                item = replace(item, tokens=item.tokens[: spans[-1][1]], spans=spans)
            kept.append(item)
        else:
            report.read -= 1
            report.skip(f"no answer of two tokens or more{within}")
    if not kept:
        raise UserError(
            f"the training data holds no answer of two tokens or more (train.max_length={max_length})",
            "distill more or longer conversations, or raise train.max_length and train.batch_tokens",
        )

    held_out = held_out_ids([item.id for item in kept], fraction)
    digest = hashlib.sha256()
    for item in kept:
        digest.update(json.dumps([item.id, item.tokens, item.spans, item.id in held_out]).encode())
    train = [item for item in kept if item.id not in held_out]
    others = [item for item in kept if item.id in held_out]
    return Dataset(train, others, report, digest.hexdigest()[:16])


def held_out_ids(ids: Sequence[str], fraction: float) -> set[str]:
    """Returns the ids of the held-out conversations.

    The hash of an id decides whether the conversation is held out, so that more data does not move any conversation to
    the other side. The parts into which ShareGPT splits a long conversation (CsuNKMw_0, CsuNKMw_17) stay together, and
    so do turns that are separate rows in speculators data, and prompts about one file of code. If one part were held
    out and another part were trained on, the held-out part would be easier than an unseen conversation. Of two or more
    such groups, at least one is held out (unless fraction is 0), but never all.
    """
    parts: dict[str, list[str]] = {}
    for id in ids:
        part = _PART.fullmatch(id) or _GENERATION.fullmatch(id) or _CODE.fullmatch(id)
        parts.setdefault(part[1] if part else id, []).append(id)
    order = sorted(parts, key=_hash)
    below = bisect_left(order, int(fraction * 2**64), key=_hash)
    count = max(min(below, len(order) - 1), int(fraction > 0 and len(order) > 1))
    return {id for name in order[:count] for id in parts[name]}


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def batch_of(
    backbone: Backbone,
    drafter: HeadDrafter,
    items: Sequence[Conversation],
    dtype: torch.dtype | None = None,
) -> Batch:
    """Runs conversations through the model with its current weights; with dtype None, the states keep their dtype.

    The engine runs the model if it has replaced the network's layers. Otherwise, gradients reach
    the network unless the drafter uses the verify pass.
    """
    # [B, L]
    tokens = nn.utils.rnn.pad_sequence(
        [torch.tensor(item.tokens) for item in items], batch_first=True
    )
    traces = trace(backbone, tokens) if drafter.uses_verify_pass else None
    # [B, L, H * taps]
    if traces is not None:
        states = traces.states[-1]
    elif isinstance(backbone.engine, EagerEngine):
        states = backbone.states(tokens, drafter.taps)
    else:
        states = backbone.engine.states(upload(tokens, backbone.device), drafter.taps)
    starts = range(0, tokens.numel(), tokens.shape[1])
    batch = _pick(states.flatten(0, 1), starts, items, drafter, states.device)
    return replace(batch, hidden=batch.hidden.to(dtype or states.dtype), trace=traces)


def _pick(
    states: Tensor,
    starts: Sequence[int],
    items: Sequence[Conversation],
    drafter: HeadDrafter,
    device: torch.device,
) -> Batch:
    """Returns the batch of conversations whose states begin at the rows `starts` of states [rows, W].

    The batch holds the positions that emit answer tokens. If the drafter's layers see prompts, it
    holds all positions but the last of each conversation.
    """
    prompts = drafter.sees_prompt
    rows = []
    following = []
    segment = []
    sequence = []
    answers = 0
    for number, (start, item) in enumerate(zip(starts, items, strict=True)):
        part = torch.full((len(item.tokens) - 1,), -1)
        for first, end in item.spans:
            part[first - 1 : end - 1] = answers
            answers += 1
        at = torch.arange(len(part)) if prompts else torch.nonzero(part >= 0).squeeze(-1)
        rows.append(start + at)
        following.append(torch.tensor(item.tokens[1:])[at])
        segment.append(part[at])
        sequence.append(torch.full_like(at, number))
    kept = torch.cat(rows)
    return Batch(
        states[upload(kept, states.device)],
        upload(torch.cat(following), device),
        torch.cat(segment),
        rows=kept,
        sequence=torch.cat(sequence) if prompts else None,
    )
