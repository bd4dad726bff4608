"""The negation of a JSON schema, if other keywords can express it exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from medusa_cli.decode.patterns import other_than

ALL = ("null", "boolean", "object", "array", "number", "string")
MAX_DEPTH = 20
# For each keyword that sets a limit: the type that it applies to, the keyword that allows only the
# forbidden values, and the number to add to the limit for that keyword.
LIMITS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
# Keywords that constrain nothing by themselves.
SILENT = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("then", "else", "minContains", "maxContains", "contentEncoding", "contentMediaType"),
    *("contentSchema", "nullable", "$id", "$schema", "$anchor", "$comment", "$defs", "definitions"),
}
UNKNOWN = {
    *("pattern", "format", "multipleOf", "items", "prefixItems", "additionalItems", "contains"),
    *("uniqueItems", "patternProperties", "additionalProperties", "propertyNames", "oneOf", "if"),
    *("dependencies", "dependentSchemas", "dependentRequired", "unevaluatedProperties"),
    *("unevaluatedItems", "$dynamicRef", "$recursiveRef"),
}


class Unsaid(Exception):
    """Reports a part whose negation no keyword can express."""


def negated(schema: Any, within: Any, resolve: Callable[[Any], Any], depth: int = 0) -> Any:
    """Returns a schema that allows the values which `schema` forbids. within: only their types count; None: all types.

    resolve: returns the target of a reference. Raises Unsaid if the keywords cannot express such a schema.
    """
    schema = resolve(schema)
    if isinstance(schema, bool):
        return not schema
    if depth > MAX_DEPTH or not isinstance(schema, Mapping):
        raise Unsaid("its part is nested too deeply or is not a schema")

    def inner(part: Any) -> Any:
        return negated(part, None, resolve, depth + 1)

    types = [*ALL, "integer"] if within is None else [within] if isinstance(within, str) else within
    options = [
        option
        for keyword, value in schema.items()
        for option in _negated_keyword(keyword, value, types, inner)
        if option is not False
    ]
    if True in options:
        return True
    if len(options) == 1:
        return options[0]
    return {"anyOf": options} if options else False


def _negated_keyword(
    keyword: str, value: Any, types: list[str], inner: Callable[[Any], Any]
) -> list[Any]:
    """Returns schemas of the values of these types that a keyword excludes. inner: negates a schema in `value`."""
    match keyword:
        case "type":
            return [_other_types(value, types)]
        case "const":
            return _other_values([value], types)
        case "enum":
            return _other_values(value, types)
        case "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties":
            others = {name: inner(part) for name, part in value.items()}
            return [
                {"type": "object", "required": [name], "properties": {name: other}}
                for name, other in others.items()
                if other is not False
            ]
        case "not":
            return [True if value == {} else value]
        case "allOf":
            return [*map(inner, value)]
        case "anyOf":
            return [{"allOf": [*map(inner, value)]}]
        case "$ref":
            raise Unsaid("$ref with other keywords cannot be followed")
    if keyword in LIMITS:
        return [_beyond(keyword, value)]
    if keyword in UNKNOWN and not _says_nothing(keyword, value):
        raise Unsaid(f"{keyword} inside it cannot be followed")
    return []


def _beyond(keyword: str, value: Any) -> Any:
    """Returns the schema of the values that a limit forbids."""
    kind, other, distance = LIMITS[keyword]
    if isinstance(value, bool):
        raise Unsaid(f"{keyword} cannot be followed")
    limit = value + distance
    return {"type": kind, other: limit} if limit >= 0 or not distance else False


def _says_nothing(keyword: str, value: Any) -> bool:
    if keyword == "uniqueItems":
        return value is False
    return keyword not in ("contains", "if") and value in (True, {})


def other_values(part: Mapping[str, Any], excluded: Any) -> list[Any] | None:
    """Returns the values that a part lists and `excluded` does not list; None if either does not list values."""
    given = part.get("enum")
    if "const" in part:
        const = part["const"]
        given = [const] if given is None or any(_same(const, value) for value in given) else []
    if given is None or not isinstance(excluded, Mapping):
        return None
    if set(excluded) & {"const", "enum"} and not set(excluded) - {*SILENT, "const", "enum"}:
        if "const" in excluded and "enum" in excluded:
            return None
        left = [excluded["const"]] if "const" in excluded else excluded["enum"]
        return [value for value in given if not any(_same(value, other) for other in left)]
    return None


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _other_types(value: Any, types: list[str]) -> Any:
    excluded = [value] if isinstance(value, str) else value
    # Whole numbers are numbers, so only the other numbers would be left.
    if "integer" in excluded and "number" not in excluded and "number" in types:
        raise Unsaid("numbers that are not whole cannot be told")
    gone = {*excluded, *(["integer"] if "number" in excluded else [])}
    left = [name for name in types if name not in gone]
    return {"type": left} if left else False


def _other_values(values: list[Any], types: list[str]) -> list[Any]:
    """Returns schemas for all values of these types except the given values."""
    if any(isinstance(value, dict | list) for value in values):
        raise Unsaid("an object or a list inside it cannot be followed")
    numbers = sorted(value for value in values if _kind(value) == "number")
    texts = [value for value in values if isinstance(value, str)]
    kinds = {_kind(value) for value in values}
    plain = [
        name
        for name in types
        if name not in kinds and not (name == "integer" and (numbers or "number" in types))
    ]
    options: list[Any] = [{"type": plain}] if plain else []
    if texts and "string" in types:
        options.append({"type": "string", "pattern": other_than(texts)})
    if "boolean" in kinds and "boolean" in types:
        options += [
            {"const": value} for value in (False, True) if not any(value is v for v in values)
        ]
    kind = "number" if "number" in types else "integer"
    if numbers and kind in types:
        options += _other_numbers(numbers, kind)
    return options


def _other_numbers(numbers: list[Any], kind: str) -> list[Any]:
    """Returns schemas for the numbers below, between and above the given sorted numbers."""
    options: list[Any] = []
    for low, high in pairwise([None, *numbers, None]):
        if low is None or high is None or high - low > (kind == "integer"):
            limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            given = {name: limit for name, limit in limits.items() if limit is not None}
            options.append({"type": kind, **given})
    return options


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "string" if isinstance(value, str) else "number"
