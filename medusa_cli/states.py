"""Hidden states on disk: raw bf16 rows, appended while text is generated and read at random while heads are trained."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.errors import UserError
from medusa_cli.runs.reading import check_regular


def seal(id: str, tokens: Sequence[int], spans: Sequence[Sequence[int]], rows: Tensor) -> str:
    """What ties state rows [n, H] to the conversation that they are of: a digest of both."""
    digest = hashlib.blake2b(json.dumps([id, list(tokens), [list(span) for span in spans]]).encode(), digest_size=8)
    digest.update(_raw(rows))
    return digest.hexdigest()


def _raw(rows: Tensor) -> bytes:
    """The bytes of rows as they are on disk."""
    return rows.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


class StateStore:
    """A file of rows [H] in bf16, little-endian, without a header; whoever names rows keeps their numbers."""

    def __init__(self, path: Path, hidden_size: int) -> None:
        self.path, self.hidden_size = path, hidden_size
        self._row_bytes = 2 * hidden_size
        check_regular(path)
        path.touch(exist_ok=True)
        self._out = path.open("r+b")
        self._out.seek(0, 2)

    @property
    def rows(self) -> int:
        """How many whole rows the file holds."""
        return self.path.stat().st_size // self._row_bytes

    def append(self, rows: Tensor) -> int:
        """Write rows [n, H] at the end and flush them; return the number of the first."""
        first = self._out.tell() // self._row_bytes
        self._out.write(_raw(rows))
        self._out.flush()
        return first

    def truncate(self, rows: int) -> None:
        """Drop every row from number `rows` on, and any part of a row."""
        self._out.truncate(rows * self._row_bytes)
        self._out.seek(0, 2)

    def read(self, first: int, count: int) -> Tensor:
        """Rows first .. first + count as bf16 [count, H]; UserError where the file is too short."""
        if first < 0 or first + count > self.rows:
            raise UserError(
                f"{self.path} ends before state row {first + count}", "distil or train again in a fresh @run"
            )
        size = self.rows * self.hidden_size
        whole = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.bfloat16)
        return whole.view(-1, self.hidden_size)[first : first + count]

    def sync(self) -> None:
        """Wait until every row is on disk."""
        os.fsync(self._out.fileno())

    def close(self) -> None:
        self._out.close()
