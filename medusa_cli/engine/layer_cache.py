"""A cache for layers whose keys differ in shape, or that have a running state instead of keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_cli.engine.cache import FIRST_ROWS, Cache
from medusa_cli.engine.state_cache import StateCache, StateKey


class LayerCache(StateCache, Cache):
    """A cache whose layers may have fewer or narrower key heads than its buffers, or running states.

    node_states [B, R, ...]: the states after each row of the last tree, in B slots, the first of
    which is `first_node_slot`. by_token: True if layers with a running state must process the
    tokens of a chain one by one in slots that already hold tokens.
    """

    def __init__(self, layers: int, slots: int = 1, capacity: int = FIRST_ROWS) -> None:
        super().__init__(layers, slots, capacity)
        self.by_token = False
        self.node_states: dict[StateKey, Tensor] = {}
        self.first_node_slot = 0
        self._places: dict[int, int] = {}  # layers with keys: their index in the buffers
        self._sizes: dict[int, tuple[int, int, int]] = {}  # their heads, key width and value width

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(state.nbytes for state in self.node_states.values())

    def keys_and_values(
        self, layer: int, slots: slice, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values [B, KV, C, D] in the given slots.

        The buffers are first widened to fit the shapes of `key` and `value`.
        """
        place = self._places.setdefault(layer, len(self._places))
        heads = key.shape[1]
        dim = key.shape[3]
        value_dim = value.shape[3]
        self._sizes[layer] = heads, dim, value_dim
        self._widen(place + 1, heads, dim, value_dim, value)
        assert self.keys is not None and self.values is not None
        return self.keys[place, slots, :heads, :, :dim], self.values[
            place, slots, :heads, :, :value_dim
        ]

    def rows_of(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values [KV, length, D] for the first `length` rows of a slot."""
        assert self.keys is not None and self.values is not None
        place = self._places[layer]
        heads, dim, value_dim = self._sizes[layer]
        keys = self.keys[place, slot, :heads, :length, :dim]
        return keys, self.values[place, slot, :heads, :length, :value_dim]

    def _widen(self, layers: int, heads: int, dim: int, value_dim: int, like: Tensor) -> None:
        """Grows the buffers to hold a layer of these sizes; layers with smaller sizes use a part of them."""
        if self.keys is None or self.values is None:
            self.layers = max(layers, self.layers)
            self.allocate(heads, dim, like, value_dim)
            return
        keys = self.keys
        values = self.values
        wide = max(heads, keys.shape[2]), max(dim, keys.shape[4]), max(value_dim, values.shape[4])
        if layers <= self.layers and wide == (keys.shape[2], keys.shape[4], values.shape[4]):
            return
        self.layers = max(layers, self.layers)
        self.allocate(wide[0], wide[1], like, wide[2])
        for buffer, before in ((self.keys, keys), (self.values, values)):
            buffer[: before.shape[0], :, : before.shape[2], :, : before.shape[4]] = before

    def put(self, key: StateKey, slots: slice, state: Tensor) -> None:
        """Sets the states [B, ...] of the given slots."""
        if key not in self.states:
            self.states[key] = state.new_zeros(self.slots, *state.shape[1:])
        self.states[key][slots] = state

    @torch.inference_mode()
    def keep(self, slot: int, path: Sequence[int]) -> None:
        super().keep(slot, path)
        for key, states in self.node_states.items():
            self.states[key][slot] = states[slot - self.first_node_slot, path[-1]]
