"""A cache for layers that differ: in the shape of their keys, or by a running state in place of keys."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_cli.engine.cache import FIRST_ROWS, Cache

# A layer, "conv" or "recurrent", and a number: a layer may have several states.
StateKey = tuple[int, str, int]
# Snapshots of a slot's states, the latest ones, to which the slot can go back.
SNAPSHOTS = 4


@dataclass(frozen=True)
class Snapshot:
    """A slot's states after its first `length` tokens."""

    length: int
    states: dict[StateKey, Tensor] = field(repr=False)


class LayerCache(Cache):
    """A cache whose layers may have fewer or narrower key heads than its buffers, or running states.

    states [S, ...]: each slot's after its own rows. node_states [B, R, ...]: those after
    each row of the last tree, in the B slots from `first_node_slot` on. A state cannot be cut back
    as rows can, so a slot is truncated to a snapshot, or begins again: `reusable` says to which
    length. by_token: layers with a state must take what follows in a slot token by token.
    decoded_states: False if states after decoding are not those after a prompt, and so of no use to
    another prompt.
    """

    def __init__(self, layers: int, slots: int = 1, capacity: int = FIRST_ROWS) -> None:
        super().__init__(layers, slots, capacity)
        self.by_token = False
        self.decoded_states = True
        self.states: dict[StateKey, Tensor] = {}
        self.node_states: dict[StateKey, Tensor] = {}
        self.first_node_slot = 0
        self._snapshots: list[list[Snapshot]] = [[] for _ in range(slots)]
        self._places: dict[int, int] = {}  # of the layers with keys, in the buffers
        self._sizes: dict[
            int, tuple[int, int, int]
        ] = {}  # their heads, and widths of keys and values

    @property
    def nbytes(self) -> int:
        snapshots = [snapshot.states for of_slot in self._snapshots for snapshot in of_slot]
        held = [self.states, self.node_states, *snapshots]
        return super().nbytes + sum(state.nbytes for states in held for state in states.values())

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of one slot's states."""
        return sum(states[0].nbytes for states in self.states.values())

    def keys_and_values(
        self, layer: int, slots: slice, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values [B, KV, C, D] in some slots, wide enough for rows as `key` and `value`."""
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
        """Returns a layer's keys and values [KV, length, D] of a slot's first rows."""
        assert self.keys is not None and self.values is not None
        place = self._places[layer]
        heads, dim, value_dim = self._sizes[layer]
        keys = self.keys[place, slot, :heads, :length, :dim]
        return keys, self.values[place, slot, :heads, :length, :value_dim]

    def _widen(self, layers: int, heads: int, dim: int, value_dim: int, like: Tensor) -> None:
        """Makes buffers that hold a layer of these sizes; layers with smaller ones use a part of theirs."""
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
        """Sets the states [B, ...] of slots."""
        if key not in self.states:
            self.states[key] = state.new_zeros(self.slots, *state.shape[1:])
        self.states[key][slots] = state

    def take_snapshot(self, slot: int, length: int) -> None:
        """Remembers the states of a slot of `length` tokens."""
        if self.states:
            states = {key: state[slot].clone() for key, state in self.states.items()}
            self._snapshots[slot] = [
                *self._snapshots[slot][1 - SNAPSHOTS :],
                Snapshot(length, states),
            ]

    def reusable(self, slot: int, rows: int) -> int:
        if not self.states:
            return rows
        places = [0, *(snapshot.length for snapshot in self._snapshots[slot])]
        if self.decoded_states:
            places.append(self.lengths[slot])
        return max(place for place in places if place <= rows)

    @torch.inference_mode()
    def keep(self, slot: int, path: Sequence[int]) -> None:
        super().keep(slot, path)
        for key, states in self.node_states.items():
            self.states[key][slot] = states[slot - self.first_node_slot, path[-1]]

    def truncate(self, slot: int, length: int) -> None:
        if self.states and length < self.lengths[slot]:
            self._snapshots[slot] = [
                snapshot for snapshot in self._snapshots[slot] if snapshot.length <= length
            ]
            self._restore(slot, length)
        super().truncate(slot, length)

    def _restore(self, slot: int, length: int) -> None:
        """Sets a slot's states to the ones after `length` tokens; after none it begins again."""
        if not length:
            return
        latest = self._snapshots[slot][-1:]
        if not latest or latest[0].length != length:
            raise ValueError(f"slot {slot} has no states after {length} tokens")
        for key, state in latest[0].states.items():
            self.states[key][slot] = state

    @torch.inference_mode()
    def swap(self, slot: int, other: int) -> None:
        super().swap(slot, other)
        for states in self.states.values():
            states[[slot, other]] = states[[other, slot]]
        snapshots = self._snapshots
        snapshots[slot], snapshots[other] = snapshots[other], snapshots[slot]
