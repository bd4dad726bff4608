"""JSON schemas for tests and benches: one of a person, and random ones whose answers are short."""

import random
from typing import Any

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {
            "type": "array",
            "items": {"enum": ["new", "old", "sale"]},
            "minItems": 1,
            "maxItems": 3,
        },
        "nested": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "nested"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"kind": {"const": "city"}, "capital": {"type": "boolean"}},
            "required": ["kind", "capital"],
            "additionalProperties": False,
        }
    },
}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


def _list(items: dict[str, Any], smallest: int, largest: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": smallest, "maxItems": largest}


# Questions that a bench asks, and the schemas of their answers: extraction, lists of records, classification.
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    (
        "Describe an invented person as JSON.",
        _object(
            name=_text(40),
            age={"type": "integer", "minimum": 0, "maximum": 120},
            email=_text(40),
            address=_object(
                street=_text(40), city=_text(30), country={"enum": ["France", "Germany", "Italy"]}
            ),
            hobbies=_list(_text(20), 1, 3),
        ),
    ),
    (
        "Give a recipe for a tomato soup as JSON.",
        _object(
            title=_text(60),
            minutes={"type": "integer", "minimum": 1, "maximum": 240},
            ingredients=_list(
                _object(
                    name=_text(30),
                    amount={"type": "number", "minimum": 0, "maximum": 1000},
                    unit={"enum": ["g", "ml", "piece"]},
                ),
                2,
                4,
            ),
            vegetarian={"type": "boolean"},
        ),
    ),
    (
        "Alice and Bob are going to a science fair on Friday. Extract the event as JSON.",
        _object(event_name=_text(60), description=_text(200), participants=_list(_text(30), 1, 4)),
    ),
    (
        "Review: 'The food was cold and the waiter rude.' Classify it as JSON.",
        _object(
            sentiment={"enum": ["positive", "neutral", "negative"]},
            confidence={"type": "number", "minimum": 0, "maximum": 1},
            reason=_text(200),
        ),
    ),
]
NAMES = (
    "name",
    "age",
    "city",
    "tags",
    "price",
    "kind",
    "items",
    "address",
    "is_open",
    "übung",
    "a b",
    'q"uote',
)


def random_schema(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    """Returns a random schema of an object."""
    names = chance.sample(NAMES, chance.randint(1, 4))
    required = [name for name in names if chance.random() < 0.8]
    properties = {name: _random(chance, depth - 1) for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _random(chance: random.Random, depth: int) -> dict[str, Any]:
    smallest = chance.randint(-50, 50)
    leaves: list[dict[str, Any]] = [
        {"type": "string", "minLength": chance.randint(0, 3), "maxLength": chance.randint(4, 20)},
        {
            "type": "string",
            "pattern": chance.choice(["^[A-Z]{3}-[0-9]{4}$", "^(yes|no|maybe)$", "^[a-z]{2,9}$"]),
        },
        {"type": "string", "format": chance.choice(["date", "uuid", "ipv4"])},
        {"type": "integer", "minimum": smallest, "maximum": smallest + chance.randint(0, 900)},
        {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25},
        {"type": "boolean"},
        {
            "enum": chance.sample(
                ["red", "green", 7, None, True, 'a "b"', 1.5, "ß"], chance.randint(1, 4)
            )
        },
        {"const": chance.choice(["fixed", 42, None, [1, 2], {"k": "v"}])},
        {"type": ["boolean", "null"]},
    ]
    if depth <= 0 or chance.random() < 0.5:
        return chance.choice(leaves)
    items = _random(chance, depth - 1)
    return chance.choice(
        [
            random_schema(chance, depth),
            {
                "type": "array",
                "items": items,
                "minItems": chance.randint(0, 2),
                "maxItems": chance.randint(2, 4),
            },
            {"anyOf": [_random(chance, depth - 1), _random(chance, depth - 1)]},
            {
                "type": "array",
                "prefixItems": [items, _random(chance, 0)],
                "items": False,
                "minItems": 2,
            },
        ]
    )
