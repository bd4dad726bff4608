"""The rewriting of JSON schemas, of any draft of the standard, as schemas whose keywords llguidance follows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from medusa_cli.decode.negation import Unsaid, negated, other_values
from medusa_cli.decode.patterns import followed_pattern
from medusa_cli.errors import UsageError, shown

Schema = dict[str, Any] | bool
# Keywords that are followed without a change.
VALUES = {
    *("required", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("enum", "const"),
}
ONE = {"additionalProperties", "items"}
SEVERAL = {"allOf", "anyOf", "oneOf", "prefixItems"}
NAMED = {"properties", "patternProperties"}
TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
# Drafts of the standard in which keywords next to `$ref` have no effect.
REF_ALONE = re.compile(r"draft-0[3-7]")
# Formats that llguidance follows. According to the standard, other formats do not constrain a text.
FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
}
# Patterns for formats of property names, for which llguidance has no keyword.
NAMES = {
    "date": r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])$",
    "uuid": r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}
IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "not")
# Keywords that make the set of evaluated properties depend on the value.
BY_VALUE = {"patternProperties", *IN_PLACE} - {"allOf", "$ref"}
# For `uniqueItems`, all lists of different items are enumerated if there are at most this many values.
MAX_UNIQUE = 4
# To count properties, all combinations are enumerated if there are at most this many properties.
MAX_COUNTED = 6


def followable(schema: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Returns an equivalent schema of keywords that llguidance follows, without definitions that are not used.

    owner: the name of the schema in error messages. Raises UsageError, with the owner, the property and
    the keyword, for a schema without an equivalent.
    """
    return _Rewriter(schema, owner).result


class _Rewriter:
    """Rewrites a schema and the definitions that it refers to."""

    def __init__(self, schema: Mapping[str, Any], owner: str) -> None:
        self._root = schema
        self._owner = owner
        self._by_uri: dict[str, Any] = {}
        # Anchors that several parts have. Their meaning depends on the schema that refers to them.
        self._dynamic: set[str] = set()
        # The URI against which a part's references are resolved, by the part's `id()`.
        self._bases: dict[int, str] = {}
        self._index(schema, "")
        self._names: dict[int, str] = {}
        self._defined: dict[str, Schema] = {}
        self._alone = bool(REF_ALONE.search(str(schema.get("$schema"))))
        result = self.rewrite(schema, "")
        if result is False:
            raise self.refuse("", "not" if "not" in schema else "schema", "no value satisfies it")
        self.result = {} if result is True else result
        if self._defined:
            self.result = {**self.result, "$defs": self._defined}

    def _index(self, part: Any, base: str) -> None:
        """Records the URIs of all parts that have an id or an anchor, and the base URI of each part."""
        todo = [(part, base)]
        while todo:
            part, base = todo.pop()
            if isinstance(part, list):
                todo += [(value, base) for value in part]
            if not isinstance(part, dict):
                continue
            own = part.get("$id", part.get("id") if "$schema" in part else None)
            if isinstance(own, str):
                base = urljoin(base, own)
                self._by_uri.setdefault(urldefrag(base)[0], part)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(part.get(key), str):
                    uri = f"{urldefrag(base)[0]}#{part[key]}"
                    if any(other.endswith(f"#{part[key]}") for other in self._by_uri):
                        self._dynamic.add(f"#{part[key]}")
                    self._by_uri.setdefault(uri, part)
            self._bases[id(part)] = base
            todo += [(value, base) for key, value in part.items() if key not in ("enum", "const")]

    def refuse(self, place: str, keyword: str, reason: str, value: Any = None) -> UsageError:
        at = f"{self._owner}, {place}" if place else self._owner
        given = "" if value is None else f" {value if isinstance(value, str) else shown(value)}"
        fault = f"{at}: {keyword}{given}: {reason}"
        return UsageError(fault, "express it in another way, or leave it out")

    def target(self, part: Mapping[str, Any], keyword: str, place: str) -> Any:
        """Returns the part that a reference refers to."""
        reference = part[keyword]
        if not isinstance(reference, str):
            raise self.refuse(place, keyword, "is not a text", reference)
        if keyword == "$dynamicRef" and reference in self._dynamic:
            raise self.refuse(place, keyword, "several parts have this anchor", reference)
        base = self._bases.get(id(part), "")
        uri, fragment = urldefrag(urljoin(base, reference) if reference[:1] != "#" else base)
        if reference[:1] == "#":
            fragment = reference[1:]
        schema = self._by_uri.get(uri, self._root if not uri or uri == base else None)
        if schema is not None and fragment[:1] == "/":
            for name in fragment[1:].split("/"):
                name = unquote(name).replace("~1", "/").replace("~0", "~")
                if isinstance(schema, list):
                    schema = dict(enumerate(schema)).get(int(name) if name.isdecimal() else -1)
                else:
                    schema = schema.get(name) if isinstance(schema, dict) else None
        elif fragment:
            schema = self._by_uri.get(f"{uri}#{fragment}")
        if not isinstance(schema, dict | bool):
            raise self.refuse(place, keyword, "there is no such part in the schema", reference)
        return schema

    def resolved(self, schema: Any, place: str) -> Any:
        """Returns the schema itself, or the schema that it refers to if it is only a reference."""
        for _ in range(100):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if not self._alone and set(schema) - {"$ref", "title", "description", "default"}:
                return schema
            schema = self.target(schema, "$ref", place)
        return schema

    def _reference(self, part: Mapping[str, Any], keyword: str, place: str) -> Schema:
        """Rewrites the target of a reference as a definition; returns a reference to this definition."""
        target = self.target(part, keyword, place)
        if isinstance(target, bool):
            return target
        if target is self._root:
            return {"$ref": "#"}
        if id(target) not in self._names:
            name = re.sub(r"\W", "_", str(part[keyword]).rsplit("/", 1)[-1])
            while name in self._defined:
                name += "_"
            self._names[id(target)] = name
            self._defined[name] = True
            self._defined[name] = self.rewrite(target, place)
        return {"$ref": f"#/$defs/{self._names[id(target)]}"}

    def rewrite(self, schema: Any, place: str) -> Schema:
        """Returns the equivalent of a schema. place: the path of the property that it describes."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self.refuse(place, "schema", "is not an object", schema)
        part = self._of_older_drafts(dict(schema))
        result: dict[str, Any] = {}
        # Conditions that replace keywords.
        more: list[Any] = []
        self._check_types(part, place)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in part:
                refers = self._reference(schema, keyword, place)
                if refers is False:
                    return False
                if isinstance(refers, dict):
                    if self._alone and keyword == "$ref":
                        return refers
                    if "$ref" in result:
                        more.append(refers)
                    else:
                        result |= refers
        self._unevaluated(part, place)
        self._names_of_properties(part, place)
        self._lists(part, place)
        self._counts(part, more)
        if not self._exclude(part, more, place):
            return False
        more += _dependents(part)
        if "if" in part and ("then" in part or "else" in part):
            more.append(self._choice(part, place))
        self._copy(part, result, place)
        others = [self.rewrite(condition, place) for condition in more]
        others = [*result.get("allOf", ()), *(other for other in others if other is not True)]
        if others:
            result["allOf"] = others
        return result

    def _copy(self, part: Mapping[str, Any], result: dict[str, Any], place: str) -> None:
        """Copies the keywords that llguidance follows to `result`, and rewrites the schemas in their values."""
        for keyword, value in part.items():
            if keyword in VALUES or keyword == "type":
                self._check_text(value, keyword, place)
                if keyword == "enum" and not isinstance(value, list):
                    raise self.refuse(place, keyword, "is not a list", value)
                result[keyword] = value
            elif keyword == "pattern":
                result[keyword] = self._pattern(value, keyword, place)
            elif keyword == "format" and isinstance(value, str) and value in FORMATS:
                result[keyword] = value
            elif keyword in ONE:
                inner = f"{place}[]" if keyword == "items" else _below(place, "*")
                result[keyword] = self.rewrite(value, inner)
            elif keyword in SEVERAL:
                if not isinstance(value, list) or (not value and keyword != "prefixItems"):
                    raise self.refuse(place, keyword, "is not a list of schemas", value)
                inners = [
                    f"{place}[{i}]" if keyword == "prefixItems" else place
                    for i in range(len(value))
                ]
                result[keyword] = [self.rewrite(*pair) for pair in zip(value, inners, strict=True)]
            elif keyword in NAMED:
                result[keyword] = {}
                for name, inner_schema in value.items():
                    self._check_text(name, keyword, place)
                    key = name if keyword == "properties" else self._pattern(name, keyword, place)
                    result[keyword][key] = self.rewrite(inner_schema, _below(place, name))

    def _pattern(self, value: Any, keyword: str, place: str) -> str:
        if not isinstance(value, str):
            raise self.refuse(place, keyword, "is not a text", value)
        self._check_text(value, keyword, place)
        try:
            return followed_pattern(value)
        except ValueError as reason:
            raise self.refuse(place, keyword, str(reason), value) from reason

    def _check_text(self, value: Any, keyword: str, place: str) -> None:
        """Refuses texts with half a character: a surrogate without its pair."""
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as reason:
            raise self.refuse(place, keyword, "holds half a character", value) from reason

    def _check_types(self, part: Mapping[str, Any], place: str) -> None:
        given = part.get("type", [])
        for name in given if isinstance(given, list) else [given]:
            if name not in TYPES:
                raise self.refuse(place, "type", f"is none of {', '.join(TYPES)}", name)
        if not isinstance(part.get("required", []), list):
            raise self.refuse(place, "required", "is not a list of names", part["required"])
        for keyword in NAMED:
            if not isinstance(part.get(keyword, {}), Mapping):
                raise self.refuse(place, keyword, "is not an object", part[keyword])

    def _of_older_drafts(self, part: dict[str, Any]) -> dict[str, Any]:
        """Returns a part in which keywords of older drafts are replaced with those of the newest draft."""
        if isinstance(part.get("items"), list):
            part["prefixItems"] = part.pop("items")
            if "additionalItems" in part:
                part["items"] = part["additionalItems"]
        for name, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(part.get(name), bool) and part.pop(name) and limit in part:
                part[name] = part.pop(limit)
        for name, needed in dict(part.get("dependencies") or {}).items():
            keyword = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
            part[keyword] = {**part.get(keyword, {}), name: needed}
        if part.get("nullable") is True and "type" in part:
            given = part["type"] if isinstance(part["type"], list) else [part["type"]]
            part["type"] = [*given, *({"null"} - {*given})]
        return part

    def _exclude(self, part: dict[str, Any], more: list[Any], place: str) -> bool:
        """Rewrites `not`; returns False if no value is left."""
        if "not" not in part:
            return True
        excluded = self.resolved(part["not"], place)
        try:
            if (left := other_values(part, excluded)) is not None:
                part.pop("const", None)
                part["enum"] = left
                return bool(left)
            rest = negated(excluded, part.get("type"), lambda inner: self.resolved(inner, place))
        except Unsaid as reason:
            raise self.refuse(place, "not", str(reason)) from reason
        if rest is not True:
            more.append(rest)
        return rest is not False

    def _choice(self, part: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Rewrites `if` as `anyOf`."""
        try:
            otherwise = negated(
                part["if"], part.get("type"), lambda inner: self.resolved(inner, place)
            )
        except Unsaid as reason:
            raise self.refuse(place, "if", str(reason)) from reason
        first = [part["if"], part.get("then", True)]
        return {"anyOf": [{"allOf": first}, {"allOf": [otherwise, part.get("else", True)]}]}

    def _unevaluated(self, part: dict[str, Any], place: str) -> None:
        """Rewrites `unevaluatedProperties` and `unevaluatedItems`."""
        for keyword, plain in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            value = part.get(keyword, True)
            if value in (True, {}) or plain in part:
                continue
            applied = [name for name in IN_PLACE if name in part]
            if not applied and "contains" not in part:
                part[plain] = value
                continue
            names = self._evaluated(part, place) if plain == "additionalProperties" else None
            if names is None:
                raise self.refuse(
                    place, keyword, f"with {(applied or ['contains'])[0]} it cannot be followed"
                )
            if names != {"": True}:
                known = {name: True for name in names}
                part["properties"] = {**known, **part.get("properties", {})}
                part[plain] = value

    def _evaluated(
        self, part: Mapping[str, Any], place: str, depth: int = 0
    ) -> dict[str, Any] | None:
        """Returns the names of the properties that a part evaluates, each with True as its value.

        Returns {"": True} if it evaluates every name, and None if the names depend on the value.
        """
        if depth > 20 or not BY_VALUE.isdisjoint(part):
            return None
        names = {name: True for name in part.get("properties", {})}
        others = list(part.get("allOf", ()))
        if "$ref" in part:
            others.append(self.target(part, "$ref", place))
        if depth and ("additionalProperties" in part or "unevaluatedProperties" in part):
            return {"": True}
        for other in others:
            below = self._evaluated(other, place, depth + 1) if isinstance(other, dict) else {}
            if below is None or below == {"": True}:
                return below
            names |= below
        return names

    def _names_of_properties(self, part: dict[str, Any], place: str) -> None:
        """Rewrites `propertyNames`."""
        if "propertyNames" not in part:
            return
        rule = self.resolved(part["propertyNames"], place)
        if rule is False or (isinstance(rule, dict) and not _allows_texts(rule)):
            part["maxProperties"] = 0
            return
        demands = _demands_on_names(rule) if isinstance(rule, dict) else set()
        if not demands:
            return
        others = part.get("additionalProperties", part.get("unevaluatedProperties", True))
        if demands <= {"enum", "const"}:
            allowed = _listed_names(rule)
            if "patternProperties" in part:
                raise self.refuse(
                    place, "propertyNames", "with patternProperties it cannot be followed"
                )
            given = part.get("properties", {})
            part["properties"] = {
                **{name: schema if name in allowed else False for name, schema in given.items()},
                **{name: others for name in allowed if name not in given},
            }
        else:
            pattern = self._name_pattern(rule, demands, place)
            if "patternProperties" in part or part.get("properties"):
                raise self.refuse(
                    place, "propertyNames", "with other properties its pattern cannot be followed"
                )
            part["patternProperties"] = {pattern: others}
        part["additionalProperties"] = False

    def _name_pattern(self, rule: Mapping[str, Any], demands: set[str], place: str) -> str:
        if demands == {"pattern"}:
            return str(rule["pattern"])
        if demands == {"format"} and rule["format"] in NAMES:
            return NAMES[rule["format"]]
        if demands <= {"minLength", "maxLength"}:
            return f"^[^]{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$"
        raise self.refuse(
            place, "propertyNames", f"{' and '.join(sorted(demands))} cannot be followed"
        )

    def _counts(self, part: dict[str, Any], more: list[Any]) -> None:
        """Rewrites `minProperties` and `maxProperties` for the listed properties.

        llguidance does not count beyond one property if some of the listed properties may be left out.
        """
        names = list(part.get("properties", ()))
        if part.get("additionalProperties", False) is not False or "patternProperties" in part:
            return
        if set(names) <= {*part.get("required", ())} or len(names) > MAX_COUNTED:
            return
        if 1 < (min_count := part.get("minProperties", 0)) <= len(names):
            del part["minProperties"]
            more.append(
                {"anyOf": [{"required": [*chosen]} for chosen in combinations(names, min_count)]}
            )
        if 1 < (limit := part.get("maxProperties", 0)) < len(names):
            del part["maxProperties"]
            # Other properties would count, too.
            part["additionalProperties"] = False
            ways = combinations(names, len(names) - limit)
            more.append({"anyOf": [{"properties": dict.fromkeys(way, False)} for way in ways]})

    def _lists(self, part: dict[str, Any], place: str) -> None:
        """Rewrites `contains` and `uniqueItems`."""
        if "contains" in part:
            min_count = part.get("minContains", 1)
            wanted = self.resolved(part["contains"], place)
            if wanted in (True, {}):
                part["minItems"] = max(min_count, part.get("minItems", 0))
                if "maxContains" in part:
                    part["maxItems"] = min(
                        part["maxContains"], part.get("maxItems", part["maxContains"])
                    )
            elif min_count or "maxContains" in part:
                raise self.refuse(place, "contains", "cannot be followed; describe items instead")
        if part.get("uniqueItems") is not True or part.get("maxItems", 2) < 2:
            return
        values = self._values(part.get("items", True), place)
        if values is None or "prefixItems" in part or part.get("type") != "array":
            raise self.refuse(
                place, "uniqueItems", "cannot be followed; take equal items out afterwards"
            )
        low = part.pop("minItems", 0)
        high = part.pop("maxItems", len(values))
        del part["items"]
        part["enum"] = [list(order) for order in _orders(values) if low <= len(order) <= high]

    def _values(self, schema: Any, place: str) -> list[Any] | None:
        """Returns the values that a schema allows if it lists at most MAX_UNIQUE values, else None."""
        schema = self.resolved(schema, place)
        if not isinstance(schema, dict):
            return None
        values = {"boolean": [False, True], "null": [None]}.get(str(schema.get("type")))
        values = [schema["const"]] if "const" in schema else schema.get("enum", values)
        plain = set(schema) <= {"enum", "const", "type", "title", "description"}
        return values if plain and values is not None and len(values) <= MAX_UNIQUE else None


def _dependents(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rewrites `dependentRequired` and `dependentSchemas` as `anyOf`."""
    required = dict(part.get("dependentRequired") or {})
    needs = [(name, {"required": names}) for name, names in required.items()]
    needs += dict(part.get("dependentSchemas") or {}).items()
    return [{"anyOf": [{"properties": {name: False}}, needed]} for name, needed in needs]


def _allows_texts(rule: Mapping[str, Any]) -> bool:
    given = rule.get("type", "string")
    return "string" in (given if isinstance(given, list) else [given])


def _demands_on_names(rule: Mapping[str, Any]) -> set[str]:
    """Returns the keywords of a schema that not every name satisfies."""
    demands = set(rule) & {*VALUES, *SEVERAL, "pattern", "format", "not", "if", "$ref"}
    demands -= {name for name in demands if rule[name] in (0, []) and name.startswith("min")}
    if "format" in demands and ("pattern" in demands or rule["format"] not in FORMATS):
        demands.discard("format")
    return demands


def _listed_names(rule: Mapping[str, Any]) -> list[str]:
    """Returns the names that a schema lists."""
    allowed = rule.get("enum", [rule.get("const")])
    if "enum" in rule and "const" in rule:
        allowed = [rule["const"]] if rule["const"] in rule["enum"] else []
    return [name for name in allowed if isinstance(name, str)]


def _orders(values: list[Any]) -> list[tuple[Any, ...]]:
    """Returns all lists of different items from `values`, of any length and in any order."""
    orders: list[tuple[Any, ...]] = [()]
    for i, value in enumerate(values):
        orders += [(value, *rest) for rest in _orders(values[:i] + values[i + 1 :])]
    return orders


def _below(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
