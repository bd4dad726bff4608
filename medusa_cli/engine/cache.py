"""The KV cache: slots of one sequence each, with lengths and accepted paths of their own, in one buffer that grows."""

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_ROWS = 256
# A cache with a stride shrinks where more strides than this are free in all its slots.
SLACK = 4


class Cache:
    """S sequences' keys and values [layers, S, KV, C, D]; `transposed`: in memory keys lie as [layers, S, KV, D, C].

    Rows of slot s from lengths[s] on are free: a pass writes them, `keep` says which stay. What is free holds zeros
    or what was forgotten, so that a product may run over it under a mask. The capacity C doubles as needed up to
    `most`; with a stride it is kept at the next multiples of it above what is used, growing and shrinking, for products
    that are slow on a part of a buffer and so read all of it. Transposed keys are what a CPU's products with several
    queries want.
    """

    def __init__(
        self,
        layers: int,
        slots: int = 1,
        capacity: int = FIRST_ROWS,
        *,
        transposed: bool = False,
        most: int = 1 << 62,
        stride: int | None = None,
    ) -> None:
        self.layers, self.slots, self.transposed, self.most, self.stride = layers, slots, transposed, most, stride
        self.capacity = max(1, min(capacity if stride is None else stride, most))
        self.lengths = [0] * slots
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def allocate(self, heads: int, dim: int, like: Tensor) -> None:
        """Make the buffers for KV heads of a width, of the type and on the device of `like`."""
        shape = (self.layers, self.slots, heads)
        self.values = like.new_zeros(*shape, self.capacity, dim)
        self.keys = like.new_zeros(*shape, *((dim, self.capacity) if self.transposed else (self.capacity, dim)))
        if self.transposed:
            self.keys = self.keys.transpose(-1, -2)

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds, free rows included."""
        return sum(one.nbytes for one in (self.keys, self.values) if one is not None)

    def reserve(self, rows: int) -> None:
        """Make room for so many rows in every slot; ValueError for more than the cache may ever hold."""
        if rows > self.most:
            raise ValueError(f"a cache of {self.most} rows a slot cannot hold {rows}")
        rows, capacity = max(rows, *self.lengths), self.capacity
        if self.stride is None:
            while capacity < rows:
                capacity *= 2
        elif not rows <= capacity <= rows + SLACK * self.stride:
            capacity = -(-rows // self.stride) * self.stride
        capacity = min(capacity, self.most)
        if capacity == self.capacity:
            return
        grown = Cache(self.layers, self.slots, transposed=self.transposed)
        grown.capacity = capacity
        if self.keys is not None and self.values is not None:
            used = max(self.lengths)
            grown.allocate(self.values.shape[2], self.values.shape[4], self.values)
            assert grown.keys is not None and grown.values is not None
            grown.values[..., :used, :] = self.values[..., :used, :]
            grown.keys[..., :used, :] = self.keys[..., :used, :]
        # All at once: what has no memory to grow stays as it was.
        self.keys, self.values, self.capacity = grown.keys, grown.values, grown.capacity

    @torch.inference_mode()
    def keep(self, slot: int, path: Sequence[int]) -> None:
        """Of the rows just written behind slot's length, keep those of `path`, increasing numbers from 0."""
        start, settled = self.lengths[slot], 0
        while settled < len(path) and path[settled] == settled:
            settled += 1
        if settled < len(path) and self.values is not None and self.keys is not None:
            source = torch.tensor(path[settled:], device=self.values.device) + start
            target = slice(start + settled, start + len(path))
            for whole in (self.keys, self.values):
                # index_select copies first, so overlapping source and target rows are safe.
                whole[:, slot, :, target] = whole[:, slot].index_select(2, source)
        self.lengths[slot] = start + len(path)

    def compact(self, lengths: Tensor, path: Tensor) -> None:
        """Move the first B slots' rows lengths[b] + path[b, i] to lengths[b] + i, by tensors alone; path [B, P].

        Gathering first makes overlaps safe. The lengths that the cache knows stay as they are.
        """
        assert self.keys is not None and self.values is not None
        size, count = path.shape
        places = lengths[:, None] + torch.arange(count, device=path.device)
        for whole in (self.keys, self.values):
            part = whole[:, :size]
            shape = (*part.shape[:3], count, part.shape[4])
            source, target = (one.view(1, size, 1, count, 1).expand(shape) for one in (lengths[:, None] + path, places))
            part.scatter_(3, target, part.gather(3, source))

    def truncate(self, slot: int, length: int) -> None:
        """Forget a slot's rows from `length` on."""
        self.lengths[slot] = min(self.lengths[slot], length)

    @torch.inference_mode()
    def swap(self, one: int, other: int) -> None:
        """Let two slots change places."""
        if one != other and self.keys is not None and self.values is not None:
            used = max(self.lengths[one], self.lengths[other])
            for whole in (self.keys[..., :used, :], self.values[..., :used, :]):
                part = whole[:, one].clone()
                whole[:, one] = whole[:, other]
                whole[:, other] = part
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]
