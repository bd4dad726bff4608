"""A request, the sequence that answers it in a slot of the cache, and the criteria that stop it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from torch import Tensor

from medusa_cli.decode.policy import DraftState
from medusa_cli.decode.sampling import Sampler, Sampling
from medusa_cli.decode.stats import Likelihood, likelihoods
from medusa_cli.drafters.base import Drafter, NewTokens, concat
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone


@dataclass(frozen=True)
class Request:
    """Asks for the continuation of a prompt of token ids.

    stop_ids: end tokens, None for the model's own. top: how many of the likeliest tokens to report beside each token,
    None for no log probabilities. reuse: how many of the prompt's first tokens cached rows may serve, None for all.
    """

    prompt: Several[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: Iterable[int] | None = None
    stop_strings: Several[str] = ()
    top: int | None = None
    reuse: int | None = None


class StopCriteria:
    """Truncates new tokens at the first stop token, stop string or limit; `reason` is then "stop" or "length".

    Raises UsageError for a limit below 1, UserError for a prompt that is empty or fills the context.
    """

    def __init__(self, backbone: Backbone, request: Request) -> None:
        length = len(request.prompt)
        if request.max_new_tokens < 1:
            raise UsageError(f"@max_new_tokens {request.max_new_tokens} is too small", "use 1 or more")
        if not length:
            raise UserError("the prompt is empty", "give at least one token")
        if length >= backbone.max_positions:
            raise UserError(
                f"the prompt has {length:,} tokens, {backbone.id!r} has a context of {backbone.max_positions:,}",
                "shorten the prompt or clear the history",
            )
        self._stop_ids = backbone.eos_ids if request.stop_ids is None else frozenset(request.stop_ids)
        self._strings = [text for text in request.stop_strings if text]
        self._tokenizer = backbone.tokenizer
        self._tokens: list[int] = []
        self._left = min(request.max_new_tokens, backbone.max_positions - length)
        self.reason: str | None = None

    def truncate(self, tokens: Several[int]) -> list[int]:
        """Returns the tokens that belong to the answer, the one that ends it included."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self._tokens.append(token)
            self._left -= 1
            if token in self._stop_ids or (self._strings and self._has_stop_string()):
                self.reason = "stop"
            elif self._left <= 0:
                self.reason = "length"
            if self.reason:
                break
        return kept

    def _has_stop_string(self) -> bool:
        # A string of n bytes ends within its last n tokens or so; special tokens add no text, hence the margin.
        tail = self._tokens[-(max(len(text.encode()) for text in self._strings) + 8) :]
        # A stop string may be a special token, or end in one.
        texts = [self._tokenizer.decode(tail, skip_special_tokens=skip) for skip in (True, False)]
        return any(stop in text for stop in self._strings for text in texts)


class Sequence:
    """A prompt and its answer so far, in one slot of the cache.

    tokens: those whose rows are in the slot; the root comes next and has no row yet. drafter: a fork with this
    sequence's state. draft: what the draft policy knows of it. reused: tokens of the prompt that the slot held before.
    `number` selects the random stream.
    """

    def __init__(self, backbone: Backbone, request: Request, number: int, draft: DraftState) -> None:
        self.request, self.number, self.draft = request, number, draft
        self.stop = StopCriteria(backbone, request)
        self.sampler = Sampler(request.sampling, number)
        self.tokens = list(request.prompt)
        self.drafter: Drafter | None = None
        self.drafter_up_to_date = False  # the drafter has read all pending tokens
        self.pending_tokens: list[NewTokens] = []
        self.reused = 0
        self.cancelled = False

    @property
    def root(self) -> int:
        """Returns the next token, decided but not yet in the cache."""
        return self.pending_tokens[-1].root

    @property
    def pending(self) -> NewTokens:
        """Returns the tokens that the drafter has not read, in one piece."""
        if len(self.pending_tokens) > 1:
            self.pending_tokens = [concat(self.pending_tokens)]
        return self.pending_tokens[0]

    @property
    def finish_reason(self) -> str | None:
        return self.stop.reason

    @property
    def done(self) -> bool:
        return self.cancelled or self.stop.reason is not None

    def start(self, slot_holds: int, drafter: Drafter | None, pending: Several[NewTokens], new: NewTokens) -> None:
        """Takes the prefill: `new` follows what the slot held and what its drafter has not read of that."""
        self.reused, self.drafter = slot_holds, drafter
        self.pending_tokens = [*pending, new if drafter is None else drafter.first_input(new)]

    def commit(self, new: NewTokens) -> list[int]:
        """Takes the accepted path of a step; returns the tokens it adds after the old root, the bonus token last."""
        accepted = new.tokens.tolist()
        self.tokens += accepted
        if self.drafter_up_to_date or self.drafter is None:
            self.pending_tokens, self.drafter_up_to_date = [], False
        self.pending_tokens.append(new)
        return [*accepted[1:], new.root]

    def likelihoods(self, logits: Tensor | None, tokens: Several[int]) -> tuple[Likelihood, ...]:
        """Returns those of new tokens, by the logits [n, V] they came from, if the request asks for them."""
        top = self.request.top
        return () if top is None or logits is None else likelihoods(logits, tokens, top)
