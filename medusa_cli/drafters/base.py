"""The interface between drafters and the decoder, and the records that they exchange."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from medusa_cli.device import numbered, upload
from medusa_cli.engine.extra_rows import ExtraRows, Trace
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, DynamicTree, Tree

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class NewTokens:
    """Holds the tokens [A+1] accepted since the last draft, with their hidden states [A+1, H * taps].

    The tokens are at positions start .. start + A. root: the next token, which is decided but not yet
    in the cache. A sequence's first record holds its prompt. extra_hidden: final states [K, H] of
    the last token's extra rows, if the drafter has any. cache, slot: the engine's cache and the
    sequence's slot in it, for a drafter that reads the backbone's keys and values.
    """

    tokens: Tensor
    hidden: Tensor
    root: int
    start: int
    extra_hidden: Tensor | None = None
    cache: Any = None  # an engine.cache.Slots
    slot: int = 0

    @property
    def end(self) -> int:
        """Returns the position of the root."""
        return self.start + len(self.tokens)

    def last(self, count: int) -> NewTokens:
        """Returns at most the last `count` positions; tensors are copied, so a long prompt's tensors can be freed."""
        count = min(count, len(self.tokens))
        return replace(
            self,
            tokens=self.tokens[-count:].clone(),
            hidden=self.hidden[-count:].clone(),
            start=self.end - count,
        )

    def part(self, start: int, end: int) -> NewTokens:
        """Returns the record of positions start .. end - 1."""
        first = start - self.start
        last = end - self.start
        root = self.root if end == self.end else int(self.tokens[last])
        return replace(
            self,
            tokens=self.tokens[first:last],
            hidden=self.hidden[first:last],
            root=root,
            start=start,
        )

    @property
    def following(self) -> Tensor:
        """Returns the token after each position [A+1]; the last one is the root."""
        return torch.cat([self.tokens[1:], upload([self.root], self.tokens.device)])


def concat(pieces: Sequence[NewTokens]) -> NewTokens:
    """Joins consecutive records into one."""
    tokens = torch.cat([p.tokens for p in pieces])
    hidden = torch.cat([p.hidden for p in pieces])
    return replace(pieces[-1], tokens=tokens, hidden=hidden, start=pieces[0].start)


def with_last_layer(layers: Sequence[int]) -> tuple[int, ...]:
    """Returns the taps of a drafter that reads the states after `layers`, counted from 1, and after the last layer."""
    return (*(layer - 1 for layer in layers), -1)


def check_layers(layers: Sequence[int], depth: int, setting: str, *, repeats: bool = False) -> None:
    """Raises UsageError unless all layers are between 1 and depth - 1 and in ascending order.

    setting: the name shown in the error. repeats: True if a layer may occur more than once.
    """
    rising = list(layers) == sorted(layers if repeats else set(layers))
    if not rising or not all(1 <= layer < depth for layer in layers):
        fault = f"{setting}={list(layers)} does not fit this model's {depth} layers"
        raise UsageError(fault, f"name layers from 1 to {depth - 1} in rising order")


@dataclass(frozen=True)
class Batch:
    """Holds P packed training positions: hidden [P, H * taps], next and segment [P].

    next: the token after each position. Head k (from 1) predicts next[p + k] if segment[p + k] == segment[p]. Positions
    in prompts have segment -1: they are visible but not trained on. sequence [P]: the conversation of each position,
    for layers with a cache. Without `sequence`, these layers see only the segment. trace: for a drafter that uses the
    verify pass, the pass over full sequences [B, L]. rows [P]: the indices of the P positions among these B * L.

    segment, sequence and rows stay on the host. Tensors that depend on these are computed on the host and uploaded, so
    that the host never waits for a GPU to know the size of a tensor.
    """

    hidden: Tensor
    next: Tensor
    segment: Tensor
    trace: Trace | None = None
    rows: Tensor | None = None
    sequence: Tensor | None = None

    @cached_property
    def learned_on_host(self) -> Tensor:
        """Returns the positions [n] to train on, on the host."""
        return torch.nonzero(self.segment >= 0).squeeze(-1)

    @cached_property
    def learned(self) -> Tensor:
        """Returns the positions [n] to train on."""
        return upload(self.learned_on_host, self.next.device)

    @property
    def learned_index(self) -> Tensor:
        """Returns the index [P] of each trained position among the trained positions.

        Other positions have no valid index.
        """
        return upload((self.segment >= 0).cumsum(0) - 1, self.next.device)

    def targets(self, head: int) -> Tensor:
        """Returns the positions [n] that have a target for a head (from 1)."""
        segment = self.segment[:-head]
        targets = torch.nonzero((self.segment[head:] == segment) & (segment >= 0)).squeeze(-1)
        return upload(targets, self.next.device)

    def have_targets(self, heads: int) -> Tensor:
        """Returns which trained positions have a target for each head, bool [heads, n], on the host."""
        ends = nn.functional.pad(self.segment, (0, heads), value=-1)
        ahead = self.learned_on_host + torch.arange(1, heads + 1)[:, None]
        return ends[ahead] == self.segment[self.learned_on_host]

    def ahead(self, heads: int) -> Tensor:
        """Returns the positions 0 .. heads after each trained position, [heads + 1, n], clamped to the last position.

        Beyond the end of an answer there is no target, so any token may be read there.
        """
        steps = numbered(heads + 1, self.learned.device)[:, None]
        return (self.learned + steps).clamp(max=len(self.segment) - 1)

    @property
    def attention_groups(self) -> Tensor:
        """Returns the conversation or segment [P] within which each position sees all earlier ones, on the host."""
        return self.segment if self.sequence is None else self.sequence


class Drafter(nn.Module, ABC):
    """Drafts the next tokens of a backbone, which is always passed as an argument."""

    taps: tuple[int, ...] = (-1,)  # the backbone's layers whose output the drafter reads
    uses_verify_pass: ClassVar[bool] = False  # drafts from extra rows of the previous verify pass
    reads_cache: ClassVar[bool] = False  # reads the backbone's own keys and values
    prompt_tokens: int = 1  # the number of a prompt's last tokens that the drafter reads
    num_heads: int

    @property
    def reads_every_step(self) -> bool:
        """Returns True if the drafter must read the states of all steps, False if the last step's states suffice."""
        return False

    def first_input(self, prompt: NewTokens) -> NewTokens:
        """Returns the prompt tokens that the drafter needs."""
        return prompt.last(self.prompt_tokens)

    def truncate(self, length: int) -> int:
        """Forgets this sequence's state from position `length` on.

        Returns the first position that the drafter must read again. State for earlier positions
        stays valid for any text with the same first `length` tokens.
        """
        return length

    def fork(self) -> Self:
        """Returns a copy of this drafter for another sequence, with shared weights and separate state."""
        other = copy.copy(self)
        other.truncate(0)
        return other

    def extra_rows(self, depth: int) -> ExtraRows | None:
        """Returns the extra rows (FIRP) that the verify pass before a draft of this depth needs, None for no rows."""
        return None

    @abstractmethod
    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[Self],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        """Drafts the trees of B sequences: a token for each node of a static tree, or trees that grow.

        sequences: one fork per sequence. new: each sequence's tokens since its last draft, initially the `first_input`
        of its prompt. No tree is deeper than num_heads. FIRP drafts no deeper than the extra rows of the previous pass.
        """
