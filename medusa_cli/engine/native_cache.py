"""The native engine's KV cache: keys, values and running states in the library's layout."""

import copy
from collections.abc import Mapping, Sequence
from ctypes import Structure, byref

import numpy as np
import torch
from torch import Tensor

from medusa_cli.engine.kv_types import KV_TYPES, head_bytes, rows_of_floats
from medusa_cli.engine.native_model import NativeModel
from medusa_cli.engine.shapes import padded
from medusa_cli.engine.state_cache import StateCache
from medusa_cli.native import library
from medusa_cli.native.library import MIXERS, TILE, CacheBuffers, check
from medusa_cli.native.pages import drop_pages, lazy_zeros

# The key of the states of all delta-net layers.
DELTA_STATES = (0, "recurrent", 0)


class NativeCache(StateCache):
    """Keys, values and running states in the library's layout; see Cache in structures.def.

    inputs: the inputs of short convolutions, which are truncated like keys. states: the states of
    delta nets. pending: the data of a tree's rows from which `keep` updates the states.
    """

    lazy = True

    def __init__(self, model: NativeModel, slots: int, capacity: int, kv: str = "fp32") -> None:
        description = model.description
        capacity = padded(max(1, capacity), TILE)
        super().__init__(description.places("attention"), slots, capacity)
        self.model = model
        self.format, self.dtype = KV_TYPES[kv]
        self.column_bytes = model.column_bytes(self.format)
        # The number of key heads and their width at each place.
        self.shapes = {
            names.place: (names.kv, names.dim)
            for names in description.layers
            if MIXERS[names.mixer] == "attention"
        }
        self._delta_layers = description.places("delta_net")
        self.pending = torch.empty(0)
        if self._delta_layers:
            self.states[DELTA_STATES] = torch.zeros(slots, self._delta_layers, model.delta_state)
        self.keys, self.values, self.inputs = self._zeros(self.capacity)
        # The index of each slot's keys, values and inputs in the buffers.
        self._parts = np.arange(slots, dtype=np.int64)
        # The number of rows of each slot that have been written since the buffers were allocated.
        self._written = [0] * slots

    def _zeros(self, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns zeros for keys, values, and inputs of short convolutions."""
        description = self.model.description
        keys, values = (
            lazy_zeros(
                self.layers, self.slots, size * capacity // self.dtype.itemsize, dtype=self.dtype
            )
            for size in self.column_bytes
        )
        convolutions = description.places("short_conv")
        hidden = description.sizes["hidden"]
        inputs = lazy_zeros(convolutions, self.slots, capacity, hidden)
        return keys, values, inputs

    @property
    def buffers(self) -> Structure:
        """Returns the buffers in the library's structure."""
        states = self.states.get(DELTA_STATES)
        return CacheBuffers(
            keys=self.keys.data_ptr(),
            values=self.values.data_ptr(),
            inputs=self.inputs.data_ptr(),
            states=None if states is None else states.data_ptr(),
            pending=self.pending.data_ptr(),
            parts=self._parts.ctypes.data,
            slots=self.slots,
            capacity=self.capacity,
            pending_rows=self.pending.shape[2] if self.pending.dim() > 1 else 0,
            format=self.format,
            key_bytes=self.column_bytes[0],
            value_bytes=self.column_bytes[1],
        )

    @property
    def nbytes(self) -> int:
        buffers = (self.keys, self.values, self.inputs, self.pending)
        return super().nbytes + sum(buffer.nbytes for buffer in buffers)

    def at(self, place: int, slot: int) -> tuple[Tensor, Tensor]:
        """Returns a slot's keys [KV, C / 16, D, 16] and values [KV, C, D padded to 16] at a place.

        In q8_0, keys and values are bytes, and D is the number of bytes of a head.
        """
        kv, dim = self.shapes[place]
        key, value = (size // self.dtype.itemsize for size in head_bytes(self.format, dim))
        part = self._parts[slot]
        keys = self.keys[place, part, : kv * key * self.capacity]
        values = self.values[place, part, : kv * value * self.capacity]
        return (
            keys.unflatten(0, (kv, self.capacity // TILE, key, TILE)),
            values.unflatten(0, (kv, self.capacity, value)),
        )

    def rows_of(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values [KV, length, D] for the first `length` rows of a slot, in fp32."""
        place = self.model.description.layers[layer].place
        keys, values = self.at(place, slot)
        dim = self.shapes[place][1]
        keys, values = rows_of_floats(keys[:, : padded(length, TILE) // TILE], values[:, :length])
        return keys[:, :length, :dim], values[..., :dim]

    def views(self, slot: int, start: int, end: int) -> list[Tensor]:
        """Returns the keys (of whole tiles) and the values of each place, then the inputs of short convolutions."""
        views = list[Tensor]()
        for place in range(self.layers):
            keys, values = self.at(place, slot)
            views += [keys[:, start // TILE : padded(end, TILE) // TILE], values[:, start:end]]
        return [*views, self.inputs[:, self._parts[slot], start:end]]

    def resize(self, capacity: int) -> None:
        larger = copy.copy(self)
        larger.capacity = padded(capacity, TILE)
        larger.keys, larger.values, larger.inputs = self._zeros(larger.capacity)
        for slot, length in enumerate(self.lengths):
            views = zip(larger.views(slot, 0, length), self.views(slot, 0, length), strict=True)
            for new, old in views:
                new.copy_(old)
        # The buffers are assigned last: if memory runs out or the user interrupts, the cache stays as it was.
        self.keys, self.values, self.inputs = larger.keys, larger.values, larger.inputs
        self.capacity = larger.capacity
        self._written = [*self.lengths]

    def missing_rows(self, wanted: Mapping[int, int]) -> int:
        rows = sum(max(0, count - self._rows_in_memory(slot)) for slot, count in wanted.items())
        # Growth copies the rows in use.
        grows = max(wanted.values()) > self.capacity
        return rows + (sum(self.lengths) if grows else 0)

    def _rows_in_memory(self, slot: int) -> int:
        return max(self._written[slot], self.lengths[slot])

    def truncate(self, slot: int, length: int) -> None:
        self._written[slot] = self._rows_in_memory(slot)
        super().truncate(slot, length)

    def release(self, slot: int) -> None:
        super().release(slot)
        self._written[slot] = 0
        for buffer in (self.keys, self.values, self.inputs):
            for rows in buffer[:, self._parts[slot]]:
                drop_pages(rows)

    def reserve_pending(self, rows: int) -> None:
        """Allocates memory for a tree of `rows` rows in every slot."""
        if self._delta_layers and (self.pending.dim() < 2 or rows > self.pending.shape[2]):
            self.pending = torch.zeros(
                self._delta_layers, self.slots, rows, self.model.shapes.delta_row[1]
            )

    def keep(self, slot: int, path: Sequence[int]) -> None:
        length = self.lengths[slot]
        # The length is set first: an interrupted call may have advanced the states, which must not be
        # taken for those of the earlier length.
        self.lengths[slot] = length + len(path)
        if self._delta_layers or path[-1] != len(path) - 1:
            rows = np.array(path, np.int64)
            model = byref(self.model.struct)
            buffers = byref(self.buffers)
            code = library().keep(model, buffers, slot, length, rows.ctypes.data, len(rows))
            check(code, "a path does not fit the cache")

    def swap(self, slot: int, other: int) -> None:
        super().swap(slot, other)
        self._parts[[slot, other]] = self._parts[[other, slot]]
        self._written[slot], self._written[other] = self._written[other], self._written[slot]
