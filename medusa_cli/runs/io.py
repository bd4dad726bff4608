"""Files and folders that are never half written."""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from medusa_cli.errors import UserError, first_line, shown

if TYPE_CHECKING:
    from torch import Tensor

# How a file is called until it is whole. One name for all, so that whoever writes next finds what was left.
TEMPORARY = ".medusa-part-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write; on success it becomes `path` in one move, on failure it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    handle, part = _temporary(path)
    try:
        yield part
        _to_disk(part)
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
        os.close(handle)


def _temporary(path: Path, folder: bool = False) -> tuple[int, Path]:
    """A new file (or folder) beside `path`, locked as long as its writer lives, and its handle."""
    while True:
        words: dict[str, Any] = {"dir": path.parent, "prefix": TEMPORARY, "suffix": f".{path.name}"}
        try:
            if folder:
                name = tempfile.mkdtemp(**words)
                handle = os.open(name, os.O_RDONLY)
            else:
                handle, name = tempfile.mkstemp(**words)
        except OSError as reason:
            reason.filename = str(path)  # the file that cannot be written, not its name for the time being
            raise
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)  # another writer swept it away before it was locked


def sweep(folder: Path) -> None:
    """Remove what writers into a folder left that were killed: temporary files and folders that nobody has locked."""
    ours = re.compile(re.escape(TEMPORARY) + r"[a-z0-9_]{8}\..+")
    for left in folder.iterdir():
        if not ours.fullmatch(left.name) or left.is_symlink() or not (left.is_file() or left.is_dir()):
            continue
        with suppress(OSError):  # it is written, or gone
            handle = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            finally:
                os.close(handle)


def _to_disk(path: Path) -> None:
    """Wait until a file's content is on disk: a rename may get there first."""
    with path.open("rb") as written:
        os.fsync(written.fileno())


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to fill; on success it replaces `path`, on failure it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    restore(path)
    handle, part = _temporary(path, folder=True)
    try:
        yield part
        for written in part.rglob("*"):
            if written.is_file():
                _to_disk(written)
        part.chmod(0o755)
        _replace(path, part)
    finally:
        restore(path)
        for leftover in (part, _aside(path)):
            shutil.rmtree(leftover, ignore_errors=True)
        os.close(handle)


def _replace(path: Path, part: Path) -> None:
    """Put a folder in the place of another, in two moves: between them a reader may put the old one back."""
    while True:
        if path.exists():
            shutil.rmtree(_aside(path), ignore_errors=True)
            path.rename(_aside(path))
        try:
            part.rename(path)
            return
        except OSError as reason:
            if reason.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def restore(path: Path) -> None:
    """Put a folder back whose replacement was cut off between its two moves."""
    if _aside(path).is_dir() and not path.exists():
        _aside(path).rename(path)


def _aside(path: Path) -> Path:
    """Where a folder lies while another one takes its place."""
    return path.with_name(f".{path.name}.old")


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a whole file under a temporary name, flush it to disk, then rename it."""
    with replacing(path) as part:
        part.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, obj: Any) -> None:
    """Write one JSON document atomically."""
    write_atomic(path, json.dumps(obj, indent=1, ensure_ascii=False) + "\n")


class Malformed(ValueError):
    """A record that cannot be used; the text is the reason it is counted under."""


@dataclass
class ReadReport:
    """Counts of records read, and of records skipped by reason."""

    read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        """Counts a skipped record."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def skip_line(self, number: int, reason: str) -> None:
        """Counts a skipped line; an `on_bad` of `read_jsonl`."""
        self.skip(reason)

    def __str__(self) -> str:
        parts = [f"{self.read:,} conversations read"]
        return ", ".join(parts + [f"{count:,} skipped ({why})" for why, count in sorted(self.skipped.items())])


class HasId(Protocol):
    """Record with an id."""

    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=HasId)


def usable(records: Iterable[Any], make: Callable[[Any], Item], report: ReadReport) -> list[Item]:
    """Returns what `make` returns for each record, one item an id; the report counts Malformed and repeated ones."""
    items: dict[str, Item] = {}
    for record in records:
        try:
            item = make(record)
        except Malformed as reason:
            report.skip(str(reason))
            continue
        if item.id in items:
            report.skip("same id as an earlier one")
            continue
        items[item.id] = item
        report.read += 1
    return list(items.values())


T = TypeVar("T")
# A JSON object: whoever reads one knows its keys, or has it read as a declared type (`read_as`).
Document = dict[str, Any]

# What a document may be: the largest this tool writes itself are a hundredth of it.
MAX_BYTES = 16 << 20
MAX_DEPTH = 64
MAX_DIGITS = 40
# Characters of a JSON array that are read at a time.
CHUNK = 1 << 20
_GAP = re.compile(r"[ \t\r\n,]*")
AGAIN = "write it again with the command that made it"


def read_text(path: Path, what: str = "", kind: str = "text", remedy: str = "check the path") -> str:
    """The text of a file; UserError where it is missing, no regular file, too large, or no UTF-8."""
    name = f"{what} {path}".strip()
    if not path.exists():
        raise UserError(f"{name} does not exist", remedy)
    if not path.is_file():  # a pipe might never end
        raise UserError(f"{name} is no {kind} file", remedy)
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError(f"{name} is larger than {MAX_BYTES >> 20} MiB", remedy)
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


def _ignore(number: int, reason: str) -> None:
    """Passes over a bad line."""


def _unchanged(value: Any) -> Any:
    return value


def read_jsonl(
    path: Path,
    on_bad: Callable[[int, str], object] = _ignore,
    make: Callable[[Any], Any] = _unchanged,
    *,
    array: bool = False,
) -> Iterator[Any]:
    """Yields what `make` returns for each JSON value of a JSONL file; blank lines are left out.

    on_bad is told the number and the fault of a line that is no JSON, or for which `make` raises ValueError; such a
    line is passed over unless on_bad raises. array: a file that begins with "[" is read as one JSON array.
    """
    for number, value in _array_items(path) if array and _is_array(path) else _lines(path):
        try:
            if isinstance(value, ValueError):
                raise value
            result = make(value)
        except ValueError as reason:
            on_bad(number, str(reason))
            continue
        yield result


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each line, a ValueError for a line that is no JSON or too large."""
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(MAX_BYTES):
            number += 1
            if not line.strip():
                continue
            try:
                value = parse_json(line)
            except ValueError:  # no JSON or no UTF-8
                value = ValueError("no JSON" if line.endswith(b"\n") else "cut off")
            yield number, value


def _is_array(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4096).lstrip().startswith(b"[")


def _array_items(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each item of a JSON array, and a ValueError where the array breaks off.

    The file is read in chunks: seeds of several gigabytes need not fit the memory.
    """
    decoder = json.JSONDecoder(object_pairs_hook=unique, parse_constant=_refuse)
    with path.open(encoding="utf-8", errors="replace") as stream:
        text, start, number = stream.read(CHUNK).lstrip()[1:], 0, 1
        while True:
            gap = _GAP.match(text, start)
            start = gap.end() if gap else start
            if text.startswith("]", start):
                return
            try:
                value, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                value, end = ValueError("cut off"), len(text)
            if end == len(text):  # the item may go on in the next chunk
                more = stream.read(CHUNK) if end - start <= MAX_BYTES else ""
                if more:
                    text, start = text[start:] + more, 0
                    continue
            yield number, value
            if isinstance(value, ValueError):
                return
            start, number = end, number + 1


def repair_jsonl(path: Path) -> None:
    """Cuts off a last line that is no JSON, and ends the last line with a line break: what a crash may leave."""
    end = good = 0
    last = b""
    with path.open("r+b") as stream:
        while line := stream.readline(MAX_BYTES):
            good, end, last = end, end + len(line), line
        if last.strip() and json_or_none(last) is None:
            stream.truncate(good)
        elif last and not last.endswith(b"\n"):
            stream.write(b"\n")


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
    for _ in range(MAX_DEPTH):
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
    elif type(value) is int and abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"a number in it has more than {MAX_DIGITS} digits")


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
            if self.depth > MAX_DEPTH:
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
            if len(node.value) > MAX_DIGITS:
                raise ValueError(f"a number in it has more than {MAX_DIGITS} digits")
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


FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("I32", "I64")


def read_weights(
    path: Path,
    what: str,
    shapes: Mapping[str, Sequence[int]] | None = None,
    ids: Mapping[str, Sequence[int]] = {},
    types: Sequence[str] = FLOATS,
) -> "dict[str, Tensor]":
    """Returns the tensors named in `shapes` (None: all there are), of `types`, and in `ids`, integers; others are left.

    UserError, naming the first tensor that is missing, of another shape or type, or not finite. Nothing is allocated
    before all names, shapes and types have been found right.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    remedy = "make the file again with the command that made it, or give another"
    if not path.is_file():
        raise UserError(f"{what} {path} does not exist or is no file", remedy)
    try:
        with safe_open(path, framework="pt") as file:
            there = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
            found = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in there.items()}
            wanted = {name: shape for name, (_, shape) in found.items()} if shapes is None else {**shapes, **ids}
            for name, shape in wanted.items():
                _check(
                    f"{what} {path}: the tensor {name!r}",
                    found.get(name),
                    tuple(shape),
                    INTEGERS if name in ids else types,
                    remedy,
                )
            tensors = {name: file.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError) as reason:
        raise UserError(f"{what} {path} cannot be read: {first_line(reason)}", remedy) from reason
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(f"{what} {path}: the tensor {name!r} holds numbers that are not finite", remedy)
    return tensors


def _check(
    name: str, found: tuple[str, tuple[int, ...]] | None, shape: tuple[int, ...], types: Sequence[str], remedy: str
) -> None:
    """Raises UserError unless a tensor is there, of this shape and one of these types."""
    if found is None:
        raise UserError(f"{name} is missing", remedy)
    kind, sizes = found
    if kind not in types:
        raise UserError(f"{name} is of type {kind}, not {' or '.join(types)}", remedy)
    if sizes != shape:
        raise UserError(f"{name} is of shape {list(sizes)}, not {list(shape)}", remedy)
