"""JSON and YAML from anywhere: bounded in bytes, depth and digits, no key twice, of the types a schema declares."""

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from medusa_cli.errors import UserError, shown

T = TypeVar("T")
# A JSON object: whoever reads one knows its keys, or has it read as a declared type (`read_as`).
Document = dict[str, Any]

# What a document may be: the largest this tool writes itself are a hundredth of it.
MOST_BYTES = 16 << 20
MOST_DEPTH = 64
MOST_DIGITS = 40
AGAIN = "write it again with the command that made it"


def read_text(path: Path, what: str = "", kind: str = "text", remedy: str = "check the path") -> str:
    """The text of a file; UserError where it is missing, no regular file, too large, or no UTF-8."""
    name = f"{what} {path}".strip()
    if not path.exists():
        raise UserError(f"{name} does not exist", remedy)
    if not path.is_file():  # a pipe might never end
        raise UserError(f"{name} is no {kind} file", remedy)
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UserError(f"{name} is larger than {MOST_BYTES >> 20} MiB", remedy)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise UserError(f"{name} is no {kind} file", remedy) from reason


def read_json(path: Path, what: str = "") -> Any:
    """Read a JSON document; UserError if it is missing, empty, cut off or beyond the limits. `what` says what it is."""
    path = Path(path)
    name = f"{what} {path}".strip()
    text = read_text(path, what, "JSON text")
    if not text.strip():
        raise UserError(f"{name} is empty", AGAIN)
    try:
        data = parse_json(text)
        _check_sound(data)
    except json.JSONDecodeError as reason:
        raise UserError(f"{name} is cut off or no JSON (line {reason.lineno}: {reason.msg})", AGAIN) from reason
    except ValueError as reason:
        raise UserError(f"{name} cannot be used: {reason}", AGAIN) from reason
    return data


def read_object(path: Path, what: str = "") -> Document:
    """As read_json, and UserError for JSON that is no object."""
    data = read_json(path, what)
    if not isinstance(data, dict):
        raise UserError(f"{what} {path}".strip() + " holds no JSON object", AGAIN)
    return data


def read_as(path: Path, kind: type[T], what: str, remedy: str = AGAIN) -> T:
    """Read a JSON document as the type that declares what is in it; UserError, naming the field, where it is not."""
    return convert(read_object(path, what), kind, f"{what} {path}", remedy)


def convert(data: Any, kind: type[T], name: str, remedy: str = AGAIN) -> T:
    """Plain data as a declared type (a dataclass or msgspec.Struct); UserError, naming the field, where it is not."""
    import msgspec

    try:
        return msgspec.convert(data, kind)
    except (ValueError, OverflowError) as reason:
        said, _, field = str(reason).replace("`", "").partition(" - at $")
        place = f" at {field.lstrip('.')}" if field else ""
        raise UserError(f"{name} cannot be used: {said[:1].lower()}{said[1:]}{place}", remedy) from reason


def check_regular(path: Path) -> None:
    """UserError for a path that is there and is no file: a reader might wait for ever at a pipe."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no regular file", "move it away, or choose another @run")


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, each with its end; one that is larger than a document may be comes in pieces."""
    with path.open("rb") as stream:
        while line := stream.readline(MOST_BYTES):
            yield line


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text; ValueError for what is none, has a key twice, NaN, or is nested too deep."""
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def json_or_none(text: str | bytes) -> Any:
    """The value of JSON text; None for what is none."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON from its pairs; ValueError where a key stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        left = dict.fromkeys(found)
        twice = next(name for name, _ in pairs if left.pop(name, name) is not None)
        raise ValueError(f"the key {shown(twice)} stands twice")
    return found


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _check_sound(data: Any) -> None:
    """ValueError for data nested too deep, numbers too long or not finite, and text that is half a character."""
    level = [data]
    for _ in range(MOST_DEPTH):
        level = [one for value in level for one in _inner(value)]
        if not level:
            return
    raise ValueError("it is nested too deep")


def _inner(value: Any) -> Iterator[Any]:
    """What a value holds, once it is found sound itself."""
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value
    elif isinstance(value, str):
        if not value.isascii():
            value.encode()  # half of a surrogate pair cannot be written again: UnicodeEncodeError is a ValueError
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number in it is too large")
    elif type(value) is int and abs(value) >= 10**MOST_DIGITS:
        raise ValueError(f"a number in it has more than {MOST_DIGITS} digits")


def read_yaml(path: Path, what: str) -> Any:
    """Read a YAML document; UserError if it is missing, no YAML, or beyond the limits."""
    import yaml

    name = f"{what} {path}"
    try:
        return parse_yaml(read_text(path, what, remedy="check the path: it must be a YAML file"))
    except yaml.YAMLError as reason:
        mark = getattr(reason, "problem_mark", None)
        said = getattr(reason, "problem", None) or str(reason).splitlines()[0]
        place = f" (line {mark.line + 1})" if mark else ""
        raise UserError(f"{name} is no YAML: {said}{place}", "mend the file") from reason
    except (ValueError, OverflowError, RecursionError) as reason:
        raise UserError(f"{name} cannot be used: {shown(str(reason))}", "mend the file") from reason


def parse_yaml(text: str) -> Any:
    """The value of YAML text: yaml.YAMLError, ValueError or OverflowError for what is none.

    Plain values alone: aliases and tags are refused, and a date is a word.
    """
    import yaml

    return yaml.load(text, Loader=_plain_loader())


@cache
def _plain_loader() -> Any:
    """PyYAML's safe loader without what a recipe does not need: aliases may say a value that fills the memory."""
    import yaml

    class PlainLoader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise yaml.MarkedYAMLError(
                    problem="anchors and aliases say nothing here", problem_mark=event.start_mark
                )
            self.depth += 1
            if self.depth > MOST_DEPTH:
                raise yaml.MarkedYAMLError(problem="it is nested too deep", problem_mark=event.start_mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found = super().construct_mapping(node, deep)
            if isinstance(found, dict) and len(found) < len(node.value):
                raise yaml.MarkedYAMLError(problem="a key stands twice", problem_mark=node.start_mark)
            return found

        def construct_number(self, node: Any) -> Any:
            if len(node.value) > MOST_DIGITS:
                raise ValueError(f"a number in it has more than {MOST_DIGITS} digits")
            whole = node.tag.endswith(":int")
            return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)

    tag = "tag:yaml.org,2002:"
    plain = [tag + name for name in ("null", "bool", "str", "seq", "map")]
    number = PlainLoader.construct_number
    PlainLoader.yaml_constructors = {
        **{name: one for name, one in yaml.SafeLoader.yaml_constructors.items() if name in plain},
        **{tag + "int": number, tag + "float": number, None: yaml.SafeLoader.construct_undefined},
    }
    PlainLoader.yaml_implicit_resolvers = {
        first: [(name, pattern) for name, pattern in one if not name.endswith((":timestamp", ":merge", ":value"))]
        for first, one in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return PlainLoader
