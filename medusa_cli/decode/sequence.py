"""Requests, the sequences that answer them in the slots of a cache, and stop criteria."""

from __future__ import annotations

import copy
from collections import abc
from dataclasses import dataclass

from medusa_cli.decode.answer import Accepted
from medusa_cli.decode.ngram import AcceptanceEstimate, NgramIndex
from medusa_cli.decode.processors import MODELS_OWN, LogitsOptions, sequence_processors
from medusa_cli.decode.sampler import Sampler
from medusa_cli.decode.sampling_options import Sampling
from medusa_cli.drafters.base import Drafter, NewTokens, concat
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone


@dataclass(frozen=True)
class Request:
    """Asks for the continuation of a prompt of token ids.

    stop_ids: end tokens; None selects those of the model. stop_strings: `Answer` finds them, and its caller then
    cancels the sequence. top: the number of most likely tokens to report with each token; None reports no log
    probabilities. reuse: the number of the prompt's first tokens whose rows may come from the cache; None means all.
    prompt_logprobs: also report the log probabilities of the prompt; max_new_tokens may then be 0. speculative: False
    selects plain decoding. Log probabilities are those before logits_options and temperature, as in the OpenAI API and
    vLLM.
    """

    prompt: abc.Sequence[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: abc.Iterable[int] | None = None
    stop_strings: abc.Sequence[str] = ()
    top: int | None = None
    reuse: int | None = None
    logits_options: LogitsOptions = MODELS_OWN
    prompt_logprobs: bool = False
    speculative: bool = True

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs and self.top is not None


class StopCriteria:
    """Truncates new tokens at the first stop token or at the limit; `Answer` finds stop strings.

    reason: None until the answer ends, then "stop" or "length". left: the number of tokens that may still follow.

    Raises UsageError for a limit below 1, or below 0 with prompt_logprobs. Raises UserError for a
    prompt that is empty or fills the context.
    """

    def __init__(self, backbone: Backbone, request: Request) -> None:
        length = len(request.prompt)
        fewest = 0 if request.prompt_logprobs else 1
        if request.max_new_tokens < fewest:
            fault = f"@max_new_tokens {request.max_new_tokens} is too small"
            raise UsageError(fault, f"use {fewest} or more")
        if not length:
            raise UserError("the prompt is empty", "give at least one token")
        if length >= backbone.max_positions:
            fault = f"the prompt has {length:,} tokens, {backbone.id!r} has a context of {backbone.max_positions:,}"
            raise UserError(fault, "shorten the prompt or clear the history")
        self.stop_ids = (
            backbone.eos_ids if request.stop_ids is None else frozenset(request.stop_ids)
        )
        self.left = min(request.max_new_tokens, backbone.max_positions - length)
        self.reason: str | None = None

    def truncate(self, tokens: abc.Sequence[int]) -> list[int]:
        """Returns the tokens that belong to the answer, including the stop token."""
        kept: list[int] = []
        for token in tokens[: self.left]:
            kept.append(token)
            if token in self.stop_ids:
                self.reason = "stop"
                break
        self.left -= len(kept)
        if not self.left:
            self.reason = self.reason or "length"
        return kept


@dataclass
class DraftState:
    """Holds a policy's state for one sequence: the acceptance estimate and the n-gram index.

    speculative: False for a sequence that drafts nothing.
    """

    acceptance: AcceptanceEstimate | None = None
    ngrams: NgramIndex | None = None
    speculative: bool = True


class Sequence:
    """Holds a prompt and its answer so far, in one slot of the cache.

    A finished sequence is the cached prefix of its slot. tokens: those whose rows are in the slot. root: the next
    token, which is decided but not yet in the cache. drafter: a fork with this sequence's state. prefilled: the prompt
    has been run. unread: the tokens that the drafter has not read: only those of the last step, unless the drafter
    reads every step. read: the number of tokens up to the last token that the drafter has read. missed: the states of
    tokens before the unread tokens were not kept. draft: the draft policy's state for the sequence. reused: the number
    of prompt tokens that the slot already held. longest: the maximum length of prompt and answer. taken_at: the time
    when the sequence got its slot. restored: the number of prompt tokens from the store. stored: the keys of the blocks
    that the store has, from the store's root on. stored_prompt: the store has the running states after the prompt.
    `number` selects the random stream.
    """

    root: int

    def __init__(self, backbone: Backbone, request: Request, number: int = 0) -> None:
        self.request = request
        self.number = number
        self.draft = DraftState()
        self.stop = StopCriteria(backbone, request)
        self.longest = len(request.prompt) + self.stop.left
        # transformers requires at least one new token, even if the prompt is only scored.
        length = max(1, self.stop.left)
        processors = sequence_processors(
            backbone,
            request.prompt,
            length,
            self.stop.stop_ids,
            request.sampling,
            request.logits_options,
        )
        self.sampler = Sampler(request.sampling, number, processors)
        self.prefilled = False
        self.tokens: list[int] = []
        self.drafter: Drafter | None = None
        self.unread: list[NewTokens] = []
        self.read = 0
        self.missed = False
        self.reused = 0
        self.taken_at = 0.0
        self.restored = 0
        self.stored: list[str] = []
        self.stored_prompt = False

    @property
    def finish_reason(self) -> str | None:
        """Returns "stop", "length" or "cancelled", or None while the answer continues.

        The reason is also "length" if a limit of the grammar library cut the answer off.
        """
        processors = self.sampler.processors
        cut_off = self.stop.reason == "stop" and processors is not None and processors.exhausted
        return "length" if cut_off else self.stop.reason

    @property
    def done(self) -> bool:
        return self.stop.reason is not None

    @property
    def decoding(self) -> bool:
        """Returns True if prefill is complete and the answer continues."""
        return not self.stop.reason and self.prefilled

    def fork(self, request: Request) -> Sequence:
        """Returns a sequence for a request that differs only in its seed, before any prefill; both share processors."""
        other = copy.copy(self)
        other.request = request
        other.stop = copy.copy(self.stop)
        processors = self.sampler.processors
        other.sampler = Sampler(
            request.sampling, self.number, None if processors is None else processors.fork()
        )
        other.draft = DraftState()
        other.tokens = []
        other.unread = []
        other.stored = []
        return other

    def cancel(self) -> None:
        """Ends the answer at its current length, unless it has already ended."""
        self.stop.reason = self.stop.reason or "cancelled"

    def reuse_prefix(self, held: Sequence | None, shared: int, drafter: Drafter | None) -> None:
        """Takes over the first `shared` tokens of the finished sequence `held` in a slot.

        If the drafter has to read only the last of these tokens again, one token less is taken over.
        If it has to read more tokens, it reads the text's last tokens before its next draft.

        The method may be called again with a smaller number.
        """
        self.unread = []
        self.missed = False
        if drafter is not None:
            own = held if shared else None
            self.drafter = drafter.fork() if own is None or own.drafter is None else own.drafter
            known = self.drafter.truncate(shared)
            waiting = [] if own is None else own.unread
            if waiting and waiting[0].start < shared <= waiting[-1].end and known < shared:
                self.unread = [concat(waiting).part(max(known, waiting[0].start), shared)]
            elif known == shared - 1:
                shared = known
            else:
                self.missed = known < shared
            self.read = known
        self.reused = shared
        self.tokens = list(self.request.prompt[:shared])

    def finish_prefill(self, new: NewTokens, keep_states: bool = True) -> list[int]:
        """Records the rest of the prompt; returns the first token of the answer."""
        if keep_states:
            new = new if self.drafter is None else self.drafter.first_input(new)
            if self.unread and self.unread[-1].end < new.start:
                self.unread = []
            self.unread.append(new)
        else:
            self._miss()
        self.root = new.root
        return self.stop.truncate([new.root])

    def _miss(self) -> None:
        self.unread = []
        self.missed = True

    def take_unread_part(self, count: int) -> NewTokens | None:
        """Returns the first `count` of the drafter's unread tokens, and marks them as read.

        Returns None if there are at most `count` unread tokens.
        """
        if not self.unread:
            return None
        new = self.unread[0] if len(self.unread) == 1 else concat(self.unread)
        if len(new.tokens) <= count:
            return None
        self.unread = [new.part(new.start + count, new.end)]
        self.read = new.start + count
        return new.part(new.start, new.start + count)

    def take_unread(self) -> NewTokens:
        """Returns the drafter's unread tokens as one record, and marks them as read."""
        new = self.unread
        self.unread = []
        self.read = new[-1].end
        return concat(new) if len(new) > 1 else new[0]

    def commit(self, accepted: Accepted, keep_states: bool = True) -> list[int]:
        """Records an accepted path; returns the new tokens, with the bonus token last."""
        new = NewTokens(
            accepted.ids, accepted.hidden, accepted.bonus, len(self.tokens), accepted.extra_hidden
        )
        self.tokens += accepted.tokens
        self.root = accepted.bonus
        # A drafter that reads every step may draft in the conversation's next turn, even if this
        # request is decoded plainly.
        if not keep_states:
            self._miss()
        elif self.drafter is not None and self.drafter.reads_every_step:
            self.unread.append(new)
        else:
            self.unread = [new]
        return self.stop.truncate([*accepted.tokens[1:], accepted.bonus])
