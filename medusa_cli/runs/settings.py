"""Values checked against what dataclasses declare: their types, and what `setting` says of their range."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import field
from functools import cache
from typing import Any

from medusa_cli.errors import UsageError, shown
from medusa_cli.runs.reading import parse_yaml

Fields = dict[str, tuple[Any, Any]]
# Of what nobody counts further: a larger number is a slip of the hand.
MANY = 10_000_000


def setting(
    default: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    among: Sequence[str] = (),
) -> Any:
    """A field with a default and the values it accepts: at least, at most, below, or one of a few words."""
    return field(default=default, metadata={"least": least, "most": most, "below": below, "among": tuple(among)})


@cache
def fields_of(schema: type) -> Fields:
    """Dotted key -> (type, metadata) of every setting of a dataclass and of the sections in it."""
    found: Fields = {}
    for section, kind in typing.get_type_hints(schema).items():
        if not dataclasses.is_dataclass(kind):
            found[section] = (kind, {})
            continue
        hints = typing.get_type_hints(kind)
        found.update({f"{section}.{one.name}": (hints[one.name], one.metadata) for one in dataclasses.fields(kind)})
    return found


def known_key(key: str, known: Fields, source: str) -> str:
    """A key that is known; UsageError, with the nearest, if it is not."""
    if key in known:
        return key
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # the section may be missing or wrong: compare the last part alone
        by_last = {one.rpartition(".")[2]: one for one in known}
        near = [by_last[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)]
    sections = ", ".join(dict.fromkeys(one.partition(".")[0] for one in known))
    raise UsageError(
        f"{source} has the unknown key {shown(key)}",
        f"did you mean {near[0]!r}?" if near else f"use one of {sections}",
    )


def parsed(text: str) -> Any:
    """What a word of the command line says as YAML; the word itself where it is none."""
    import yaml

    try:
        return parse_yaml(text)
    except (yaml.YAMLError, ValueError, OverflowError):
        return text


def checked(key: str, value: Any, kind: Any, limits: Any) -> Any:
    """The value in its field's own type; UsageError, naming key and value, where it cannot be."""
    optional = isinstance(kind, types.UnionType)
    if optional:
        if value is None:
            return None
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    plain = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    words = plain.get(kind, "a list of whole numbers such as [1,2]") + (" or null" if optional else "")
    fault = UsageError(f"{key}={shown(value)} is not {words}", f"give {words}")
    if kind is bool:
        if not isinstance(value, bool):
            raise fault
        return value
    if kind not in plain:
        if not isinstance(value, list | tuple) or not all(type(one) is int for one in value):
            raise fault
        return tuple(value)
    if isinstance(value, bool) or value is None:
        raise fault
    if kind is str:
        if not isinstance(value, str):
            raise fault
    else:
        # YAML reads 1e-3, without a point, as a string.
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise fault from None
        if not math.isfinite(number) or (kind is int and number != int(number)):
            raise fault
        value = value if type(value) is kind else kind(number)  # a whole number above 2**53 is no float
    return _within(key, value, limits)


def _within(key: str, value: Any, limits: Any) -> Any:
    least, most, among = limits.get("least"), limits.get("most"), limits.get("among")
    if least is not None and value < least:
        raise UsageError(f"{key}={value} is too small", f"use {least:g} or more")
    if most is not None and value > most:
        raise UsageError(f"{key}={value} is too large", f"use {most:g} or less")
    below = limits.get("below")
    if below is not None and value >= below:
        raise UsageError(f"{key}={value} is too large", f"use less than {below:g}")
    if among and value not in among:
        raise UsageError(f"{key}={shown(value)} is unknown", f"use one of {', '.join(among)}")
    return value
