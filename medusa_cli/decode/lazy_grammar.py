"""Grammars that constrain only parts of an answer, such as the arguments of a call; a trigger begins each part."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import LogitsProcessor

from medusa_cli.decode.grammar import Grammar, allowed_by, masked, matcher_of
from medusa_cli.decode.ngram import shared_length
from medusa_cli.model import Backbone

if TYPE_CHECKING:
    from llguidance import LLMatcher

# A text trigger is looked for in this many of the last tokens.
WINDOW = 64


@dataclass(frozen=True)
class Trigger:
    """Begins a part of an answer that follows a grammar. The part ends as soon as its text is complete.

    token: the token that begins the part; None if a text that matches `pattern` begins the part.
    at_start: the text must begin the answer, or follow the previous part.
    """

    grammar: Grammar
    token: int | None = None
    pattern: str = ""
    at_start: bool = False


@dataclass(frozen=True)
class LazyGrammar:
    """Constrains the parts of an answer that triggers begin; other text is free."""

    triggers: tuple[Trigger, ...]

    def check(self, backbone: Backbone) -> None:
        """Compiles the grammars; raises UserError for a grammar that cannot be followed."""
        for trigger in self.triggers:
            matcher_of(backbone, trigger.grammar)


class _Part:
    """Holds a part of the answer that follows a grammar.

    first: a matcher at the beginning of the part. start: the number of tokens before the part.
    """

    def __init__(self, first: LLMatcher, start: int) -> None:
        self.first = first
        self.matcher = first.deep_copy()
        self.start = start
        self.length = 0  # tokens of the answer that the matcher has read

    def move_to(self, answer: list[int]) -> None:
        """Rolls the part back to the end of a shorter answer."""
        length = len(answer) - self.start
        if self.length <= length:
            return
        if not self.matcher.rollback(self.length - length):
            # Matchers of grammars that count tokens or end at a text cannot be rolled back.
            self.matcher = self.first.deep_copy()
            self.matcher.try_consume_tokens(answer[self.start :])
        self.length = length


@dataclass(frozen=True)
class _State:
    """Holds the state after some tokens of the answer: in `part`, or in free text that began at token `start`."""

    start: int
    part: _Part | None = None


class LazyGrammarProcessor(LogitsProcessor):
    """Sets logits to -inf for tokens that the grammar of the current part does not allow next.

    The states follow the answer in the text, and roll back when another path of a draft begins.
    Once a part exceeds a limit of llguidance, it is no longer constrained.
    """

    def __init__(self, backbone: Backbone, grammar: LazyGrammar, prompt_length: int) -> None:
        self._backbone = backbone
        self._prompt_length = prompt_length
        self._by_token = {
            trigger.token: trigger for trigger in grammar.triggers if trigger.token is not None
        }
        texts = [trigger for trigger in grammar.triggers if trigger.token is None]
        self._by_text: list[tuple[Trigger, Callable[[str], re.Match[str] | None]]] = [
            (trigger, pattern.match if trigger.at_start else pattern.search)
            for trigger, pattern in ((trigger, re.compile(trigger.pattern)) for trigger in texts)
        ]
        self._anywhere = any(not trigger.at_start for trigger in texts)
        self._answer: list[int] = []
        # The states after 0, 1, 2, .. tokens of the answer.
        self._states = [_State(0)]

    def fork(self) -> LazyGrammarProcessor:
        """Returns a processor for another sequence with the same prompt and no answer yet."""
        other = copy.copy(self)
        other._answer = []
        other._states = [_State(0)]
        return other

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the masked logits [1, V] after the text [1, L]."""
        part = self._read(input_ids)
        if part is None or part.matcher.is_error():
            return scores
        allowed = allowed_by(part.matcher, scores.shape[-1])
        return scores if part.matcher.is_error() else masked(scores, allowed)

    def cuts_off(self, text: Tensor) -> bool:
        """Returns False: no limit of llguidance ends the answer."""
        return False

    def forced(self, text: Tensor) -> list[int]:
        """Returns the tokens that must follow the text [1, L]."""
        part = self._read(text)
        return [] if part is None else list(part.matcher.compute_ff_tokens())

    def _read(self, text: Tensor) -> _Part | None:
        """Advances the states to the end of a text [1, L]; returns the part in which the text ends, or None."""
        answer: list[int] = text[0, self._prompt_length :].tolist()
        shared = shared_length(answer, self._answer)
        if shared < len(self._answer):
            del self._states[shared + 1 :]
            if (part := self._states[-1].part) is not None:
                part.move_to(answer[:shared])
        self._answer = answer
        for end in range(shared + 1, len(answer) + 1):
            self._states.append(self._next(self._states[-1], end))
        return self._states[-1].part

    def _next(self, state: _State, end: int) -> _State:
        """Returns the state after the answer's first `end` tokens. state: the state before the last of them."""
        token = self._answer[end - 1]
        part = state.part
        if part is not None:
            if not part.matcher.try_consume_tokens([token]):
                return _State(end)
            part.length += 1
            return _State(end) if part.matcher.is_accepting() else state
        if (trigger := self._by_token.get(token)) is not None:
            return self._begin(trigger, "", end) or _State(end)
        if not self._anywhere and end - state.start > WINDOW:
            return state
        window = self._answer[max(state.start, end - WINDOW - 1) : end]
        before = self._backbone.tokenizer.decode(window[:-1])
        text = self._backbone.tokenizer.decode(window)
        for trigger, find in self._by_text:
            if trigger.at_start and end - state.start > WINDOW:
                continue
            match = find(text)
            if match and match.end() > len(before):
                return self._begin(trigger, text[match.end() :], end) or state
        return state

    def _begin(self, trigger: Trigger, rest: str, end: int) -> _State | None:
        """Returns the state in a new part. rest: the part's first text, which the trigger's last token contains.

        Returns None if the grammar does not allow that text.
        """
        matcher = matcher_of(self._backbone, trigger.grammar).deep_copy()
        tokens = self._backbone.tokenizer.encode(rest, add_special_tokens=False) if rest else []
        if matcher.try_consume_tokens(tokens) < len(tokens) or matcher.is_error():
            return None
        return _State(end) if matcher.is_accepting() else _State(end, _Part(matcher, end))
