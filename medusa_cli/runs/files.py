"""Files that are never half written, and JSON that is read with one clear line where it is not."""

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from medusa_cli.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write; on success it becomes `path` in one move, on failure it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    handle, part = _temporary(path)
    try:
        yield part
        _to_disk(part)
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
        os.close(handle)


def _temporary(path: Path) -> tuple[int, Path]:
    """A new file beside `path`, locked as long as its writer lives, and its handle."""
    while True:
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
        except OSError as reason:
            reason.filename = str(path)  # the file that cannot be written, not its name for the time being
            raise
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)  # another writer swept it away before it was locked


def _sweep(path: Path) -> None:
    """Remove what writers of `path` left that were killed: temporary files that nobody has locked."""
    ours = re.compile(re.escape(f".{path.name}.") + "[a-z0-9_]{8}" + re.escape(path.suffix))
    for left in path.parent.iterdir():
        if not ours.fullmatch(left.name):
            continue
        with suppress(OSError), left.open("rb") as held:  # it is written, or gone
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _to_disk(path: Path) -> None:
    """Wait until a file's content is on disk: a rename may get there first."""
    with path.open("rb") as written:
        os.fsync(written.fileno())


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to fill; on success it replaces `path`, on failure it is removed."""
    part, old = path.with_name(f".{path.name}.part"), _aside(path)
    restore(path)
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        for written in part.rglob("*"):
            if written.is_file():
                _to_disk(written)
        if path.exists():
            path.rename(old)
        part.rename(path)
    finally:
        restore(path)
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)


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


def read_json(path: Path, what: str = "") -> Any:
    """Read a JSON document; UserError if it is missing, empty or cut off. `what` says which command writes it."""
    name = f"{what} {path}".strip()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as reason:
        raise UserError(f"{name} does not exist", "check the path") from reason
    except (UnicodeDecodeError, IsADirectoryError) as reason:
        raise UserError(f"{name} is no JSON text file", "check the path") from reason
    if not text.strip():
        raise UserError(f"{name} is empty", "write it again with the command that made it")
    try:
        return json.loads(text)
    except json.JSONDecodeError as reason:
        raise UserError(
            f"{name} is cut off or no JSON (line {reason.lineno}: {reason.msg})",
            "write it again with the command that made it",
        ) from reason


def read_object(path: Path, what: str = "") -> dict[str, Any]:
    """As read_json, and UserError for JSON that is no object."""
    data = read_json(path, what)
    if not isinstance(data, dict):
        raise UserError(
            f"{what} {path}".strip() + " holds no JSON object", "write it again with the command that made it"
        )
    return data
