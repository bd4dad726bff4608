"""Preallocated KV caches: one row that keeps any accepted path of a tree, and many slots for batched decoding."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, [1, KV, capacity, D], of which the first `owner.length` rows count."""

    is_sliding = False

    def __init__(self, owner: "KVCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (*key_states.shape[:2], self.owner.capacity)
        self.keys = key_states.new_empty(*shape, key_states.shape[-1])
        self.values = value_states.new_empty(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        start = self.owner.length
        end = start + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.keys.shape[-2] < self.owner.capacity:
            self._grow(start)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grow(self, used: int) -> None:
        assert self.keys is not None and self.values is not None
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], self.owner.capacity, old.shape[-1])
            new[:, :, :used] = old[:, :, :used]
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_max_length(self) -> int:
        return -1


class KVCache(Cache):
    """The cache of one sequence: it doubles when full, so nothing is copied in an ordinary step.

    Rows beyond `length` are free. A forward pass over n tokens writes n rows; `keep` then says which of them stay.
    """

    def __init__(self, num_layers: int, capacity: int = 256) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])
        self.length = 0
        self.capacity = max(1, capacity)

    def reserve(self, length: int) -> None:
        """Make room for `length` rows in all."""
        while self.capacity < length:
            self.capacity *= 2

    @torch.inference_mode()
    def keep(self, start: int, path: Tensor | Sequence[int]) -> None:
        """Move rows start + path[i] to start + i and end the cache there; path is increasing node indices [A+1]."""
        rows = [int(node) for node in path]
        settled = 0
        while settled < len(rows) and rows[settled] == settled:
            settled += 1
        if settled < len(rows):
            source = torch.tensor(rows[settled:], device=self.layers[0].keys.device) + start
            for layer in self.layers:
                for buffer in (layer.keys, layer.values):
                    # index_select copies first, so overlapping source and target rows are safe.
                    buffer[:, :, start + settled : start + len(rows)] = buffer.index_select(2, source)
        self.length = start + len(rows)

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        self.length = min(self.length, length)


class _SlotLayer(_Layer):
    """One layer of B sequences, [B, KV, capacity, D]: each row is written at its own length."""

    owner: "SlotCache"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self.owner.slots, key_states.shape[1], self.owner.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.owner.slot is not None:  # several tokens into one slot: a prefill
            slot, start = self.owner.slot, int(self.owner.lengths[self.owner.slot])
            end = start + key_states.shape[-2]
            self.keys[slot : slot + 1, :, start:end] = key_states
            self.values[slot : slot + 1, :, start:end] = value_states
            return self.keys[slot : slot + 1, :, :end], self.values[slot : slot + 1, :, :end]
        rows, lengths, end = self.owner.rows, self.owner.lengths, self.owner.longest + 1
        self.keys[rows, :, lengths] = key_states[:, :, 0]
        self.values[rows, :, lengths] = value_states[:, :, 0]
        return self.keys[:, :, :end], self.values[:, :, :end]


class SlotCache(Cache):
    """B sequences side by side, each with its own length, in static buffers of `capacity` rows a slot.

    With `slot` set, a forward pass writes several tokens into that slot; with None, one token into every slot.
    """

    def __init__(self, num_layers: int, slots: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])
        self.slots, self.capacity = slots, capacity
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)
        self.rows = torch.arange(slots, device=device)
        self.slot: int | None = None
        self.longest = 0
