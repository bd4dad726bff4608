"""What a drafter is: confirmed state in, a tree of guessed tokens out; packed positions in, losses out."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from medusa_cli.backbone import Backbone
from medusa_cli.engines.pseudo import Pseudo
from medusa_cli.engines.trace import Trace
from medusa_cli.errors import UsageError
from medusa_cli.tree import Growth, Tree

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Confirmed:
    """What the backbone has just settled: tokens [A+1] at positions start .. start+A, their tapped hidden states
    [A+1, H * taps], and `root`, the next token, decided but not yet in the cache. Prefill is simply the first one.

    ahead: the final states [K, H] of the last token's pseudo rows, for a drafter that has some ride."""

    tokens: Tensor
    hidden: Tensor
    root: int
    start: int
    ahead: Tensor | None = None

    @property
    def end(self) -> int:
        """The position of the root."""
        return self.start + len(self.tokens)

    def last(self) -> "Confirmed":
        """Its last position alone; nothing else of a long prompt is held by it."""
        return replace(self, tokens=self.tokens[-1:].clone(), hidden=self.hidden[-1:].clone(), start=self.end - 1)

    def part(self, start: int, end: int) -> "Confirmed":
        """Its positions start .. end - 1."""
        first, last = start - self.start, end - self.start
        root = self.root if end == self.end else int(self.tokens[last])
        return replace(self, tokens=self.tokens[first:last], hidden=self.hidden[first:last], root=root, start=start)

    @property
    def following(self) -> Tensor:
        """The token after each position [A+1], the root last."""
        return torch.cat([self.tokens[1:], self.tokens.new_tensor([self.root])])


def joined(pieces: Sequence[Confirmed]) -> Confirmed:
    """Consecutive pieces as one."""
    tokens, hidden = (torch.cat([getattr(one, name) for one in pieces]) for name in ("tokens", "hidden"))
    return replace(pieces[-1], tokens=tokens, hidden=hidden, start=pieces[0].start)


def roots_of(confirmed: Sequence[Confirmed], device: torch.device) -> Tensor:
    """The roots [B] of B sequences."""
    return torch.tensor([one.root for one in confirmed], device=device)


def beside_final(layers: Sequence[int]) -> tuple[int, ...]:
    """The taps of a drafter that reads the states after so many layers, and then the final ones."""
    return (*(layer - 1 for layer in layers), -1)


def check_layers(layers: Sequence[int], depth: int, named: str) -> None:
    """UsageError where states cannot be read after these layers of so many; `named` is what asks for them."""
    if list(layers) != sorted(set(layers)) or not all(1 <= layer < depth for layer in layers):
        raise UsageError(
            f"{named}={list(layers)} does not fit this model's {depth} layers",
            f"name layers from 1 to {depth - 1} in rising order; the last one's states are read in any case",
        )


@dataclass(frozen=True)
class Draft:
    """Guessed tokens [N] laid over a tree of N nodes; tokens[0] is the root. looked_up: how many the text suggested."""

    tokens: Tensor
    tree: Tree
    looked_up: int = 0


@dataclass(frozen=True)
class Batch:
    """P packed positions: hidden [P, H * taps], next [P] (the token the backbone emits after each), segment [P].

    Head k (from 1) predicts next[p + k] where segment[p + k] == segment[p]; elsewhere it has no target. Positions of
    segment -1, those of prompts, are seen and not learnt. sequence [P]: which conversation each position is of, as
    layers with a cache of their own see it; None: they see each segment alone. For a drafter that learns from whole
    sequences: their trace [B, L], and the rows [P] of its B * L that the positions are.
    """

    hidden: Tensor
    next: Tensor
    segment: Tensor
    trace: Trace | None = None
    rows: Tensor | None = None
    sequence: Tensor | None = None

    @property
    def learnt(self) -> Tensor:
        """The positions [n] that are learnt."""
        return torch.nonzero(self.segment >= 0).squeeze(-1)

    @property
    def numbers(self) -> Tensor:
        """The number of each position [P] among those that are learnt; of the others it says nothing."""
        return (self.segment >= 0).cumsum(0) - 1

    def targets(self, ahead: int) -> Tensor:
        """The positions [n] that have a target so many places on."""
        here = self.segment[:-ahead]
        return torch.nonzero((self.segment[ahead:] == here) & (here >= 0)).squeeze(-1)

    @property
    def views(self) -> Tensor:
        """What each position sees all of that comes before it [P]: its conversation, or its segment."""
        return self.segment if self.sequence is None else self.sequence


@dataclass(frozen=True)
class Objective:
    """What heads learn: the loss of head k weighs decay^k (section 3.2.1); kind is one of `losses.KINDS`.

    soft: the share of the backbone's own distribution in the targets of cross-entropy. regress: the weight of the
    distance between the states of the heads that see the drafted tokens and the backbone's own. scored: how many tokens
    of the vocabulary a batch scores when it is learnt from (`drafters.scored`), None for all.
    """

    decay: float = 0.8
    soft: float = 0.0
    regress: float = 0.0
    kind: str = "ce"
    scored: int | None = None


PLAIN = Objective()


@dataclass(frozen=True)
class Losses:
    """What a batch of P positions came to: per_head, each head's mean loss over the targets it can learn (learnt [K]
    of them), and its top-1 hits and targets (correct, counted [K]).

    total: what to minimise, a mean over all P positions, where a head without a target there adds nothing: means of
    several batches, weighed by their positions, are that of one batch of them all.
    """

    total: Tensor
    per_head: list[Tensor]
    correct: Tensor
    counted: Tensor
    learnt: Tensor


class Drafter(nn.Module, ABC):
    """Guesses the next tokens of a backbone that is always an argument: the state dict holds the drafter alone."""

    name: ClassVar[str]
    whole_sequences: ClassVar[bool] = False  # learns from traces of whole sequences, not from cached states alone
    learning_rate: ClassVar[float] = 2e-3  # the peak where a recipe names none
    effort: ClassVar[float] = 1.0  # what training it on a position costs beside Medusa heads; for estimates alone
    regress: ClassVar[float] = 0.0  # the weight of that loss in stage 1 where a recipe names none
    # How many of the first heads (inf: all) see every token before their guess, and can know its state.
    sees_drafted: ClassVar[float] = 0
    taps: tuple[int, ...] = (-1,)
    num_heads: int
    config: Any

    @classmethod
    def sees_prompt(cls, settings: Any) -> bool:
        """Whether layers of its own see a conversation from its first token, by a recipe's settings or a config."""
        return False

    @classmethod
    def default_taps(cls, depth: int) -> tuple[int, ...]:
        """After which of a backbone's layers a recipe that names none has it read states, beside the final ones."""
        return ()

    def opening(self, prompt: Confirmed) -> Confirmed:
        """What drafts begin with of a prompt, or of what is new of one: layers of its own that see answers alone begin
        with the position that says an answer's first token, and drafters without any read no earlier one either."""
        return prompt if self.sees_prompt(self.config) else prompt.last()

    def truncate(self, length: int) -> int:
        """Forget this sequence's own state from position `length` on; return the position to be told of again.

        Up to there a text that has the same first `length` tokens is known. A drafter without state is told of what
        is new alone.
        """
        return length

    def fork(self) -> "Self":
        """This drafter for another sequence: the same weights, packed copies included, and a state of its own."""
        other = copy.copy(self)
        other.truncate(0)
        return other

    @property
    def own_parts(self) -> Sequence[nn.Module]:
        """By head, the module that is its alone, in a drafter whose heads share nothing; none where they do."""
        return ()

    def pseudo(self, depth: int) -> Pseudo | None:
        """Rows that ride in the backbone's next pass, for drafting a tree of this depth after it; most have none."""
        return None

    @property
    def rides(self) -> bool:
        """Whether drafts come with the pass before their own, so that they are chosen before it."""
        return self.pseudo(1) is not None

    @abstractmethod
    def draft(
        self, backbone: Backbone, sequences: "Sequence[Self]", confirmed: Sequence[Confirmed], shape: Tree | Growth
    ) -> list[Draft]:
        """Guess a token for every node of B sequences' trees, all of one shape, or grown for this step.

        sequences are forks, one for each, with what was confirmed of each since it drafted last: at first the
        `opening` of its prompt. No tree is deeper than num_heads.
        """

    @abstractmethod
    def loss(self, backbone: Backbone, batch: Batch, objective: Objective = PLAIN) -> Losses:
        """What the heads' guesses on a batch came to, by an objective."""

    @abstractmethod
    def logits(self, backbone: Backbone, batch: Batch) -> Iterator[Tensor]:
        """Each head's fp32 logits [n, M] over its vocabulary in turn, the true tokens before its target known.

        Of the n positions that are learnt.
        """

    @abstractmethod
    def save(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write config.json and the weights as safetensors."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, backbone: Backbone) -> "Drafter":
        """Read what save wrote, on the backbone's device and in its dtype."""
