"""Stage 2: backbone and heads learn together, the backbone held to what it was (Medusa-2, section 2.2.2)."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.adapter import adapter_off, trained_weights
from medusa_cli.drafters.base import Batch, Drafter
from medusa_cli.recipe import TrainRecipe
from medusa_cli.training.data import is_held_out
from medusa_cli.training.events import Found
from medusa_cli.training.records import ReadReport, Record
from medusa_cli.training.schedule import lambda_0
from medusa_cli.training.task import Group


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
    """Whole conversations for joint training and held out."""

    train: list[Conversation]
    held_out: list[Conversation]
    report: ReadReport
    digest: str

    def answer_tokens(self) -> list[Tensor]:
        """The tokens of every answer to train on."""
        return [one.tokens[start:end] for one in self.train for start, end in one.spans]


def split_conversations(
    records: Sequence[Record], report: ReadReport, *, max_length: int, fraction: float, digest: str
) -> Conversations:
    """Split records as stage 1 does and cut them to max_length tokens; answers of one token are left out."""
    parts: dict[bool, list[Conversation]] = {False: [], True: []}
    for record in records:
        spans = [(s, min(e, max_length)) for s, e in record.spans if min(e, max_length) - s > 1]
        if spans:
            cut = Conversation(record.id, torch.tensor(record.tokens[: spans[-1][1]]), spans)
            parts[is_held_out(record.id, fraction)].append(cut)
    if fraction > 0 and not parts[True] and len(parts[False]) > 1:
        parts[True].append(parts[False].pop())
    return Conversations(parts[False], parts[True], report, digest)


class Joint:
    """L = L_LM + lambda_0 * sum of lambda_k L_k (equation 2).

    L_LM is KL(original || trained), where the original is the same network with its adapter off (section 2.3.2), or
    with objective "ce" the cross-entropy of the answers' tokens.
    """

    def __init__(self, backbone: Backbone, drafter: Drafter, dataset: Conversations, train: TrainRecipe) -> None:
        self.backbone, self.drafter, self.dataset, self.train = backbone, drafter, dataset, train
        self.weights: dict[str, nn.Parameter] = trained_weights(backbone.model)
        self._measuring = False

    def groups(self) -> list[Group]:
        heads = [p for p in self.drafter.parameters() if p.requires_grad]
        slow = self.train.lr / 4 if self.train.backbone_lr is None else self.train.backbone_lr
        return [Group(heads, self.train.lr), Group(list(self.weights.values()), slow)]

    def batches(self) -> list[list[Conversation]]:
        train, left = self.train, self.train.max_tokens
        found: list[list[Conversation]] = []
        for epoch in range(train.epochs):
            for batch in bucketed(self.dataset.train, train.batch_tokens, random.Random(f"{train.seed}:{epoch}")):
                if left is not None and left <= 0:
                    return found
                found.append(batch)
                left = None if left is None else left - sum(one.positions for one in batch)
        return found

    def held_out(self) -> list[list[Conversation]]:
        return bucketed(self.dataset.held_out, self.train.batch_tokens, random.Random(0))

    def losses(self, items: list[Conversation], progress: float) -> Found:
        """The joint loss of whole conversations, on assistant tokens alone; while evaluating, what the change costs."""
        train = self.train
        weight, learns = lambda_0(progress, schedule=train.schedule, peak=train.lambda_0, share=train.heads_first)
        if not learns and not self._measuring:  # the heads alone: the backbone is still what it was
            with torch.no_grad():
                batch = self._batch(items)
            heads = self.drafter.loss(self.backbone, batch, train.decay, train.soft)
            return Found(heads.total, heads, len(batch.next), {"lambda_0": weight})
        batch = self._batch(items)
        heads = self.drafter.loss(self.backbone, batch, train.decay, train.soft)
        scores = self.backbone.lm_head(batch.hidden).float()  # [P, V]
        plain = F.cross_entropy(scores, batch.next)
        if train.objective == "ce" and not self._measuring:
            return self._found(plain, weight, heads, len(batch.next))
        with torch.no_grad(), adapter_off(self.backbone.model):
            original = self.backbone.lm_head(self._batch(items).hidden).float()
        kl = F.kl_div(scores.log_softmax(-1), original.log_softmax(-1), reduction="batchmean", log_target=True)
        found = self._found(kl if train.objective == "kl" else plain, weight, heads, len(batch.next))
        if self._measuring:
            found.parts["kl"] = float(kl)
            found.parts["nll"] = float(plain)
            found.parts["nll_original"] = float(F.cross_entropy(original, batch.next))
            found.parts["agreement"] = float((scores.argmax(-1) == original.argmax(-1)).float().mean())
        return found

    def _found(self, model: Tensor, weight: float, heads: Any, positions: int) -> Found:
        parts = {"lambda_0": weight, "lm": float(model.detach())}
        return Found(model + weight * heads.total, heads, positions, parts)

    def _batch(self, items: list[Conversation]) -> Batch:
        """The states that emit the answers' tokens, in the network as it is now."""
        lengths = torch.tensor([len(one.tokens) for one in items])
        tokens = nn.utils.rnn.pad_sequence([one.tokens for one in items], batch_first=True)
        states = self.backbone.states(tokens, lengths).flatten(0, 1)  # [B * L, H]
        width = tokens.shape[1]
        spans = [(row * width, start, end) for row, one in enumerate(items) for start, end in one.spans]
        rows = torch.cat([torch.arange(at + start - 1, at + end - 1) for at, start, end in spans])
        segment = torch.cat([torch.full((end - start,), i) for i, (_, start, end) in enumerate(spans)])
        device = states.device
        following = tokens.flatten()[rows + 1].to(device)
        hidden = states[rows.to(device)]
        if self.train.dtype == "bf16":
            hidden = hidden.to(torch.bfloat16)
        return Batch(hidden, following, segment.to(device))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While it lasts, losses also say how far the network has moved from the original."""
        self._measuring = True
        training = self.backbone.model.training
        self.backbone.model.eval()
        try:
            yield
        finally:
            self._measuring = False
            self.backbone.model.train(training)

    def state(self) -> dict[str, Any]:
        return {name: weight.detach() for name, weight in self.weights.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state[name])


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
