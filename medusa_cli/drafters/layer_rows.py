"""The rows of a drafter's decoder layer for one sequence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

# Caches hold a multiple of this many rows; the native library needs a multiple of 16.
ROWS = 64


class LayerRows:
    """Holds the keys and values [heads, rows, D] of one decoder layer for one sequence, by position.

    Rows are in order of position. A position may have no row, and the rows of a tree share
    positions. The native library lays out the keys of each 16 rows as [D, 16].
    """

    def __init__(self) -> None:
        self.length = 0
        self._positions: list[int] = []
        self.rows: Tensor | None = None  # [2, heads, C, D], of which `length` are in use
        self._halves: tuple[Tensor, ...] = ()  # keys and values

    def append(
        self, keys: Tensor, values: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Adds rows [heads, n, D] at positions [n]; returns the keys and values of all rows."""
        heads, count, dim = keys.shape
        known_keys, known_values = self.room(count, heads, dim, keys)
        start = self.length
        self.count(positions)
        known_keys[:, start : self.length] = keys
        known_values[:, start : self.length] = values
        return self.filled()

    def room(self, count: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns buffers of keys and values [heads, C, D] with room for `count` further rows."""
        end = self.length + count
        if self.rows is None or self.rows.shape[2] < end:
            self.move(like.new_zeros(2, heads, whole_blocks(2 * end), dim))
        keys, values = self._halves
        return keys, values

    def filled(self) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [heads, rows, D] in use."""
        keys, values = self._halves
        return keys[:, : self.length], values[:, : self.length]

    def count(self, positions: Sequence[int]) -> None:
        """Registers rows that a CUDA graph or the native library has written in place."""
        self._positions += positions
        self.length += len(positions)

    def move(self, rows: Tensor) -> None:
        """Moves the cache to other memory, which has room for the rows in use."""
        if self.rows is not None:
            # The native library's keys of 16 rows are interleaved, so whole blocks move.
            used = min(whole_blocks(self.length), self.rows.shape[2], rows.shape[2])
            rows[:, :, :used] = self.rows[:, :, :used]
        self.rows = rows
        self._halves = rows.unbind()

    def truncate(self, position: int) -> int:
        """Forgets the rows from a position on; returns the position after the last remaining row."""
        self.length = bisect_left(self._positions, position)
        del self._positions[self.length :]
        return self._positions[-1] + 1 if self._positions else 0


def whole_blocks(rows: int) -> int:
    """Returns a number of rows, rounded up to a multiple of ROWS."""
    return -(-rows // ROWS) * ROWS


def whole_mask(mask: Tensor, rows: int) -> Tensor:
    """Returns the mask [n, rows] of new rows over all rows, given their mask [n, m] over the last m rows."""
    return F.pad(mask, (rows - mask.shape[1], 0), value=True)
