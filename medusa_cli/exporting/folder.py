"""A folder that is exported: it appears whole or not at all, with the checksum of every file."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from medusa_cli.errors import UserError
from medusa_cli.runs.files import replacing_folder

CHECKSUMS = "SHA256SUMS"


@dataclass(frozen=True)
class Exported:
    """What an export left: the folder, and lines that say how others use it (`launch`) and what changed (`notes`)."""

    folder: Path
    launch: tuple[str, ...]
    notes: tuple[str, ...] = ()


@contextmanager
def exporting(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder to fill, which becomes `folder` once its checksums are written; UserError where that holds
    anything but an earlier export and `overwrite` is not set."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"@output {folder} is a file", "give the name of a new folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UserError(f"@output {folder} is not empty", "give a new folder, or @overwrite to replace it")
    if overwrite and folder.is_dir() and any(folder.iterdir()) and not (folder / CHECKSUMS).is_file():
        raise UserError(f"@output {folder} holds other things than an export", "give a new folder")
    with replacing_folder(folder) as part:
        yield part
        for path in part.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        files = sorted(path for path in part.rglob("*") if path.is_file())
        sums = [f"{_digest(path)}  {path.relative_to(part).as_posix()}" for path in files]
        (part / CHECKSUMS).write_text("\n".join(sums) + "\n", encoding="utf-8")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
