"""A cache with running states, which cannot be truncated as rows can: slots return to snapshots instead."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_cli.engine.cache import FIRST_ROWS, Slots

# The layer (0 for all layers together), "conv" or "recurrent", and an index, since a layer may have
# several states.
StateKey = tuple[int, str, int]
# The number of latest snapshots of a slot's states to which the slot can return.
SNAPSHOTS = 4


@dataclass(frozen=True)
class Snapshot:
    """A slot's states after its first `length` tokens."""

    length: int
    states: dict[StateKey, Tensor] = field(repr=False)


class StateCache(Slots):
    """Slots that may have running states [S, ...]: the states after all rows of a slot.

    A slot can be truncated only to a snapshot or to its beginning; `reusable` returns the new length. decoded_states:
    False if states after decoding differ from those after a prompt, so that another prompt cannot reuse them.
    """

    def __init__(self, layers: int, slots: int = 1, capacity: int = FIRST_ROWS) -> None:
        super().__init__(layers, slots, capacity)
        self.decoded_states = True
        self.states: dict[StateKey, Tensor] = {}
        self._snapshots: list[list[Snapshot]] = [[] for _ in range(slots)]

    @property
    def stateful(self) -> bool:
        return bool(self.states)

    @property
    def nbytes(self) -> int:
        snapshots = [snapshot.states for of_slot in self._snapshots for snapshot in of_slot]
        held = [self.states, *snapshots]
        return super().nbytes + sum(state.nbytes for states in held for state in states.values())

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of one slot's states."""
        return sum(states[0].nbytes for states in self.states.values())

    def held_bytes(self, slot: int) -> int:
        count = len(self._snapshots[slot]) + (self.lengths[slot] > 0)
        return count * self.slot_bytes

    def take_snapshot(self, slot: int, length: int) -> None:
        """Takes a snapshot of a slot's states after `length` tokens."""
        if self.states:
            states = {key: state[slot].clone() for key, state in self.states.items()}
            self._snapshots[slot] = [
                *self._snapshots[slot][1 - SNAPSHOTS :],
                Snapshot(length, states),
            ]

    def states_after(self, slot: int, length: int) -> list[Tensor] | None:
        keys = sorted(self.states)
        if self.decoded_states and length == self.lengths[slot]:
            return [self.states[key][slot].clone() for key in keys]
        for snapshot in self._snapshots[slot] if keys else ():
            if snapshot.length == length:
                return [snapshot.states[key].clone() for key in keys]
        return None if keys else []

    @torch.inference_mode()
    def set_states(self, slot: int, states: Sequence[Tensor]) -> None:
        keys = sorted(self.states)
        own = [(self.states[key].dtype, self.states[key][slot].shape) for key in keys]
        if own != [(state.dtype, state.shape) for state in states]:
            raise ValueError("the states are those of another cache")
        for key, state in zip(keys, states, strict=True):
            self.states[key][slot] = state
        self._snapshots[slot] = []
        self.take_snapshot(slot, self.lengths[slot])

    def reusable(self, slot: int, rows: int) -> int:
        if not self.states:
            return rows
        places = [0, *(snapshot.length for snapshot in self._snapshots[slot])]
        if self.decoded_states:
            places.append(self.lengths[slot])
        return max(place for place in places if place <= rows)

    def truncate(self, slot: int, length: int) -> None:
        # A failed pass may have left a snapshot of rows that the slot does not have.
        self._snapshots[slot] = [
            snapshot for snapshot in self._snapshots[slot] if snapshot.length <= length
        ]
        if self.states and length < self.lengths[slot]:
            self._restore(slot, length)
        super().truncate(slot, length)

    def _restore(self, slot: int, length: int) -> None:
        """Restores a slot's states after `length` tokens; an empty slot needs none.

        Raises ValueError if the latest snapshot has another length.
        """
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
