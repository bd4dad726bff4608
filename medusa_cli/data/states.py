"""Hidden states on disk: raw bf16 rows, appended while text is generated and read at random while heads are trained."""

import hashlib
import json
import mmap
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.data.conversation import Conversation
from medusa_cli.errors import UserError
from medusa_cli.runs.io import check_regular


def states_digest(conversation: Conversation, rows: Tensor) -> str:
    """Returns a digest of a conversation and its state rows [n, W], which ties them together."""
    text = json.dumps([conversation.id, conversation.tokens, conversation.spans])
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    digest.update(_raw(rows))
    return digest.hexdigest()


def _raw(rows: Tensor) -> bytes:
    """Returns the bytes of rows as they are on disk."""
    return rows.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def read_rows(path: Path, width: int, first: int, count: int) -> Tensor:
    """Returns rows first .. first + count of a file as read-only bf16 [count >= 1, W].

    The rows are mapped and shared between processes: a private mapping counts as memory in full. Raises UserError
    where the file is too short.
    """
    row = 2 * width
    with path.open("rb") as file:
        if (first + count) * row > os.fstat(file.fileno()).st_size:
            raise UserError(f"{path} ends before state row {first + count}", "delete it to compute the states again")
        mapped = mmap.mmap(file.fileno(), (first + count) * row, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        rows = torch.frombuffer(mapped, dtype=torch.bfloat16, offset=first * row, count=count * width)
    return rows.view(count, width)


class StateStore:
    """File of rows [W] in bf16, little-endian, without a header; callers keep the numbers of their rows."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width, self._row_bytes = path, width, 2 * width
        check_regular(path)
        path.touch(exist_ok=True)
        self._out = path.open("r+b")

    @property
    def rows(self) -> int:
        """Returns the number of whole rows in the file."""
        return os.fstat(self._out.fileno()).st_size // self._row_bytes

    def append(self, rows: Tensor) -> int:
        """Writes rows [n, W] at the end and returns the number of the first."""
        first = self.rows
        self.write(rows, first)
        return first

    def write(self, rows: Tensor, first: int) -> None:
        """Writes rows [n, W] from number `first` on, and flushes them."""
        self._out.seek(first * self._row_bytes)
        self._out.write(_raw(rows))
        self._out.flush()

    def truncate(self, rows: int) -> None:
        """Drops every row from number `rows` on, and any part of a row; makes a shorter file as long with zeros."""
        self._out.truncate(rows * self._row_bytes)

    def sync(self) -> None:
        """Waits until every row is on disk."""
        os.fsync(self._out.fileno())

    def close(self) -> None:
        self._out.close()
