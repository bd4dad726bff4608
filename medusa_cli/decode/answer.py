"""Results of decoding steps: statistics, log probabilities and the text of an answer so far."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from medusa_cli.decode.stop_strings import StopStrings
from medusa_cli.decode.text_stream import TextStream
from medusa_cli.device import upload
from medusa_cli.model import Backbone
from medusa_cli.tree import Growth


@dataclass(frozen=True)
class Likelihood:
    """Holds the model's log probabilities of a token and of the most likely tokens.

    The values are those before logits processors, temperature and truncation (top-p, top-k, min-p).
    The log probability of a prompt's first token is nan.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def likelihoods(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[Likelihood, ...]:
    """Returns the log probabilities of n tokens and of the `top` most likely tokens, given logits [n, V]."""
    log_p = logits[: len(tokens)].float().log_softmax(-1)
    chosen = upload(list(tokens), log_p.device)
    own = log_p.gather(1, chosen[:, None])[:, 0].tolist()
    values, ids = log_p.topk(min(top, log_p.shape[-1]), dim=-1)
    best = [
        tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return tuple(Likelihood(*values) for values in zip(tokens, own, best, strict=True))


@dataclass(frozen=True)
class Accepted:
    """Holds an accepted path of one sequence.

    path, tokens [A+1]: the accepted nodes, root first, and their tokens. ids [A+1]: `tokens` on the device. bonus: the
    token after the path. hidden [A+1, H * layers]: the hidden states of the path. extra_hidden [K, H]: those of the
    last node's extra rows (FIRP). likelihoods: the log probabilities of the new tokens, if requested.
    """

    path: list[int]
    tokens: list[int]
    ids: Tensor
    bonus: int
    hidden: Tensor
    extra_hidden: Tensor | None = None
    likelihoods: tuple[Likelihood, ...] = ()


@dataclass(frozen=True)
class Step:
    """Holds the tokens and the duration of one step, in which tokens are drafted, verified, accepted and kept.

    path: the accepted nodes, root first, of a tree of `nodes` nodes; () at prefill. draft_s, verify_s: seconds.
    looked_up: the number of draft tokens from n-gram matches. growth: None if the drafter's tree did not grow.
    """

    tokens: list[int]
    nodes: int = 1
    path: tuple[int, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0
    likelihoods: tuple[Likelihood, ...] = ()
    looked_up: int = 0
    growth: Growth | None = None

    @property
    def accepted(self) -> int:
        """Returns the number of the step's tokens in the answer, less the one that a plain step adds."""
        return len(self.tokens) - 1


@dataclass
class Stats:
    """Holds totals over steps; prefill time is counted separately."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    prefill_s: float = 0.0

    @classmethod
    def of(cls, steps: Iterable[Step]) -> "Stats":
        stats = cls()
        for step in steps:
            stats.add(step)
        return stats

    def add(self, step: Step) -> None:
        self.tokens += len(step.tokens)
        if not step.path:
            self.prefill_s += step.verify_s
            return
        self.steps += 1
        self.drafted += step.nodes - 1
        self.accepted += len(step.tokens) - 1
        self.draft_s += step.draft_s
        self.verify_s += step.verify_s

    def __iadd__(self, other: "Stats") -> "Stats":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.draft_s + self.verify_s

    @property
    def acceptance_length(self) -> float:
        """Returns the mean number of tokens per step after prefill, with the bonus token: 1.0 in plain decoding."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Returns the tokens per second, including prefill."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float:
        """Returns the mean duration of a step after prefill in seconds, including drafting."""
        return (self.draft_s + self.verify_s) / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Piece:
    """Holds text that a step added, either by its accepted draft tokens or by the token after them."""

    text: str
    accepted: bool


class Answer:
    """Holds an answer so far: its text, token ids, statistics and, on request, log probabilities.

    finish_reason: None until the answer ends, then "stop", "length" or "cancelled". A stop string
    is not part of the text, and text that may begin a stop string is held back. The first complete
    stop string ends the text. If one token completes several, the text ends before the earliest of them.
    `tokens` includes the tokens of a stop string and the end token. step: the last step, truncated
    after the token that completes a stop string. stops: the stop strings; several answers may share
    them. keep: special tokens that appear in the text, in addition to those in stop strings. ends:
    tokens that the text leaves out if they end the answer. include_stop: the text includes the stop
    string or end token. end_of: returns the position at which a given text ends the answer, or None.
    end_hidden: True if the text leaves out the last token because this token ended the answer.
    """

    def __init__(
        self,
        backbone: Backbone,
        stops: StopStrings | Sequence[str] = (),
        prompt_tokens: int = 0,
        keep: Collection[int] = (),
        *,
        ends: Collection[int] = (),
        include_stop: bool = False,
        end_of: Callable[[str], int | None] | None = None,
    ) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.likelihoods: list[Likelihood] = []
        self.finish_reason: str | None = None
        self.stats = Stats()
        self.prompt_tokens = prompt_tokens
        self.step = Step([])
        self.end_hidden = False
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(backbone, stops)
        named = self._stops.named
        self._stream = TextStream(backbone, {*keep, *named} if named else keep)
        self._ends = ends
        self._include_stop = include_stop
        self._end_of = end_of
        self._waiting: deque[Piece] = deque()
        # How many characters of the answer were read, and how many were shown.
        self._read = self._shown = 0
        self._state = 0  # of the automaton of the stop strings

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        count = len(self.tokens)
        return f"Answer({self.text!r}, {count} tokens, finish_reason={self.finish_reason!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Returns the results, without the model: a pickled answer can be read, but not continued."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def add(self, step: Step, finish_reason: str | None) -> list[Piece]:
        """Adds a step and the sequence's finish reason, which is None while the sequence continues.

        Returns the text that can be shown.
        """
        shown = step.tokens
        if finish_reason and shown and shown[-1] in self._ends:
            self.end_hidden = not self._include_stop or self._stream.hides(shown[-1])
        if self.end_hidden or (finish_reason == "stop" and self._is_named(shown[-1:])):
            shown = shown[:-1]
        last = len(step.tokens) - 1
        # A stop string may end at any token.
        by_token = self._stops or self._end_of
        parts = [[token] for token in shown] if by_token else [shown[:last], shown[last:]]
        taken = 0
        end = None
        for part in parts:
            taken += len(part)
            if part and (text := self._stream.add(part)):
                end = self._take(Piece(text, taken <= last))
            if end is not None:
                self.end_hidden = False
                step = truncated(step, taken)
                break
        self.step = step
        self.stats.add(step)
        self.tokens += step.tokens
        self.likelihoods += step.likelihoods
        return self._show(finish_reason, end)

    def cancel(self) -> list[Piece]:
        """Ends the answer unless it has already ended; returns the text that was held back."""
        return [] if self.finish_reason else self._show("cancelled")

    def _show(self, finish_reason: str | None, end: int | None = None) -> list[Piece]:
        """Returns the text that can be shown. end: the position at which a stop string ends the text."""
        if finish_reason and end is None and (last := self._stream.flush()):
            end = self._take(Piece(last, False))
        self.finish_reason = finish_reason
        if end is not None:
            self.finish_reason = "stop"
            shown = self._shown_until(end)
            self._waiting.clear()
        elif finish_reason:
            shown = self._shown_until(self._read)
        else:
            shown = self._shown_until(self._read - self._stops.automaton.depths[self._state])
        self.text += "".join(piece.text for piece in shown)
        return shown

    def _is_named(self, tokens: Sequence[int]) -> bool:
        """Returns True for an end token that is part of a stop string, so that the text would show it."""
        return not self._include_stop and not self._stops.named.isdisjoint(tokens)

    def _take(self, piece: Piece) -> int | None:
        """Reads a piece of text; returns the position at which the text ends, or None if it continues."""
        self._waiting.append(piece)
        start = self._read
        self._read += len(piece.text)
        automaton = self._stops.automaton
        ends = []
        for place, letter in enumerate(piece.text if self._stops else "", start + 1):
            self._state = automaton.step(self._state, letter)
            if length := automaton.matches[self._state]:
                ends.append(place if self._include_stop else place - length)
        if self._end_of is not None:
            end = self._end_of(self.text + "".join(waiting.text for waiting in self._waiting))
            ends += [] if end is None else [max(end, self._shown)]
        return min(ends, default=None)

    def _shown_until(self, end: int) -> list[Piece]:
        """Returns the waiting pieces before a position of the text. The pieces after it continue to wait."""
        shown = []
        while self._shown < end:
            piece = self._waiting.popleft()
            room = end - self._shown
            if len(piece.text) > room:
                self._waiting.appendleft(Piece(piece.text[room:], piece.accepted))
                piece = Piece(piece.text[:room], piece.accepted)
            self._shown += len(piece.text)
            shown.append(piece)
        return shown


def truncated(step: Step, count: int) -> Step:
    """Returns a step with only its first `count` tokens and their log probabilities."""
    cut = len(step.tokens) - count
    # A prefill step also has the log probabilities of the prompt.
    kept = step.likelihoods[: len(step.likelihoods) - cut]
    return replace(step, tokens=step.tokens[:count], likelihoods=kept)
