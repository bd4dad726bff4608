"""The preallocated KV cache of one sequence, which keeps any accepted path of a tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# Lengths of products over turned keys are multiples of it.
ROUND = 64


class _Layer(CacheLayerMixin):
    """One layer's share of its owner's buffer, as transformers' attention sees it."""

    is_sliding = False

    def __init__(self, owner: "KVCache", index: int) -> None:
        super().__init__()
        self.owner, self.index = owner, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.owner.allocate(key_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.owner.buffer is None:
            self.owner.allocate(key_states)
        views, index = self.owner.views, self.index
        views.new_keys[index].copy_(key_states)
        views.new_values[index].copy_(value_states)
        if views.new_turned:
            views.new_turned[index].copy_(key_states[0].transpose(1, 2))
        return views.keys[index], views.values[index]

    @property
    def turned(self) -> tuple[Tensor, Tensor]:
        """All keys so far with their last two dimensions exchanged, [KV, D, L'], and the values [1, KV, L', D].

        L' is the cache's `rounded` length; only a cache that `turns` has them.
        """
        return self.owner.views.turned[self.index], self.owner.views.wide_values[self.index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_max_length(self) -> int:
        return -1


@dataclass(frozen=True)
class _Views:
    """Every layer's parts of the buffer for one forward pass: the rows it writes, [1, KV, n, D], and all it reads."""

    new_keys: tuple[Tensor, ...]
    new_values: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    new_turned: tuple[Tensor, ...] = ()
    turned: tuple[Tensor, ...] = ()
    wide_values: tuple[Tensor, ...] = ()

    @classmethod
    def join(cls, parts: "Sequence[_Views]") -> "_Views":
        """The views of consecutive layers, side by side."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(tuple(chain(*views)) for views in zip(*(vars(one).values() for one in parts), strict=True)))


class KVCache(Cache):
    """The cache of one sequence: one buffer [layers, 2, KV, capacity, D] that doubles when full.

    Rows beyond `length` are free. A forward pass over n tokens begins with `extend(n)` and writes n rows; `keep` then
    says which of them stay. The layers' views are made once a pass, not once a layer. With `turn` the keys are kept a
    second time, [layers, KV, D, capacity], as products of many queries with them want them; free rows then hold zeros
    or what was forgotten, so that products may run over some of them under a mask.
    """

    views: _Views

    def __init__(self, num_layers: int, capacity: int = 256, turn: bool = False) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(num_layers)])
        self.length = 0
        self.capacity = max(1, capacity)
        self.buffer: Tensor | None = None
        self.turns = turn
        self._turned: Tensor | None = None
        self._spans: list[tuple[int, int, int]] = []  # layers first .. last - 1 hold rows up to end in this pass

    def allocate(self, keys: Tensor) -> None:
        """Make the buffer once the first keys [1, KV, n, D] show what it must hold."""
        shape = (len(self.layers), 2, keys.shape[1], self.capacity, keys.shape[-1])
        if self.turns:
            self.buffer = keys.new_zeros(*shape)
            self._turned = keys.new_zeros(shape[0], shape[2], shape[4], shape[3])
        else:
            self.buffer = keys.new_empty(*shape)
        self._slice()

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds, free rows included."""
        return sum(one.nbytes for one in (self.buffer, self._turned) if one is not None)

    def extend(self, rows: int, growth: Sequence[tuple[int, int]] = ()) -> None:
        """Make room for `rows` more rows and hand their views to the layers.

        growth: pairs (layer, more), in order: from that layer on a pass has so many rows more.
        """
        self._spans, first, end = [], 0, self.length + rows
        for layer, more in growth:
            if layer > first:
                self._spans.append((first, layer, end))
            first, end = layer, end + more
        self._spans.append((first, len(self.layers), end))
        while self.capacity < end:
            self.capacity *= 2
        if self.buffer is None:
            return
        if self.buffer.shape[3] < self.capacity:
            grown = self.buffer.new_zeros(*self.buffer.shape[:3], self.capacity, self.buffer.shape[4])
            grown[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
            self.buffer = grown
            if self._turned is not None:
                wide = self._turned.new_zeros(*self._turned.shape[:3], self.capacity)
                wide[..., : self.length] = self._turned[..., : self.length]
                self._turned = wide
        self._slice()

    def rounded(self, rows: int) -> int:
        """So many rows or a few more: lengths that recur, where every new one costs a product its preparation."""
        return min(-(-rows // ROUND) * ROUND, self.capacity)

    def _slice(self) -> None:
        self.views = _Views.join([self._of(*span) for span in self._spans])

    def _of(self, first: int, last: int, end: int) -> _Views:
        assert self.buffer is not None
        keys, values = self.buffer[first:last, 0, None], self.buffer[first:last, 1, None]
        new = slice(self.length, end)
        turned: tuple[tuple[Tensor, ...], ...] = ()
        if self._turned is not None:
            part, wide = self._turned[first:last], self.rounded(end)
            turned = (part[..., new].unbind(0), part[..., :wide].unbind(0), values[:, :, :, :wide].unbind(0))
        return _Views(
            keys[:, :, :, new].unbind(0),
            values[:, :, :, new].unbind(0),
            keys[:, :, :, :end].unbind(0),
            values[:, :, :, :end].unbind(0),
            *turned,
        )

    @torch.inference_mode()
    def keep(self, start: int, path: Tensor | Sequence[int]) -> None:
        """Move rows start + path[i] to start + i and end the cache there; path is increasing node indices [A+1]."""
        rows = [int(node) for node in path]
        settled = 0
        while settled < len(rows) and rows[settled] == settled:
            settled += 1
        if settled < len(rows) and self.buffer is not None:
            source = torch.tensor(rows[settled:], device=self.buffer.device) + start
            # index_select copies first, so overlapping source and target rows are safe.
            moved = self.buffer.index_select(3, source)
            self.buffer[:, :, :, start + settled : start + len(rows)] = moved
            if self._turned is not None:
                self._turned[..., start + settled : start + len(rows)] = self._turned.index_select(3, source)
        self.length = start + len(rows)

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        self.length = min(self.length, length)
