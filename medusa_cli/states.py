"""Hidden states on disk: raw bf16 rows, appended while text is generated and read at random while heads are trained."""

import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.errors import UserError
from medusa_cli.runs.reading import check_regular


def seal(id: str, tokens: Sequence[int], spans: Sequence[Sequence[int]], rows: Tensor) -> str:
    """What ties state rows [n, W] to the conversation that they are of: a digest of both."""
    digest = hashlib.blake2b(json.dumps([id, list(tokens), [list(span) for span in spans]]).encode(), digest_size=8)
    digest.update(_raw(rows))
    return digest.hexdigest()


def _raw(rows: Tensor) -> bytes:
    """The bytes of rows as they are on disk."""
    return rows.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def read_rows(path: Path, width: int, first: int, count: int) -> Tensor:
    """Rows first .. first + count of a file as bf16 [count, W], not to be written; UserError where it is too short.

    They are mapped, not read, and shared with whoever else maps them: a private mapping counts as memory in full.
    """
    row = 2 * width
    with path.open("rb") as file:
        if first < 0 or (first + count) * row > os.fstat(file.fileno()).st_size:
            raise UserError(f"{path} ends before state row {first + count}", "distil or train again in a fresh @run")
        if not count:
            return torch.empty(0, width, dtype=torch.bfloat16)
        whole = mmap.mmap(file.fileno(), (first + count) * row, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        found = torch.frombuffer(whole, dtype=torch.bfloat16, offset=first * row, count=count * width)
    return found.view(count, width)


class StateStore:
    """A file of rows [W] in bf16, little-endian, without a header; whoever names rows keeps their numbers."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width = path, width
        self._row_bytes = 2 * width
        check_regular(path)
        path.touch(exist_ok=True)
        self._out = path.open("r+b")
        self._out.seek(0, 2)

    @property
    def rows(self) -> int:
        """How many whole rows the file holds."""
        return os.fstat(self._out.fileno()).st_size // self._row_bytes

    def append(self, rows: Tensor) -> int:
        """Write rows [n, W] at the end and flush them; return the number of the first."""
        first = self._out.tell() // self._row_bytes
        self._out.write(_raw(rows))
        self._out.flush()
        return first

    def truncate(self, rows: int) -> None:
        """Drop every row from number `rows` on, and any part of a row."""
        self._out.truncate(rows * self._row_bytes)
        self._out.seek(0, 2)

    def read(self, first: int, count: int) -> Tensor:
        """As `read_rows`, of this file."""
        return read_rows(self.path, self.width, first, count)

    def sync(self) -> None:
        """Wait until every row is on disk."""
        os.fsync(self._out.fileno())

    def close(self) -> None:
        self._out.close()
