"""Grammars that an answer must follow: JSON schemas, regular expressions, Lark and GBNF grammars, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from medusa_cli.assets import need_extra
from medusa_cli.decode.ngram import shared_length
from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.model import Backbone

if TYPE_CHECKING:
    from llguidance import LLMatcher

# One way of writing JSON, the one that models write most: free whitespace lets small models write blanks for ever, and
# forces fewer tokens.
WHITESPACE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
KINDS = ("json_schema", "regex", "grammar")
ANY_OBJECT = {"type": "object"}
# Keywords of JSON schemas whose values are no schemas, those whose values are schemas by name, and those that combine.
VALUES = {"enum", "const", "default", "examples", "required"}
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
COMBINING = {"allOf", "anyOf", "oneOf", "$ref"}
CACHED_GRAMMARS = 128
# The parsers of grammars are recursive, over brackets and over rules: a chain of 1,000 references ends the process.
MAX_NESTING, MAX_RULES = 100, 250


@dataclass(frozen=True)
class Grammar:
    """Constrains an answer. kind: "json_schema", "regex" or "grammar" (Lark or GBNF); text: its source."""

    kind: str
    text: str

    @classmethod
    def of(cls, **sources: Any) -> Grammar | None:
        """Returns the grammar that is given by its kind, None for none; a JSON schema may be a dict.

        Raises UsageError for more than one, and for a schema that is no JSON object.
        """
        given = {kind: source for kind, source in sources.items() if source is not None}
        if not given:
            return None
        kind, source = next(iter(given.items()))
        if len(given) > 1:
            raise UsageError(f"@{kind} and @{list(given)[1]} constrain one answer", "leave one of them out")
        if kind != "json_schema":
            if not isinstance(source, str) or not source.strip():
                raise UsageError(f"@{kind} is empty or no text", "give its source")
            check_size(kind, source, max(source.count("\n"), source.count("::=")))
            return cls(kind, source)
        try:
            schema = json.loads(source) if isinstance(source, str | bytes) else source
            if not isinstance(schema, dict):
                raise TypeError("no JSON object")
            text = json.dumps(closed(schema))
        except (ValueError, TypeError, RecursionError) as reason:
            raise UsageError(f"@json_schema is not valid: {first_line(reason)}", "give a JSON object") from reason
        check_size(kind, text, text.count('"$ref"'))
        return cls(kind, text)


def check_size(kind: str, source: str, rules: int) -> None:
    """Raises UsageError for a source with too many brackets at once or too many rules for recursive parsers."""
    if max(accumulate((letter in "([{") - (letter in ")]}") for letter in source)) > MAX_NESTING:
        raise UsageError(f"@{kind} is nested too deeply", f"use at most {MAX_NESTING} brackets at once")
    if rules > MAX_RULES and kind != "regex":
        raise UsageError(f"@{kind} has {rules} rules or references", f"use at most {MAX_RULES}")


def inline(schema: Mapping[str, Any]) -> str:
    """Returns a JSON schema as the body of a rule in Lark's form."""
    return f"%json {json.dumps({**schema, 'x-guidance': WHITESPACE})}"


def closed(schema: Any) -> Any:
    """Returns a JSON schema whose objects have no properties but those that it names, unless it asks for others.

    Schemas leave `additionalProperties` out, and mean none: small models would write more and more of them.
    """
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict) or "allOf" in schema or ("properties" in schema and COMBINING & schema.keys()):
        return schema
    result = {}
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            result[key] = {name: closed(part) for name, part in value.items()}
        else:
            result[key] = value if key in VALUES else closed(value)
    others = {"additionalProperties", "unevaluatedProperties", "patternProperties"}
    return result if "properties" not in schema or others & schema.keys() else {**result, "additionalProperties": False}


class GrammarCompiler:
    """Compiles grammars over the vocabulary of one tokenizer, and keeps the latest ones.

    Raises UserError without llguidance, and for a tokenizer that it cannot read.
    """

    def __init__(self, backbone: Backbone) -> None:
        need_extra("grammar", "an answer by a grammar")
        from llguidance.hf import from_tokenizer

        try:
            self._tokenizer = from_tokenizer(backbone.tokenizer, backbone.vocab_size, sorted(backbone.eos_ids) or None)
        except Exception as reason:  # of a library that reads any file
            text = f"grammars cannot be followed with the tokenizer of {backbone.id!r}: {first_line(reason)}"
            raise UserError(text, "use a model with a byte-level or SentencePiece tokenizer.json") from reason
        self.matcher = lru_cache(CACHED_GRAMMARS)(self._matcher)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        """Returns a matcher at the beginning of a grammar, for its callers to copy; raises UsageError for a bad one."""
        from llguidance import LLMatcher, grammar_from

        try:
            if grammar.kind == "json_schema":
                source = LLMatcher.grammar_from_json_schema(grammar.text, overrides=WHITESPACE)
            elif grammar.kind == "regex":
                source = LLMatcher.grammar_from_regex(grammar.text)
            else:
                source = grammar_from("grammar", grammar.text)
            matcher = LLMatcher(self._tokenizer, source, log_level=0)
            fault = matcher.get_error()
            if not fault:
                first = matcher.deep_copy()
                first.compute_bitmask()
                fault = first.get_error() and "no text follows it, or it is too large"
        except Exception as reason:  # of the reader of GBNF
            fault = str(reason)
        if fault:
            text = " ".join(fault.split("\n   1 |")[0].split())
            raise UsageError(f"@{grammar.kind} cannot be followed: {text}", "correct it, or leave that part out")
        return matcher


_compilers: WeakKeyDictionary[Backbone, GrammarCompiler] = WeakKeyDictionary()


def matcher_of(backbone: Backbone, grammar: Grammar) -> LLMatcher:
    """Returns a grammar's compiled matcher, which must be copied before it is moved.

    Raises UsageError for a grammar that cannot be followed, UserError where the model or this machine cannot.
    """
    if backbone not in _compilers:
        _compilers[backbone] = GrammarCompiler(backbone)
    return _compilers[backbone].matcher(grammar)


class GrammarProcessor(LogitsProcessor):
    """Sets the logits of tokens that the grammar does not allow next to -inf.

    The matcher follows the answer in the text, and goes back where another path of a draft begins. Where one text alone
    may follow, llguidance allows only the tokens that the tokenizer would write it with.
    """

    def __init__(self, matcher: LLMatcher, prompt_length: int, stop_ids: Iterable[int]) -> None:
        self._matcher, self._prompt_length, self._stop_ids = matcher, prompt_length, list(stop_ids)
        self._answer: list[int] = []  # the tokens that the matcher has read

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns logits [1, V] after the text [1, L]. A text that the grammar does not allow changes nothing."""
        if not self._read(input_ids) and not self._matcher.is_error():
            return scores
        # Beyond the limits of grammars the mask allows nothing but the end.
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, count=scores.shape[-1], bitorder="little")).bool()
        if self._stop_ids and self._matcher.is_accepting():
            allowed[self._stop_ids] = True
        forbidden = ~allowed.to(scores.device)
        masked = scores.masked_fill(forbidden, -torch.inf)
        if masked.max() == -torch.inf:  # other processors forbid all that the grammar allows
            return torch.zeros_like(scores).masked_fill(forbidden, -torch.inf)
        return masked

    @property
    def exhausted(self) -> bool:
        """Returns True once the answer went beyond the library's limits, after which the end alone is allowed."""
        return bool(self._matcher.is_error())

    def forced(self, text: Tensor) -> list[int]:
        """Returns the only tokens that may follow the text [1, L], the end among them."""
        if not self._read(text):
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._answer += tokens[: self._matcher.try_consume_tokens(tokens)]
        return tokens + self._stop_ids[:1] if self._matcher.is_stopped() else tokens

    def _read(self, text: Tensor) -> bool:
        """Moves the matcher to the end of a text [1, L]; returns False if the grammar does not allow the text."""
        answer, read = text[0, self._prompt_length :].tolist(), self._answer
        shared = shared_length(answer, read)
        if shared < len(read):
            self._matcher.rollback(len(read) - shared)
        count = shared + self._matcher.try_consume_tokens(answer[shared:])
        self._answer = answer[:count]
        return count == len(answer)
