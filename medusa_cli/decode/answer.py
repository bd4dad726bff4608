"""Results of decoding steps: statistics, log probabilities and the text of an answer so far."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medusa_cli.device import upload
from medusa_cli.model import Backbone
from medusa_cli.tree import Growth

# Tokenizers decode the bytes of an incomplete character to this.
REPLACEMENT = "\ufffd"
# After this many tokens on one line, text decoding restarts from a later token.
MAX_LINE_TOKENS = 256


@dataclass(frozen=True)
class Likelihood:
    """Holds the model's log probabilities of a token and of the most likely tokens.

    They are computed before logits processors, temperature and truncation (top-p, top-k, min-p).
    The log probability of a prompt's first token is nan.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def likelihoods(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[Likelihood, ...]:
    """Returns the log probabilities of n tokens and of the `top` most likely ones, given logits [n, V]."""
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

    path, tokens [A+1]: the accepted nodes, root first, and their tokens. ids [A+1]: the tokens on
    the device. bonus: the token after them. hidden [A+1, H * layers]: the hidden states of the
    path. extra_hidden [K, H]: the extra rows of the last node (FIRP). likelihoods: those of the new
    tokens, if requested.
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

    path: the accepted nodes, root first, of a tree of `nodes` nodes; () at prefill. draft_s,
    verify_s: seconds. looked_up: the number of draft tokens from n-gram matches. growth: of the
    drafter's tree, if it grew.
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
        """Returns the number of tokens beyond the one that plain decoding adds, up to the end of the answer."""
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
        """Returns the mean number of tokens per verified step, including the bonus token.

        It is 1.0 for plain decoding.
        """
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Returns the tokens per second, including prefill."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float:
        """Returns the mean duration of a verified step in seconds, including drafting."""
        return (self.draft_s + self.verify_s) / self.steps if self.steps else 0.0


class TextStream:
    """Converts new token ids to the text that they add.

    Bytes of an incomplete character are held back until the rest arrives. All parts together equal
    the text of all ids decoded at once. keep: special tokens that appear in the text.
    """

    def __init__(self, backbone: Backbone, keep: Collection[int] = ()) -> None:
        self._decode = partial(backbone.decode, keep=keep) if keep else backbone.decode
        self._ids: list[int] = []
        # Tokens before `_start` are done. Those up to `_line` are decoded again together with later
        # ones. Llama decoders strip a leading blank from the text that they decode, and this must
        # not be the first blank of a line.
        self._start = self._line = 0
        self._shown = 0  # number of characters returned since `_start`

    def add(self, ids: Sequence[int]) -> str:
        """Returns the text that these ids add."""
        self._ids += ids
        text = self._decode(self._ids[self._start :])
        if text.endswith(REPLACEMENT):
            return ""
        new = text[self._shown :]
        self._shown = len(text)
        if new.endswith("\n") or len(self._ids) - self._line >= MAX_LINE_TOKENS:
            # The end of a line is a safe place to restart. This avoids decoding a long answer again
            # for every step.
            self._start = self._line
            self._line = len(self._ids)
            self._shown = len(self._decode(self._ids[self._start :]))
        return new

    def flush(self) -> str:
        """Returns the text that is still held back at the end of the answer."""
        return self._decode(self._ids[self._start :])[self._shown :]


@dataclass(frozen=True)
class Piece:
    """Holds text that a step added, either by its accepted draft tokens or by the token after them."""

    text: str
    accepted: bool


class Answer:
    """Holds an answer so far: its text, token ids, statistics and, on request, log probabilities.

    finish_reason: None until the answer ends, then "stop", "length" or "cancelled". A stop string
    is not part of the text; text that may begin one is held back. `tokens` includes the tokens of a
    stop string and the end token. step: the last step, truncated after the token that completes a
    stop string. keep: special tokens that appear in the text, in addition to those in stop strings.
    ends: tokens that are left out of the text if one of them ends the answer. include_stop: the
    text includes the stop string or end token. end_of: returns the position at which a text ends
    the answer, if it does.
    """

    def __init__(
        self,
        backbone: Backbone,
        stop_strings: Sequence[str] = (),
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
        self._stops = [text for text in stop_strings if text]
        named = special_tokens_in(backbone, self._stops) if self._stops else set()
        self._stream = TextStream(backbone, {*keep, *named})
        self._ends = set() if include_stop else {*ends, *named}
        self._include_stop = include_stop
        self._end_of = end_of
        self._waiting: list[Piece] = []

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        count = len(self.tokens)
        return f"Answer({self.text!r}, {count} tokens, finish_reason={self.finish_reason!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Returns the results, without the model: a pickled answer can be read and not continued."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def add(self, step: Step, finish_reason: str | None) -> list[Piece]:
        """Adds a step and the sequence's finish reason, which is None while the sequence continues.

        Returns the text that can be shown.
        """
        shown = step.tokens
        if finish_reason == "stop" and shown and shown[-1] in self._ends:
            shown = shown[:-1]
        last = len(step.tokens) - 1
        # A stop string may end at any token.
        by_token = self._stops or self._end_of
        parts = [[token] for token in shown] if by_token else [shown[:last], shown[last:]]
        taken = 0
        for part in parts:
            taken += len(part)
            if part and (text := self._stream.add(part)):
                self._waiting.append(Piece(text, taken <= last))
            if self._end(self._waiting) is not None:
                step = truncated(step, taken)
                break
        self.step = step
        self.stats.add(step)
        self.tokens += step.tokens
        self.likelihoods += step.likelihoods
        return self._show(finish_reason)

    def cancel(self) -> list[Piece]:
        """Ends the answer unless it has already ended; returns the text that was held back."""
        return [] if self.finish_reason else self._show("cancelled")

    def _show(self, finish_reason: str | None) -> list[Piece]:
        if finish_reason and (last := self._stream.flush()):
            self._waiting.append(Piece(last, False))
        shown = self._waiting
        self._waiting = []
        self.finish_reason = finish_reason
        end = self._end(shown)
        if end is not None:
            shown, _ = split(shown, end)
            self.finish_reason = "stop"
        elif self._stops and not finish_reason:
            text = "".join(piece.text for piece in shown)
            partial = max(partial_stop(text, stop) for stop in self._stops)
            shown, self._waiting = split(shown, len(text) - partial)
        self.text += "".join(piece.text for piece in shown)
        return shown

    def _end(self, pieces: Sequence[Piece]) -> int | None:
        """Returns the position at which a stop string ends the text of these pieces, or None if there is none."""
        text = "".join(piece.text for piece in pieces)
        starts = [(text.find(stop), stop) for stop in self._stops]
        ends = [start + len(stop) * self._include_stop for start, stop in starts if start >= 0]
        if self._end_of and (end := self._end_of(self.text + text)) is not None:
            ends.append(max(0, end - len(self.text)))
        return min(ends, default=None)


def truncated(step: Step, count: int) -> Step:
    """Returns a step with only its first `count` tokens and their log probabilities."""
    cut = len(step.tokens) - count
    # A prefill step also has the log probabilities of the prompt.
    kept = step.likelihoods[: len(step.likelihoods) - cut]
    return replace(step, tokens=step.tokens[:count], likelihoods=kept)


def special_tokens_in(backbone: Backbone, texts: Sequence[str]) -> set[int]:
    """Returns the special tokens that occur in one of these texts."""
    added = backbone.tokenizer.added_tokens_decoder.items()
    return {
        id for id, token in added if token.special and any(token.content in text for text in texts)
    }


def partial_stop(text: str, stop: str) -> int:
    """Returns the number of characters at the end of a text that may begin a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


def split(pieces: Sequence[Piece], length: int) -> tuple[list[Piece], list[Piece]]:
    """Splits pieces after `length` characters."""
    first: list[Piece] = []
    rest: list[Piece] = []
    for piece in pieces:
        before = piece.text[: max(0, length)]
        after = piece.text[max(0, length) :]
        first += [Piece(before, piece.accepted)] if before else []
        rest += [Piece(after, piece.accepted)] if after else []
        length -= len(piece.text)
    return first, rest
