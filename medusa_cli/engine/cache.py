"""The KV cache: slots in one growing buffer, each with its own sequence, length and accepted path."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from medusa_cli.device import numbered, upload

FIRST_ROWS = 256


class Slots(ABC):
    """The slots of a cache: S sequences, each with its own length, in buffers that differ between engines.

    The rows of slot s from lengths[s] on are free: a pass writes them, and `keep` selects the rows
    that stay. Free rows hold finite numbers, so that a matmul may run over them under a mask. The
    capacity C, in rows per slot, doubles as needed. layers: the number of layers that have keys.
    """

    # True if a row takes memory only once it has been written.
    lazy = False

    def __init__(self, layers: int, slots: int = 1, capacity: int = FIRST_ROWS) -> None:
        self.layers = layers
        self.slots = slots
        self.capacity = max(1, capacity)
        self.lengths = [0] * slots

    @abstractmethod
    def resize(self, capacity: int) -> None:
        """Allocates exactly this many rows in every slot; `capacity` must hold the rows in use."""

    @abstractmethod
    def keep(self, slot: int, path: Sequence[int]) -> None:
        """Keeps the rows `path` of those just written to a slot: ascending indices, 0 for the first row written."""

    @abstractmethod
    def views(self, slot: int, start: int, end: int) -> list[Tensor]:
        """Returns views of a slot's rows start .. end - 1; their number and shapes depend on the engine."""

    def swap(self, slot: int, other: int) -> None:
        """Exchanges two slots."""
        self.lengths[slot], self.lengths[other] = self.lengths[other], self.lengths[slot]

    @property
    def nbytes(self) -> int:
        """Returns the size of the buffers in bytes, including free rows."""
        return 0

    @property
    def stateful(self) -> bool:
        """Returns True if slots have running states besides rows."""
        return False

    def held_bytes(self, slot: int) -> int:
        """Returns the bytes that a slot holds in addition to the rows of its tokens."""
        return 0

    def grown(self, rows: int) -> int:
        """Returns the capacity, doubled until it holds this many rows."""
        capacity = self.capacity
        while capacity < rows:
            capacity *= 2
        return capacity

    def missing_rows(self, wanted: Mapping[int, int]) -> int:
        """Returns the number of rows that still need memory before each slot can hold wanted[slot] rows."""
        capacity = self.grown(max(wanted.values()))
        # The old buffers stay in memory until they have been copied.
        return 0 if capacity == self.capacity else capacity * self.slots

    def release(self, slot: int) -> None:
        """Empties a slot, and frees its memory if the cache is lazy."""
        self.truncate(slot, 0)

    def reserve(self, rows: int) -> None:
        """Grows the buffers to at least this many rows in every slot."""
        if rows > self.capacity:
            self.resize(self.grown(rows))

    @torch.inference_mode()
    def lengthen(self, slot: int, length: int) -> None:
        """Adds rows of zeros to a slot as if they held tokens, so that passes after a long text can be timed."""
        self.reserve(length)
        # Memory that was never written is one shared page in the CPU's cache, so reads would be too fast.
        for view in self.views(slot, -(-self.lengths[slot] // 16) * 16, length):
            view.zero_()
        self.lengths[slot] = length

    def rows(self, slot: int, start: int, end: int) -> list[Tensor]:
        """Returns copies of a slot's rows start .. end - 1, for `fill` of any cache of this kind.

        start: a multiple of 16. Running states are copied by `states_after` and `set_states` instead.
        """
        return [view.clone() for view in self.views(slot, start, end)]

    @torch.inference_mode()
    def fill(self, slot: int, start: int, end: int, rows: Sequence[Tensor]) -> None:
        """Sets rows start .. end - 1 of a slot, and its length to `end`.

        Raises ValueError if the rows come from a cache of another kind.
        """
        self.reserve(end)
        views = self.views(slot, start, end)
        if [_kind(view) for view in views] != [_kind(part) for part in rows]:
            raise ValueError(f"rows {start} .. {end - 1} are those of another cache")
        for view, part in zip(views, rows, strict=True):
            view.copy_(part)
        self.lengths[slot] = end

    def states_after(self, slot: int, length: int) -> list[Tensor] | None:
        """Returns copies of a slot's running states after `length` tokens; None if the cache does not have them."""
        return []

    def set_states(self, slot: int, states: Sequence[Tensor]) -> None:
        """Sets the running states after a slot's rows; raises ValueError if they come from another kind of cache."""
        if states:
            raise ValueError("the states are those of another cache")

    def reusable(self, slot: int, rows: int) -> int:
        """Returns the largest length, up to `rows`, to which a slot can be truncated."""
        return rows

    def truncate(self, slot: int, length: int) -> None:
        """Discards a slot's rows from `length` on; `length` must be a length that `reusable` returns."""
        self.lengths[slot] = min(self.lengths[slot], length)


class Cache(Slots):
    """The keys and values [layers, S, KV, C, D] of the sequences."""

    def __init__(self, layers: int, slots: int = 1, capacity: int = FIRST_ROWS) -> None:
        super().__init__(layers, slots, capacity)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def allocate(self, heads: int, dim: int, like: Tensor, value_dim: int | None = None) -> None:
        """Allocates the buffers for `heads` KV heads, with the number type and device of `like`.

        dim: the width of keys, and of values if value_dim is None.
        """
        self.keys, self.values = self._buffers(heads, dim, value_dim or dim, like, self.capacity)

    def _buffers(
        self, heads: int, dim: int, value_dim: int, like: Tensor, capacity: int
    ) -> tuple[Tensor, Tensor]:
        shape = (self.layers, self.slots, heads, capacity)
        if dim == value_dim:
            keys, values = like.new_zeros(2, *shape, dim).unbind()
            return keys, values
        return like.new_zeros(*shape, dim), like.new_zeros(*shape, value_dim)

    @property
    def both(self) -> Tensor:
        """Returns keys and values of equal width as one tensor [2, layers, S, KV, C, D], which one kernel can write."""
        assert self.keys is not None and self.values is not None
        assert self.keys.shape == self.values.shape
        strides = (self.keys.numel(), *self.keys.stride())
        return self.keys.as_strided((2, *self.keys.shape), strides)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (self.keys, self.values) if buffer is not None)

    def resize(self, capacity: int) -> None:
        if self.keys is not None and self.values is not None:
            used = max(self.lengths)
            heads = self.values.shape[2]
            widths = (self.keys.shape[4], self.values.shape[4])
            keys, values = self._buffers(heads, *widths, self.values, capacity)
            values[..., :used, :] = self.values[..., :used, :]
            keys[..., :used, :] = self.keys[..., :used, :]
            # The buffers are assigned last, so that the cache stays as it was if memory runs out.
            self.keys = keys
            self.values = values
        self.capacity = capacity

    @torch.inference_mode()
    def keep(self, slot: int, path: Sequence[int]) -> None:
        start = self.lengths[slot]
        done = 0
        while done < len(path) and path[done] == done:
            done += 1
        if done < len(path) and self.values is not None and self.keys is not None:
            source = upload([start + row for row in path[done:]], self.values.device)
            target = slice(start + done, start + len(path))
            for buffer in (self.keys, self.values):
                # index_select copies first, so overlapping source and target rows are safe.
                buffer[:, slot, :, target] = buffer[:, slot].index_select(2, source)
        self.lengths[slot] = start + len(path)

    def views(self, slot: int, start: int, end: int) -> list[Tensor]:
        buffers = (self.keys, self.values)
        return [buffer[:, slot, :, start:end] for buffer in buffers if buffer is not None]

    def compact(self, lengths: Tensor, path: Tensor) -> None:
        """Moves rows lengths[b] + path[b, i] of the first B slots to lengths[b] + i; path [B, P].

        Nothing is read on the host. Rows are gathered before they are written, so overlaps are safe.
        The cache's own `lengths` do not change.
        """
        size, count = path.shape
        part = self.both[:, :, :size].flatten(0, 1)
        shape = (*part.shape[:3], count, part.shape[4])
        columns = lengths[:, None] + numbered(count, path.device)
        source = (lengths[:, None] + path).view(1, size, 1, count, 1).expand(shape)
        target = columns.view(1, size, 1, count, 1).expand(shape)
        part.scatter_(3, target, part.gather(3, source))

    @torch.inference_mode()
    def swap(self, slot: int, other: int) -> None:
        if slot != other and self.keys is not None and self.values is not None:
            used = max(self.lengths[slot], self.lengths[other])
            for buffer in (self.keys[..., :used, :], self.values[..., :used, :]):
                part = buffer[:, slot].clone()
                buffer[:, slot] = buffer[:, other]
                buffer[:, other] = part
        super().swap(slot, other)


def _kind(part: Tensor) -> tuple[torch.dtype, torch.Size]:
    return part.dtype, part.shape
