"""The KV cache of B sequences decoded side by side, each with its own length and its own accepted path."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_cli.backbone.cache import KVCache

if TYPE_CHECKING:
    from medusa_cli.backbone.model import Backbone


class _SlotLayer(CacheLayerMixin):
    """One layer of the first B slots, as transformers' attention sees it: each slot is written at its own length."""

    is_sliding = False

    def __init__(self, owner: "SlotCache", index: int) -> None:
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
        assert self.owner.buffer is not None
        keys, values = self.owner.buffer[self.index].unbind(0)  # [S, KV, capacity, D] each
        slots, places, end = self.owner.order[: len(key_states), None], self.owner.places, self.owner.end
        keys[slots, :, places] = key_states.transpose(1, 2)
        values[slots, :, places] = value_states.transpose(1, 2)
        return keys[: len(key_states), :, :end], values[: len(key_states), :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.end, 0

    def get_seq_length(self) -> int:
        return self.owner.end

    def get_max_length(self) -> int:
        return self.owner.capacity


class Slot(KVCache):
    """One sequence's share of a SlotCache: a KVCache over the common buffer, of fixed capacity."""

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__(len(owner.layers), owner.capacity)
        self._owner = owner

    def allocate(self, keys: Tensor) -> None:
        self._owner.allocate(keys)
        self._slice()

    def extend(self, rows: int, growth: Sequence[tuple[int, int]] = ()) -> None:
        needed = rows + sum(more for _, more in growth)
        if self.length + needed > self.capacity:
            raise ValueError(f"a slot of {self.capacity} rows cannot take {needed} after {self.length}")
        super().extend(rows, growth)


class SlotCache(Cache):
    """S sequences in one buffer [layers, 2, S, KV, capacity, D]; `slots[i]` is the KVCache of one of them.

    A pass over n tokens in each of the first B slots begins with `begin(B, n)` and writes behind each slot's length;
    `keep` then says which of these rows stay.
    """

    turns = False

    def __init__(self, num_layers: int, slots: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[_SlotLayer(self, index) for index in range(num_layers)])
        self.capacity = capacity
        self.buffer: Tensor | None = None
        self.slots = [Slot(self) for _ in range(slots)]
        self.order = torch.arange(slots, device=device)
        self.places = self.order[:0, None]  # [B, n]: where this pass writes
        self.end = 0  # columns this pass attends to

    def allocate(self, keys: Tensor) -> None:
        """Make the buffer once the first keys [B, KV, n, D] show what it must hold."""
        shape = (len(self.layers), 2, len(self.slots), keys.shape[1], self.capacity, keys.shape[-1])
        # Zeros: rows of a shorter neighbour are masked out, but what is multiplied by nothing must be a number.
        self.buffer = keys.new_zeros(*shape)
        for index, slot in enumerate(self.slots):
            slot.buffer = self.buffer[:, :, index]

    def begin(self, slots: int, rows: int) -> Tensor:
        """Prepare a pass over n = `rows` tokens in each of the first B = `slots` slots; return their lengths [B]."""
        used = [slot.length for slot in self.slots[:slots]]
        self.end = max(used) + rows
        if self.end > self.capacity:
            raise ValueError(f"a slot of {self.capacity} rows cannot take {rows} after {max(used)}")
        lengths = torch.tensor(used, device=self.order.device)
        self.places = lengths[:, None] + torch.arange(rows, device=lengths.device)
        return lengths

    def aim(self, lengths: Tensor, rows: int, columns: int) -> None:
        """What `begin` does, for lengths [B] that are known on the device alone; attention reads so many columns."""
        self.places, self.end = lengths[:, None] + torch.arange(rows, device=lengths.device), columns

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Of the rows just written into slot b, keep those of the nodes paths[b], which are increasing."""
        for slot, path in zip(self.slots, paths, strict=False):
            slot.keep(slot.length, path)

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Put one slot's sequence into another, whose own is forgotten."""
        one, other = self.slots[source], self.slots[target]
        if one is not other and one.buffer is not None and other.buffer is not None:
            other.buffer[:, :, :, : one.length] = one.buffer[:, :, :, : one.length]
        other.length = one.length


def run_slots(
    backbone: "Backbone",
    tokens: Tensor,
    cache: SlotCache,
    lengths: Tensor,
    depth: Tensor,
    among: Tensor,
    taps: Sequence[int],
) -> Tensor:
    """Tapped states [B, n, H * taps] of tokens [B, n] behind slots of the given lengths [B], by tensors alone.

    depth [n] and among [n, n] (who sees whom) are the tree's. The cache has been told where to write.
    """
    lengths = lengths[:, None]
    columns = torch.arange(cache.end, device=lengths.device)
    node = columns - lengths  # [B, L]: the token of this pass that a column holds, negative for settled ones
    inside = node.clamp(0, len(depth) - 1)
    visible = (node < 0)[:, None] | (among[:, inside].transpose(0, 1) & (node < len(depth))[:, None])  # [B, n, L]
    positions = lengths + depth
    columns = torch.where(node < 0, columns, lengths + depth[inside])
    mask = backbone.masks(visible, positions, columns[:, None])
    return backbone._run(tokens, cache, mask, positions, taps)
