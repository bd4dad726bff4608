"""Grammars that constrain answers: JSON schemas, regular expressions, Lark and GBNF, followed with llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from medusa_cli.decode.ngram import shared_length
from medusa_cli.decode.schema_rewriting import followable
from medusa_cli.errors import UsageError, UserError, first_line, shown
from medusa_cli.files.extras import has_package, need_extra
from medusa_cli.model import Backbone

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# JSON answers may have only the whitespace that models write most often. With free whitespace, small
# models may write blanks forever, and the grammar forces fewer tokens. An answer under `oneOf`
# matches at least one of the listed schemas; whether it also matches another is not checked.
JSON_OPTIONS: Any = {
    **{"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    **{"coerce_one_of": True},
}
KINDS = ("json_schema", "regex", "grammar")
ANY_OBJECT = {"type": "object"}
# JSON Schema keywords whose values are not schemas, and keywords whose values map names to schemas.
VALUES = {"enum", "const", "default", "examples", "required"}
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
CONTAINERS = {"properties", "patternProperties", "additionalProperties", "items", "type", "allOf"}
# Keywords that define the properties of an object. If a schema has two of these keywords, they must
# agree on the properties.
SHAPING = ("properties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")
DEMANDING = ("required", "minProperties")
CACHED_GRAMMARS = 128
PRIVATE = "\ue000"  # a private-use character, which texts do not contain
# Grammar parsers recurse over brackets and over rules: a chain of 1,000 references crashes the
# process.
MAX_NESTING = 100
MAX_RULES = 250
MAX_SCHEMA = 1_000_000


@dataclass(frozen=True)
class Grammar:
    """Constrains an answer. kind: "json_schema", "regex" or "grammar" (Lark or GBNF).

    text: the source of the grammar.
    """

    kind: str
    text: str

    @classmethod
    def of(cls, **sources: Any) -> Grammar | None:
        """Returns the grammar of the one source that is not None. The argument's name is the grammar's kind.

        Returns None without a source. A JSON schema may be a dict. Raises UsageError for more than
        one source, for an empty source, and for a schema that is not a JSON object.
        """
        given = {kind: source for kind, source in sources.items() if source is not None}
        if not given:
            return None
        kind, source = next(iter(given.items()))
        if len(given) > 1:
            fault = f"@{kind} and @{list(given)[1]} constrain one answer"
            raise UsageError(fault, "leave one of them out")
        if kind != "json_schema":
            if not isinstance(source, str) or not source.strip():
                raise UsageError(f"@{kind} is empty or not text", "give its source")
            check_size(kind, source, max(source.count("\n"), source.count("::=")))
            return cls(kind, source)
        return schema_grammar(source)


def schema_grammar(source: Any, owner: str = "@json_schema") -> Grammar:
    """Returns the grammar of a JSON schema, which may be a dict.

    owner: the name of the schema in error messages. Raises UsageError, with the owner, the property and
    the keyword, if the schema cannot be followed.
    """
    try:
        schema = json.loads(source) if isinstance(source, str | bytes) else source
        if not isinstance(schema, dict):
            raise TypeError("no JSON object")
        if len(json.dumps(schema)) > MAX_SCHEMA:
            raise ValueError(f"it has more than {MAX_SCHEMA:,} characters")
        followed = closed(followable(schema, owner))
        text = json.dumps(followed)
    except (ValueError, TypeError, AttributeError, RecursionError) as reason:
        raise UsageError(
            f"{owner} is not valid: {first_line(reason)}", "give a JSON object"
        ) from reason
    check_size(owner[1:], text, text.count('"$ref"'))
    if has_package("llguidance") and (fault := fault_of(text)):
        raise UsageError(
            f"{owner}{_place_of_fault(followed, fault)}",
            "express it in another way, or leave it out",
        )
    return Grammar("json_schema", text)


@lru_cache(CACHED_GRAMMARS)
def fault_of(schema: str) -> str:
    """Returns llguidance's complaint about a JSON schema, or "" if there is none."""
    from llguidance import LLMatcher

    try:
        source = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        return str(LLMatcher.validate_grammar(source))
    except Exception as reason:  # the library's errors have many types
        return str(reason)


def _place_of_fault(schema: dict[str, Any], fault: str) -> str:
    """Returns, for an error message, the innermost place and the keyword that llguidance cannot follow."""
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}

    def fails(part: Mapping[str, Any]) -> str:
        return fault_of(json.dumps({**definitions, **part}))

    for place, part in reversed([*_places(schema)]):
        if own := fails(part):
            # The parts inside this one have been checked already, so the fault is its own.
            names = sorted(part.keys() - {"$defs"}, key=lambda name: (name in CONTAINERS, name))
            keyword = next(
                (
                    name
                    for name in names
                    if not fails({key: part[key] for key in names if key != name})
                ),
                "schema",
            )
            given = f" {shown(part[keyword])}" if keyword in part else ""
            why = "no value satisfies it" if "nsatisfiable" in own else "cannot be followed"
            return f"{place and ', '}{place}: {keyword}{given}: {why}"
    return ": it is too large"


def _places(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the parts of a schema with their places, outer parts first."""
    todo: list[tuple[str, Any]] = [("", schema)]
    referred = set[str]()
    while todo:
        place, part = todo.pop()
        if not isinstance(part, dict):
            continue
        yield place, part
        reference = str(part.get("$ref", "#"))
        if reference not in referred:
            referred.add(reference)
            todo.append((place, _referred(schema, reference) if reference != "#" else None))
        for key, value in part.items():
            if key in ("properties", "patternProperties"):
                todo += [(f"{place}{place and '.'}{name}", inner) for name, inner in value.items()]
            elif key == "items":
                todo.append((f"{place}[]", value))
            elif key == "additionalProperties":
                todo.append((f"{place}{place and '.'}*", value))
            elif isinstance(value, list) and key not in VALUES:
                todo += [(place, inner) for inner in value]


def check_size(kind: str, source: str, rules: int) -> None:
    """Raises UsageError for a source with too much nesting or too many rules for recursive parsers."""
    if max(accumulate((letter in "([{") - (letter in ")]}") for letter in source)) > MAX_NESTING:
        fault = f"@{kind} is nested too deeply"
        raise UsageError(fault, f"use at most {MAX_NESTING} brackets at once")
    if rules > MAX_RULES and kind != "regex":
        raise UsageError(f"@{kind} has {rules} rules or references", f"use at most {MAX_RULES}")


def inline(schema: Mapping[str, Any]) -> str:
    """Returns a JSON schema as the body of a Lark rule."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON schema whose objects may have only the properties that the schema lists.

    Most schemas omit `additionalProperties` although they mean to forbid them, and small models would keep adding
    properties. Parts that must agree with other parts (`allOf`) stay open, and so do the parts that they refer to.
    """
    result: dict[str, Any] = json.loads(json.dumps(schema))
    combined, inner = _combined(result)
    for part in _parts(result):
        # Such a part is also closed if it lists every property that the parts combined with it name.
        covers = id(part) not in inner and _names_of(part) <= {*part.get("properties", ())}
        if (id(part) not in combined or covers) and _names_all(part):
            part["additionalProperties"] = False
    return result


def _names_of(schema: Any) -> set[str]:
    """Returns the names of the properties that a schema and the parts combined with it demand or describe."""
    names = set[str]()
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        if part.keys() & {"$ref", "enum", "const"}:
            # The properties of such a part are unknown. PRIVATE stands for them, as no schema lists it.
            names.add(PRIVATE)
        names |= {*part.get("properties", ()), *part.get("required", ())}
        todo += [inner for key in ("allOf", "anyOf", "oneOf") for inner in part.get(key, ())]
    return names


def _names_all(part: Mapping[str, Any]) -> bool:
    """Returns True if a schema lists all properties that its objects need, and has no rule for other properties."""
    properties = part.get("properties")
    required = part.get("required", ())
    if not isinstance(properties, dict) or not isinstance(required, list | tuple):
        return False
    if {"additionalProperties", "patternProperties"} & part.keys():
        return False
    enough = part.get("minProperties", 0) <= len(properties)
    return enough and all(name in properties for name in required)


def _combined(schema: Any) -> tuple[set[int], set[int]]:
    """Returns the ids of the parts that must agree with other parts, and of the parts inside them.

    The first set contains all these ids, and the second set only those of the inner parts.
    """
    combined = set[int]()
    inner = set[int]()
    todo = [part for part in _parts(schema) if _combines(part)]
    todo.reverse()  # outer parts are popped first; they contain the others
    while todo:
        start = todo.pop()
        if id(start) in combined:
            continue
        for part in _parts(start):
            combined.add(id(part))
            if part is not start:
                inner.add(id(part))
            target = _referred(schema, part.get("$ref"))
            if isinstance(target, dict):
                inner.add(id(target))
                todo.append(target)
    return combined, inner


def _combines(part: Mapping[str, Any]) -> bool:
    """Returns True for a part whose keywords must agree on the properties of an object."""
    several = part.get("allOf")
    shaping = sum(key in part for key in SHAPING)
    demands = "properties" not in part and any(key in part for key in DEMANDING)
    return (
        shaping > 1
        or (shaping == 1 and demands)
        or (isinstance(several, list) and len(several) > 1)
    )


def _referred(schema: Any, reference: Any) -> Any:
    """Returns the part of a schema that a JSON pointer refers to, or None for other references."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part = schema
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list):
            part = (
                dict(enumerate(part)).get(int(name)) if re.fullmatch("[0-9]{1,9}", name) else None
            )
        else:
            part = part.get(name) if isinstance(part, dict) else None
    return part


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and all schemas inside it, outer schemas first."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            yield part
            for key, value in part.items():
                if key in BY_NAME and isinstance(value, dict):
                    todo += value.values()
                elif key not in VALUES:
                    todo.append(value)


class GrammarCompiler:
    """Compiles grammars for the vocabulary of one tokenizer, and caches the most recent ones.

    Raises UserError if llguidance is missing or cannot read the tokenizer.
    """

    def __init__(self, backbone: Backbone) -> None:
        need_extra("grammar", "an answer by a grammar")
        try:
            self._tokenizer, self._special = _tokenizer_of(backbone)
        except Exception as reason:  # the library's errors have many types
            text = f"grammars cannot be followed with the tokenizer of {backbone.id!r}: {first_line(reason)}"
            raise UserError(
                text, "use a model with a byte-level or SentencePiece tokenizer.json"
            ) from reason
        self.matcher = lru_cache(CACHED_GRAMMARS)(self._matcher)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        """Returns a matcher at the beginning of a grammar; callers must copy it.

        Raises UsageError for an invalid grammar.
        """
        from llguidance import LLMatcher

        try:
            source = _source_of(grammar, self._special)
            matcher = LLMatcher(self._tokenizer, source, log_level=0)
            fault = matcher.get_error()
            if not fault:
                first = matcher.deep_copy()
                first.compute_bitmask()
                fault = first.get_error() and "no text follows it, or it is too large"
        except Exception as reason:  # raised by the GBNF reader
            fault = str(reason)
        if fault:
            raise _invalid(grammar, fault)
        return matcher


def _source_of(grammar: Grammar, special: Mapping[str, int]) -> str:
    """Returns a grammar in the form that llguidance reads. special: the ids of special tokens by name."""
    from llguidance import LLMatcher, grammar_from

    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return grammar_from("grammar", by_ids(grammar.text, special))


def _invalid(grammar: Grammar, fault: str) -> UsageError:
    """Returns the error for a grammar that cannot be followed."""
    text = " ".join(fault.split("\n   1 |")[0].split())
    return UsageError(
        f"@{grammar.kind} cannot be followed: {text}", "correct it, or leave that part out"
    )


def check_syntax(grammar: Grammar) -> None:
    """Checks a grammar without a tokenizer; raises UsageError if the grammar is valid for no model.

    Names in angle brackets may be special tokens of the model, so a grammar with angle brackets is not checked.
    """
    need_extra("grammar", "an answer by a grammar")
    if grammar.kind == "grammar" and "<" in grammar.text:
        return
    from llguidance import LLMatcher

    try:
        fault = LLMatcher.validate_grammar(_source_of(grammar, {}))
    except Exception as reason:  # raised by the GBNF reader
        fault = str(reason)
    if fault:
        raise _invalid(grammar, fault)


def _tokenizer_of(backbone: Backbone) -> tuple[LLTokenizer, dict[str, int]]:
    """Returns the tokenizer for grammars, and the ids of its special tokens by name.

    llguidance treats some added tokens, such as Qwen's `<tool_call>`, as special because of their angle brackets.
    """
    tokens = backbone.tokenizer.added_tokens_decoder
    special = {}
    for id, token in tokens.items():
        bracketed = token.content.startswith("<") and token.content.endswith(">")
        if token.special or bracketed:
            special[token.content] = id
    tokenizer = _without_names(backbone, special)
    known = {token.content: id for id, token in tokens.items() if tokenizer.is_special_token(id)}
    return (tokenizer, special) if known == special else (_without_names(backbone, known), known)


def _without_names(backbone: Backbone, special: Collection[str]) -> LLTokenizer:
    """Returns a tokenizer that encodes the names of special tokens as ordinary text.

    The model's own tokenizer encodes the text `<tool_call>` as the special token of this name. If a grammar forced this
    text, llguidance would allow only the special token, which its parser then rejects, because it expects text.
    """
    from llguidance import LLTokenizer

    hidden = {name: f"{name[:1]}{PRIVATE}{name[1:]}" for name in special}
    file = json.loads(backbone.tokenizer.backend_tokenizer.to_str())
    file |= {"padding": None, "truncation": None}
    for token in file["added_tokens"]:
        token["content"] = hidden.get(token["content"], token["content"])
    model = file["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(piece, piece): id for piece, id in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    ends = sorted(backbone.eos_ids) or backbone.tokenizer.eos_token_id
    return LLTokenizer(json.dumps(file), n_vocab=backbone.vocab_size, eos_token=ends)


# Strings, regular expressions and comments in Lark, in which `<name>` is ordinary text.
_LARK_TEXT = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/'


def by_ids(grammar: str, special: Mapping[str, int]) -> str:
    """Returns a grammar in which the names of special tokens are replaced with their ids."""
    if "<" not in grammar or not special:
        return grammar
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))

    def replace(found: re.Match[str]) -> str:
        return f"<[{special[found[0]]}]>" if found[0] in special else found[0]

    return re.sub(f"{_LARK_TEXT}|{names}", replace, grammar)


_compilers: WeakKeyDictionary[Backbone, GrammarCompiler] = WeakKeyDictionary()


def matcher_of(backbone: Backbone, grammar: Grammar) -> LLMatcher:
    """Returns the compiled matcher of a grammar, which must be copied before it is advanced.

    Raises UsageError for a grammar that cannot be followed, and UserError if the tokenizer or the
    installation does not support grammars.
    """
    if backbone not in _compilers:
        _compilers[backbone] = GrammarCompiler(backbone)
    return _compilers[backbone].matcher(grammar)


def allowed_by(matcher: LLMatcher, size: int) -> Tensor:
    """Returns a mask [size] of the tokens that a matcher allows next: past llguidance's limits, only the end token."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return torch.from_numpy(np.unpackbits(bits, count=size, bitorder="little")).bool()


def masked(scores: Tensor, allowed: Tensor) -> Tensor:
    """Returns the scores [1, V], with -inf for the tokens that the mask `allowed` [V] excludes.

    If other processors forbid all allowed tokens, these tokens get equal scores.
    """
    forbidden = ~allowed.to(scores.device)
    scores_left = scores.masked_fill(forbidden, -torch.inf)
    if scores_left.max() == -torch.inf:
        return torch.zeros_like(scores).masked_fill(forbidden, -torch.inf)
    return scores_left


class GrammarProcessor(LogitsProcessor):
    """Sets logits to -inf for tokens that the grammar does not allow next.

    The matcher follows the answer in the text, and rolls back when another path of a draft begins. If only one text may
    follow, llguidance allows only the tokens with which the tokenizer encodes this text.
    """

    def __init__(self, start: LLMatcher, prompt_length: int, stop_ids: Iterable[int]) -> None:
        # This matcher stays at the beginning of the grammar; forks copy it.
        self._start = start
        self._matcher = start.deep_copy()
        self._prompt_length = prompt_length
        self._stop_ids = list(stop_ids)
        self._answer: list[int] = []  # the tokens that the matcher has read

    def fork(self) -> GrammarProcessor:
        """Returns a processor for another sequence with the same prompt and no answer yet."""
        return GrammarProcessor(self._start, self._prompt_length, self._stop_ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the masked logits [1, V] after the text [1, L].

        After a text that the grammar does not allow, only the end token is allowed.
        """
        if self._read(input_ids) or self._matcher.is_error():
            allowed = allowed_by(self._matcher, scores.shape[-1])
            if self._stop_ids and self._matcher.is_accepting():
                allowed[self._stop_ids] = True
        else:
            allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
            allowed[self._stop_ids or [0]] = True
        return masked(scores, allowed)

    def cuts_off(self, text: Tensor) -> bool:
        """Returns True if a limit of llguidance ends the text [1, L] before the grammar is complete.

        llguidance may also refuse a token that it allowed before. In both cases, only the end token may follow.
        """
        complete = self._read(text) or self._matcher.is_accepting() or self._matcher.is_stopped()
        return not complete or bool(self._matcher.is_error())

    def forced(self, text: Tensor) -> list[int]:
        """Returns the tokens that must follow the text [1, L], including the end token if it is forced."""
        if not self._read(text):
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._answer += tokens[: self._matcher.try_consume_tokens(tokens)]
        return tokens + self._stop_ids[:1] if self._matcher.is_stopped() else tokens

    def _read(self, text: Tensor) -> bool:
        """Advances the matcher to the end of a text [1, L].

        Returns False if the grammar does not allow the text.
        """
        answer = text[0, self._prompt_length :].tolist()
        read = self._answer
        shared = shared_length(answer, read)
        if shared < len(read) and not self._matcher.rollback(len(read) - shared):
            # Matchers of grammars that count tokens or end at a text (`max_tokens=`, `stop=`) cannot
            # be rolled back.
            self._matcher = self._start.deep_copy()
            shared = 0
        count = shared + self._matcher.try_consume_tokens(answer[shared:])
        self._answer = answer[:count]
        return count == len(answer)
