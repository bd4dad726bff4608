"""Files and folders that are never half written."""

import errno
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
