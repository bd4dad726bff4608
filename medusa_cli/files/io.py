"""Atomic writes of files and folders, and bounded readers of JSON, JSONL and YAML."""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from medusa_cli.errors import UserError, shown

# The prefix of unfinished files. If a writer was killed, the next writer removes its unfinished files.
TEMPORARY = ".medusa-part-"
_LEFTOVER = re.compile(re.escape(TEMPORARY) + r"[a-z0-9_]{8}\..+")
_GAP = re.compile(r"[ \t\r\n,]*")
T = TypeVar("T")
Document = dict[str, Any]  # a JSON object
# Limits of a document. The largest documents are reports of `bench`, which hold all questions and answers.
MAX_BYTES = 64 << 20
MAX_DEPTH = 64  # nesting depth of YAML
BOM = b"\xef\xbb\xbf"  # some programs begin UTF-8 files with it
CHUNK = 1 << 20  # characters of a JSON array that are read at a time
AGAIN = "write it again with the command that made it"


def write_atomic(path: Path, data: str | bytes) -> None:
    """Writes a file completely or not at all."""
    with replacing(path) as part:
        part.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, obj: Any) -> None:
    """Writes one JSON document atomically."""
    write_atomic(path, json.dumps(obj, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write; on success, the new file replaces `path`, or the file that `path` links to.

    The new file gets the mode of the file that it replaces, or else the mode that the umask gives.
    """
    if path.is_symlink():
        path = path.resolve()
    with _temporary(path, folder=False) as part:
        mode = _mode_of(path if path.exists() else part)
        part.chmod(mode | stat.S_IRUSR | stat.S_IWUSR)  # the owner must be able to write it
        yield part
        _flush(part)
        part.chmod(mode)
        part.replace(path)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder to fill; on success, the folder replaces `path`, or the folder that `path` links to.

    The folder and its files get the same modes as with `replacing`.
    """
    path = path.resolve()
    restore(path)
    with _temporary(path, folder=True) as part:
        new_mode = _mode_of(part)
        try:
            part.chmod(stat.S_IRWXU)  # only the owner may read it until it is complete
            yield part
            for written in part.rglob("*"):
                if written.is_file():
                    _flush(written)
                _set_mode(written, path / written.relative_to(part), new_mode)
            _set_mode(part, path, new_mode)
            _replace_folder(path, part)
        finally:
            restore(path)
            shutil.rmtree(_aside(path), ignore_errors=True)


@contextmanager
def _temporary(path: Path, folder: bool) -> Iterator[Path]:
    """Yields a new file or folder next to `path`, locked while its writer lives; then removes it if it still exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    while True:
        try:
            name = str(path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}.{path.name}"))
            # The system applies the umask, which no thread can read without changing it.
            if folder:
                os.mkdir(name)
                handle = os.open(name, os.O_RDONLY)
            else:
                handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as reason:
            reason.filename = str(path)  # the file that cannot be written, not its temporary name
            raise
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            break
        os.close(handle)  # another writer removed it before it was locked
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True) if folder else Path(name).unlink(missing_ok=True)
        os.close(handle)


def _mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _set_mode(written: Path, old: Path, new_mode: int) -> None:
    """Gives a file or folder the mode of the one that it replaces, or else `new_mode`; new files are not executable.

    new_mode: the mode of a new folder. Without this function, only the owner could read files that safetensors writes.
    """
    if written.is_symlink():
        return
    if old.exists() and old.is_dir() == written.is_dir():
        written.chmod(_mode_of(old))
    else:
        written.chmod(new_mode if written.is_dir() else new_mode & 0o666)


def sweep(folder: Path) -> None:
    """Removes temporary files and folders of killed writers, which nobody has locked."""
    for left in folder.iterdir():
        if (
            not _LEFTOVER.fullmatch(left.name)
            or left.is_symlink()
            or not (left.is_file() or left.is_dir())
        ):
            continue
        with suppress(OSError):  # it is being written, or gone
            handle = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            finally:
                os.close(handle)


def _flush(path: Path) -> None:
    """Waits until a file's content is on disk; otherwise, a later rename could reach the disk first."""
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _replace_folder(path: Path, part: Path) -> None:
    """Replaces a folder in two moves, and repeats them if a reader restored the old folder in between."""
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
    """Restores a folder whose replacement was interrupted between its two moves; readers call this first."""
    if path.exists():
        return
    with suppress(ValueError):  # a path without a name, or with a zero byte
        path = path.resolve()  # a link stays; its target is replaced
        if _aside(path).is_dir() and not path.exists():
            _aside(path).rename(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def check_regular(path: Path) -> None:
    """Raises UserError for a path that is not a regular file, because reading a pipe might never end."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file", "move it away, or choose another @run")


def read_text(
    path: Path, what: str = "", kind: str = "text", remedy: str = "check the path"
) -> str:
    """Returns a file's text; raises UserError if it is missing, not a regular file, too large or not UTF-8."""
    name = f"{what} {path}".strip()
    if not path.exists():
        raise UserError(f"{name} does not exist", remedy)
    if not path.is_file():  # a pipe might never end
        raise UserError(f"{name} is not a {kind} file", remedy)
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError(f"{name} is larger than {MAX_BYTES >> 20} MiB", remedy)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise UserError(f"{name} is not a {kind} file", remedy) from reason


def read_json(path: Path, what: str = "") -> Any:
    """Returns a JSON document; raises UserError if it is missing, empty, cut off or not JSON."""
    text = read_text(path, what, "JSON text")
    try:
        return _parse(text)
    except ValueError as reason:
        fault = f"{what} {path}".strip() + f" is empty, cut off or not JSON: {reason}"
        raise UserError(fault, AGAIN) from reason


def read_object(path: Path, what: str = "") -> Document:
    """Returns a JSON object; raises UserError as `read_json` does, and for other JSON values."""
    data = read_json(path, what)
    if not isinstance(data, dict):
        raise UserError(f"{what} {path}".strip() + " holds no JSON object", AGAIN)
    return data


def nested(value: Any) -> dict[str, Any]:
    """Returns a nested object of a JSON document, or an empty dict for any other value."""
    return value if isinstance(value, dict) else {}


def read_as(path: Path, kind: type[T], what: str, remedy: str = AGAIN) -> T:
    """Returns a JSON document as a declared type; raises UserError with the name of an invalid field."""
    return convert(read_object(path, what), kind, f"{what} {path}", remedy)


def convert(data: Any, kind: type[T], name: str, remedy: str = AGAIN) -> T:
    """Returns plain data as a dataclass or msgspec.Struct; raises UserError with the name of an invalid field."""
    try:
        return msgspec.convert(data, kind)
    except (ValueError, OverflowError) as reason:
        text, _, field = str(reason).replace("`", "").partition(" - at $")
        place = f" at {field.lstrip('.')}" if field else ""
        fault = f"{name} cannot be used: {text[:1].lower()}{text[1:]}{place}"
        raise UserError(fault, remedy) from reason


def _parse(text: str | bytes) -> Any:
    """Returns the value of a JSON text; raises ValueError for other texts and for deep nesting."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


# The description of a lone surrogate in error messages.
HALF = "half a character"
KEYS = 8  # the maximum number of keys that a report names


def is_whole(text: str) -> bool:
    """Returns False for a text with a lone surrogate, which can be neither tokenized nor written."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Malformed(ValueError):
    """Says why a record is unusable; a report counts the record under this text."""


@dataclass
class ReadReport:
    """Counts the records that were read, the skipped records by reason, and the keys that were not read."""

    read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        """Counts a skipped record."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def skip_line(self, number: int, reason: str) -> None:
        """Counts a skipped line; serves as `on_bad` for `read_jsonl`."""
        self.skip(reason)

    def leave_out(self, keys: Iterable[str]) -> None:
        """Counts the keys of a record that are not read."""
        for key in keys:
            self.unread[key] = self.unread.get(key, 0) + 1

    def __str__(self) -> str:
        parts = [f"{self.read:,} conversations read"]
        parts += [f"{count:,} skipped ({why})" for why, count in sorted(self.skipped.items())]
        common = sorted(self.unread, key=lambda key: (-self.unread[key], key))
        keys = [f"{shown(key)} in {self.unread[key]:,}" for key in common[:KEYS]]
        if len(common) > KEYS:
            keys.append(f"{len(common) - KEYS:,} more")
        if keys:
            parts.append(f"keys not used: {', '.join(keys)}")
        return ", ".join(parts)


def usable(records: Iterable[Any], make: Callable[[Any], T], report: ReadReport) -> list[T]:
    """Returns the items that `make` makes of records, one per id; the report counts malformed and repeated records."""
    items: dict[str, Any] = {}
    for record in records:
        try:
            item: Any = make(record)
        except Malformed as reason:
            report.skip(str(reason))
            continue
        if item.id in items:
            report.skip("same id as an earlier one")
            continue
        items[item.id] = item
        report.read += 1
    return list(items.values())


def read_jsonl(
    path: Path,
    on_bad: Callable[[int, str], object] = lambda number, reason: None,
    *,
    array: bool = False,
) -> Iterator[Any]:
    """Yields each JSON value in a JSONL file; blank lines are left out.

    on_bad: receives the number of a line that is not JSON, and the line's fault. The line is skipped unless on_bad
    raises. array: read a file that begins with "[" as one JSON array.
    """
    for number, value in _array_items(path) if array and _is_array(path) else _lines(path):
        if isinstance(value, ValueError):
            on_bad(number, str(value))
        else:
            yield value


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each line; the value is a ValueError if the line is not JSON or too large."""
    with path.open("rb") as stream:
        number = 0
        ended = True
        while line := stream.readline(MAX_BYTES):
            begins = ended
            ended = line.endswith(b"\n")
            if not number:
                line = line.removeprefix(BOM)
            number += begins
            # The rest of a line that is too large, or a blank line.
            if not begins or not line.strip():
                continue
            value: Any
            if len(line) == MAX_BYTES and not ended:
                value = ValueError("too large")
            else:
                try:
                    value = _parse(line)
                except ValueError:  # not JSON or not UTF-8
                    value = ValueError("no JSON" if ended else "cut off")
            yield number, value


def _is_array(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4096).removeprefix(BOM).lstrip().startswith(b"[")


def _array_items(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the items of a JSON array as number and value; if the array is cut off, the last value is a ValueError.

    The file is read in chunks, so that files of several gigabytes need not fit into memory.
    """
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig", errors="replace") as stream:
        text = stream.read(CHUNK).lstrip()[1:]
        start = 0
        number = 1
        while True:
            gap = _GAP.match(text, start)
            start = gap.end() if gap else start
            if text.startswith("]", start):
                return
            try:
                value, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                value = ValueError("cut off")
                end = len(text)
            if end == len(text) and end - start <= MAX_BYTES and (more := stream.read(CHUNK)):
                text, start = text[start:] + more, 0  # the item may continue in the next chunk
                continue
            yield number, value
            if isinstance(value, ValueError):
                return
            start = end
            number += 1


def repair_jsonl(path: Path) -> None:
    """Removes a last line that is not JSON, or adds the line break that it lacks; a crash may leave such a line."""
    end = good = 0
    last = b""
    with path.open("r+b") as stream:
        while line := stream.readline(MAX_BYTES):
            good = end
            end += len(line)
            last = line
        try:
            _parse(last or b"{}")
        except ValueError:
            if last.strip():
                stream.truncate(good)
            return
        if last and not last.endswith(b"\n"):
            stream.write(b"\n")


class _Loader(yaml.SafeLoader):
    """Refuses deep nesting, repeated keys and aliases. Aliases may expand to a value that fills the memory."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if event.anchor is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not allowed", problem_mark=event.start_mark
            )
        if self.depth == MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem="it is nested too deep", problem_mark=event.start_mark
            )
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.MappingNode) and len(
            {str(key.value) for key, _ in node.value}
        ) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key stands twice", problem_mark=node.start_mark)
        return node


def parse_yaml(text: str) -> Any:
    """Returns the value of YAML text; raises yaml.YAMLError, ValueError or OverflowError."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path) -> Any:
    """Returns a recipe's YAML document; raises UserError if it is missing, not YAML, or beyond the limits."""
    try:
        remedy = "check the path: it must be a YAML file"
        return parse_yaml(read_text(path, "the recipe", remedy=remedy))
    except yaml.YAMLError as reason:
        mark = getattr(reason, "problem_mark", None)
        problem = getattr(reason, "problem", None) or str(reason).splitlines()[0]
        line = f" (line {mark.line + 1})" if mark else ""
        fault = f"the recipe {path} is not valid YAML: {problem}{line}"
        raise UserError(fault, "fix the file") from reason
    except (ValueError, OverflowError) as reason:
        fault = f"the recipe {path} cannot be used: {shown(str(reason))}"
        raise UserError(fault, "fix the file") from reason
