"""Each keyword of JSON Schema, in each place, is followed exactly, or refused by place and name."""

import json
import random
from typing import Any

import pytest

from medusa_cli.decode.grammar import Grammar, matcher_of, schema_grammar
from medusa_cli.decode.patterns import followed_pattern
from medusa_cli.errors import UsageError
from tests.helpers import byte_backbone

jsonschema = pytest.importorskip("jsonschema_rs")
pytest.importorskip("llguidance")
BACKBONE = byte_backbone()
TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
THREE = {
    "type": "object",
    "properties": {"a": NUMBER, "b": TEXT, "c": {"type": "boolean"}},
}
TRUE_C = {"properties": {"c": {"const": True}}, "required": ["c"]}
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
# Schemas that are followed, by the keyword that each is about.
FOLLOWED: list[tuple[str, dict[str, Any]]] = [
    ("type", {"type": ["integer", "null"]}),
    ("enum", {"enum": ["a", 1, None, [1, 2], {"a": 1}]}),
    ("const", {"const": {"a": 1, "b": "x"}}),
    ("multipleOf", {"multipleOf": 2}),
    ("minimum", {"minimum": 1, "maximum": 3}),
    ("exclusiveMinimum", {"exclusiveMinimum": 1, "exclusiveMaximum": 3}),
    ("exclusiveMinimum", {"$schema": DRAFT_4, "minimum": 1, "exclusiveMinimum": True}),
    ("minLength", {"minLength": 1, "maxLength": 2}),
    ("pattern", {"type": "string", "pattern": "^[a-b]+$"}),
    ("format", {"format": "date"}),
    ("format", {"format": "password"}),
    ("properties", THREE),
    ("required", {**THREE, "required": ["a", "c"]}),
    ("additionalProperties", {**THREE, "additionalProperties": NUMBER}),
    ("additionalProperties", {**THREE, "additionalProperties": {"not": {}}}),
    ("patternProperties", {"type": "object", "patternProperties": {"^a": NUMBER}}),
    ("minProperties", {**THREE, "minProperties": 2}),
    ("maxProperties", {**THREE, "maxProperties": 1}),
    ("maxProperties", {**THREE, "maxProperties": 2}),
    ("minProperties", {**THREE, "minProperties": 1, "additionalProperties": False}),
    ("maxProperties", {**THREE, "minProperties": 2, "maxProperties": 2, "required": ["a"]}),
    ("minProperties", {"type": "object", "minProperties": 1, "maxProperties": 2}),
    ("items", {"type": "array", "items": TEXT}),
    ("minItems", {"type": "array", "minItems": 1, "maxItems": 2}),
    ("prefixItems", {"type": "array", "prefixItems": [TEXT, NUMBER], "items": False}),
    ("additionalItems", {"$schema": DRAFT_7, "items": [TEXT], "additionalItems": NUMBER}),
    ("additionalItems", {"$schema": DRAFT_7, "items": [TEXT], "additionalItems": False}),
    ("additionalItems", {"$schema": DRAFT_7, "items": TEXT, "additionalItems": False}),
    ("allOf", {"allOf": [{"minimum": 1}, {"maximum": 2}]}),
    ("allOf", {"allOf": [{**THREE, "required": ["a"]}, {"required": ["b"]}]}),
    ("anyOf", {"anyOf": [NUMBER, TEXT]}),
    ("oneOf", {"oneOf": [NUMBER, TEXT]}),
    ("propertyNames", {"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER}),
    ("propertyNames", {"type": "object", "propertyNames": {"enum": ["a", "b"]}}),
    ("propertyNames", {"type": "object", "propertyNames": {"const": "a"}}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    ("propertyNames", {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}}),
    ("propertyNames", {"type": "object", "propertyNames": NUMBER}),
    ("propertyNames", {"type": "object", "propertyNames": False}),
    ("propertyNames", {**THREE, "propertyNames": {"enum": ["a", "z"]}}),
    ("unevaluatedProperties", {**THREE, "unevaluatedProperties": False}),
    ("unevaluatedProperties", {**THREE, "unevaluatedProperties": NUMBER}),
    (
        "unevaluatedProperties",
        {"type": "object", "allOf": [THREE], "unevaluatedProperties": False},
    ),
    ("unevaluatedItems", {"type": "array", "prefixItems": [TEXT], "unevaluatedItems": False}),
    ("contains", {"type": "array", "contains": {}, "minContains": 2, "maxContains": 3}),
    ("contains", {"type": "array", "contains": TEXT, "minContains": 0}),
    ("minContains", {"type": "array", "minContains": 2, "maxContains": 0}),
    ("uniqueItems", {"type": "array", "uniqueItems": False}),
    ("uniqueItems", {"type": "array", "uniqueItems": True, "maxItems": 1}),
    ("uniqueItems", {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True}),
    ("uniqueItems", {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}),
    ("not", {"not": False}),
    ("not", {**THREE, "not": {"required": ["a"]}}),
    ("not", {**THREE, "not": {"required": ["a", "b"]}}),
    ("not", {**THREE, "not": TRUE_C}),
    ("not", {"type": "object", "properties": {"a": {"not": {}}, "b": TEXT}}),
    ("not", {"type": ["string", "integer"], "not": {"type": "string"}}),
    ("not", {"not": {"type": ["string", "object", "array"]}}),
    ("not", {"type": ["integer", "string"], "not": {"type": "integer"}}),
    ("not", {"type": "integer", "not": {"enum": [0, 1, 3]}}),
    ("not", {"type": "number", "not": {"const": 1}}),
    ("not", {"type": "string", "not": {"enum": ["a", "ab"]}}),
    ("not", {"enum": ["a", "b", 1, True], "not": {"enum": ["a", 1]}}),
    ("not", {"not": {"enum": ["a", 1, None, True]}}),
    ("not", {"type": ["string", "null"], "not": {"const": ""}}),
    ("not", {"not": {"minimum": 3}}),
    ("not", {"type": "string", "not": {"minLength": 2}}),
    ("not", {"not": {"not": TEXT}}),
    ("not", {"not": {"anyOf": [TEXT, {"type": "null"}]}}),
    ("not", {"not": {"allOf": [TEXT, {"minLength": 2}]}}),
    ("if", {**THREE, "if": TRUE_C, "then": {"required": ["a"]}, "else": {"required": ["b"]}}),
    ("if", {**THREE, "if": {"properties": {"c": {"const": True}}}, "then": {"required": ["a"]}}),
    ("if", {"if": NUMBER, "then": {"minimum": 2}, "type": ["integer", "string"]}),
    ("then", {"then": False, "else": False}),
    ("dependentRequired", {**THREE, "dependentRequired": {"a": ["b"], "c": ["a"]}}),
    ("dependentSchemas", {**THREE, "dependentSchemas": {"a": TRUE_C}}),
    ("dependencies", {"$schema": DRAFT_7, **THREE, "dependencies": {"a": ["b"], "c": TRUE_C}}),
    *(
        (name, {**TEXT, name: value})
        for name, value in {
            **dict.fromkeys(("title", "description", "$comment", "contentEncoding"), "x"),
            **dict.fromkeys(("deprecated", "readOnly", "writeOnly"), True),
            **{"default": 1, "examples": [1], "contentMediaType": "text/html", "contentSchema": {}},
            **{"example": 1, "discriminator": {"propertyName": "x"}, "x-own": {"not": {}}},
            **{"$vocabulary": {}, "$dynamicAnchor": "x"},
        }.items()
    ),
]
# Schemas that refer to other parts.
REFERRING: list[dict[str, Any]] = [
    {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": TEXT}},
    {"$ref": "#/definitions/a", "definitions": {"a": TEXT}, "maxLength": 1},
    {"$schema": DRAFT_7, "$ref": "#/definitions/a", "definitions": {"a": TEXT}, "maxLength": 0},
    {"$ref": "#/$defs/used", "$defs": {"used": NUMBER, "unused": {"pattern": "(?=x)"}}},
    {"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "string"}}},
    {"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n", "type": "string"}}},
    {
        "$id": "https://x.y/a",
        "$ref": "b#/$defs/c",
        "$defs": {"q": {"$id": "b", "$defs": {"c": TEXT}}},
    },
    {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": NUMBER}}},
    {"properties": {"a": {"$ref": "#"}}, "type": "object", "additionalProperties": False},
    {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/n"},
        "$defs": {"n": {"enum": ["a", "c"]}},
    },
    {
        **{"$ref": "#/$defs/x", "type": "object", "unevaluatedProperties": False},
        **{"properties": {"b": TEXT}, "$defs": {"x": {"properties": {"a": NUMBER}}}},
    },
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 4, -1, 1.5, "", "a", "ab", "abc", "b", "\n", "2020-01-01"),
    *([], ["a"], ["b"], ["a", "a"], ["a", "b"], ["b", "a"], ["a", 1], ["a", 1, 2], [1], [1, 2]),
    *([1, 2, 3], [1, 2, 3, 4], ["a", "b", 1], [True], [True, False], [False, False]),
    *({}, {"a": 1}, {"a": "x"}, {"b": "x"}, {"a": 1, "b": "x"}, {"c": True}, {"c": False}),
    *({"a": 1, "c": True}, {"a": 1, "c": False}, {"b": "x", "c": True}, {"b": "x", "c": False}),
    *({"a": 1, "b": "x", "c": True}, {"a": 1, "b": "x", "c": False}, {"a": {}}, {"a": {"a": 1}}),
    *({"z": 1}, {"z": "q"}, {"a": 1, "z": 1}, {"": 1}, {"aa": 1}, {"a": 1, "y": 2, "z": 1}),
]


def in_property(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": schema}, "required": ["p"]}


# A schema in a place, a value there, and the place's name in refusals.
PLACES: dict[str, tuple[Any, Any, str]] = {
    "top": (lambda schema: schema, lambda value: value, ""),
    "property": (in_property, lambda value: {"p": value}, ", p:"),
    "nested": (
        lambda schema: in_property(in_property(schema)),
        lambda v: {"p": {"p": v}},
        ", p.p:",
    ),
    "items": (lambda schema: {"type": "array", "items": schema}, lambda value: [value], ", []:"),
    "$defs": (
        lambda schema: {**in_property({"$ref": "#/$defs/d"}), "$defs": {"d": schema}},
        lambda value: {"p": value},
        ", p:",
    ),
    "additionalProperties": (
        lambda schema: {"type": "object", "additionalProperties": schema},
        lambda value: {"p": value},
        ", *:",
    ),
}


def takes(grammar: Grammar, value: Any) -> bool:
    """Returns True if an answer may be this value."""
    matcher = matcher_of(BACKBONE, grammar).deep_copy()
    tokens = BACKBONE.tokenizer.encode(json.dumps(value), add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def check(schema: dict[str, Any], place: str = "top") -> None:
    """Asserts that exactly the valid values are answers, but for properties that no schema names."""
    put, value_at, _ = PLACES[place]
    whole = put(schema)
    if "$schema" in schema:
        whole = {**whole, "$schema": schema["$schema"]}
    validator = jsonschema.validator_for(whole, validate_formats=True)
    grammar = schema_grammar(whole)
    named = json.dumps(schema)
    for value in VALUES:
        valid = validator.is_valid(value_at(value))
        taken = takes(grammar, value_at(value))
        assert valid or not taken, (value, grammar.text)
        closed = isinstance(value, dict) and any(f'"{name}"' not in named for name in value)
        assert taken or not valid or closed, (value, grammar.text)


@pytest.mark.quick
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("keyword", "schema"), FOLLOWED, ids=str)
def test_keywords_are_followed_in_each_place(
    keyword: str, schema: dict[str, Any], place: str
) -> None:
    assert keyword in str(schema)
    check(schema, place)


def test_combined_keywords_are_followed_or_refused() -> None:
    chance = random.Random(1)
    pool = [
        schema for keyword, schema in FOLLOWED if "$schema" not in schema and keyword != "oneOf"
    ]
    # Their negations are counted properties and properties that must be absent.
    pool += [{"type": "object", "properties": {"a": {"not": {}}, "b": TEXT}}] * 3
    pool += [{**THREE, "maxProperties": 2}] * 3
    followed = 0
    for _ in range(200):
        first, second, third = chance.sample(pool, 3)
        schema = chance.choice(
            [
                {"allOf": [first, second]},
                {"anyOf": [first, second]},
                {**first, **second},
                {**first, "not": second},
                {**first, "if": second, "then": third},
                {"type": "object", "properties": {"a": first, "b": second, "c": third}},
            ]
        )
        try:
            grammar = schema_grammar(schema)
            matcher_of(BACKBONE, grammar)
        except UsageError:
            continue
        followed += 1
        validator = jsonschema.validator_for(schema, validate_formats=True)
        wrong = [x for x in VALUES if takes(grammar, x) and not validator.is_valid(x)]
        assert not wrong, (schema, grammar.text)
    assert followed > 100


@pytest.mark.parametrize("schema", REFERRING, ids=str)
def test_references_are_followed(schema: dict[str, Any]) -> None:
    check(schema)


def test_references_to_the_root_of_an_older_draft_are_followed() -> None:
    grammar = schema_grammar({**in_property({"$recursiveRef": "#"}), "required": []})
    assert takes(grammar, {"p": {"p": {}}})
    assert not takes(grammar, {"p": 1})


def test_openapis_nullable_is_followed() -> None:
    grammar = schema_grammar(in_property({**TEXT, "nullable": True}))
    assert takes(grammar, {"p": None})
    assert takes(grammar, {"p": "a"})
    assert not takes(schema_grammar(in_property({**TEXT, "nullable": False})), {"p": None})


# Schemas that are refused, by the keyword that the refusal names.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("type", {"type": "objekt"}),
    ("enum", {"enum": ["a", "\ud800"]}),
    ("enum", {"enum": "a"}),
    ("const", {"const": "\udc00"}),
    ("pattern", {"type": "string", "pattern": "(?=x)y"}),
    ("pattern", {"type": "string", "pattern": "^(?<!x)y$"}),
    ("pattern", {"type": "string", "pattern": r"(a)\1"}),
    ("pattern", {"type": "string", "pattern": r"\ba\b"}),
    ("pattern", {"type": "string", "pattern": "^hello ($"}),
    ("pattern", {"type": "string", "pattern": "[a"}),
    ("pattern", {"type": "string", "pattern": "\ud800"}),
    ("patternProperties", {"type": "object", "patternProperties": {"(?=x)": TEXT}}),
    ("properties", {"type": "object", "properties": {"\ud800": TEXT}}),
    ("properties", {"type": "object", "properties": [TEXT]}),
    ("required", {"type": "object", "required": "a"}),
    ("minLength", {"type": "string", "minLength": "3"}),
    ("uniqueItems", {"type": "array", "items": TEXT, "uniqueItems": True}),
    ("contains", {"type": "array", "contains": TEXT}),
    ("contains", {"type": "array", "contains": TEXT, "minContains": 0, "maxContains": 1}),
    ("not", {"not": {"type": "string", "pattern": "a"}}),
    ("not", {"not": {"type": "integer"}}),
    ("not", {"not": {"const": [1]}}),
    ("not", {"not": {"items": TEXT}}),
    ("if", {"if": {"pattern": "a"}, "then": {"minLength": 2}}),
    ("unevaluatedProperties", {"anyOf": [THREE, {}], "unevaluatedProperties": False}),
    ("unevaluatedItems", {"contains": TEXT, "minContains": 0, "unevaluatedItems": False}),
    ("propertyNames", {**THREE, "propertyNames": {"pattern": "^a"}}),
    ("propertyNames", {"type": "object", "propertyNames": {"format": "email"}}),
    ("minProperties", {**THREE, "additionalProperties": True, "minProperties": 1}),
    ("$ref", {"$ref": "#/$defs/none"}),
    ("$ref", {"$ref": "https://json-schema.org/draft/2020-12/schema"}),
    ("$ref", {"$ref": "#none"}),
]


@pytest.mark.quick
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("keyword", "schema"), REFUSED, ids=repr)
def test_other_keywords_are_refused_by_place_and_name(
    keyword: str, schema: dict[str, Any], place: str
) -> None:
    put, _, name = PLACES[place]
    with pytest.raises(UsageError) as raised:
        schema_grammar(put(schema), "@tools: tool schedule_event")
    text = raised.value.message
    assert text.startswith(f"@tools: tool schedule_event{name or ':'}"), text
    assert f": {keyword}" in text
    assert "regex parse" not in text
    assert "%json" not in text
    assert raised.value.setting == "tools"


PATTERNS: list[tuple[str, list[str], list[str]]] = [
    (r"^hello \!$", ["hello !"], ["hello"]),
    (r"^a\/b\-\_$", ["a/b-_"], []),
    ("^\\u0041\\x42$", ["AB"], []),
    ("^\\ud83d\\ude00$", ["\U0001f600"], []),
    (r"^\d$", ["3"], ["\u0661"]),
    (r"^\w$", ["a"], ["é"]),
    (r"^\s$", [" ", "\u00a0", "\ufeff"], ["a"]),
    (r"^\S$", ["a"], [" ", "\ufeff"]),
    ("^.$", ["a"], ["\n", "\u2028"]),
    ("^[^]$", ["\n", "a"], [""]),
    ("^[a-z&&b[]$", ["a", "&", "["], ["&&"]),
    ("^x{,3}$", ["x{,3}"], ["xx"]),
    ("^{a}$", ["{a}"], ["a"]),
    (r"^(?<n>a)$", ["a"], []),
    ("b", ["abc"], ["ac"]),
    (r"\Aa\Z", ["a"], ["ab"]),
    # The e-mail address of zod.
    (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        ["a@b.de", "a.b@c.de", "o'b@c.de"],
        [".a@b.de", "a..b@c.de", "a.@b.de", "o'@c.de", "a@b"],
    ),
]


@pytest.mark.parametrize(("pattern", "matching", "others"), PATTERNS, ids=repr)
def test_patterns_mean_what_they_mean_in_javascript(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    grammar = schema_grammar({"type": "string", "pattern": pattern})

    def follows(text: str) -> bool:
        matcher = matcher_of(BACKBONE, grammar).deep_copy()
        written = json.dumps(text, ensure_ascii=False)
        tokens = BACKBONE.tokenizer.encode(written, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert [text for text in matching if not follows(text)] == []
    assert [text for text in others if follows(text)] == []
    assert followed_pattern(pattern)


def test_objects_with_conditions_are_closed_where_these_add_no_property() -> None:
    grammar = schema_grammar({**THREE, "if": TRUE_C, "then": {"required": ["a"]}})
    assert not takes(grammar, {"b": "x", "z": 1})
    more = {"if": TRUE_C, "then": {"properties": {"z": NUMBER}, "required": ["z"]}}
    assert takes(schema_grammar({**THREE, **more}), {"c": True, "z": 1})
