"""A drafter's decoder layer in the native library: one call extends the rows of several sequences."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import byref, pointer
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from medusa_cli.native import PackedMatrix, library
from medusa_cli.native.library import TILE, UNIT, DraftPass, DraftRows, Layer, Model, check, require
from medusa_cli.native.matrix import padded_floats

# The initial number of rows in the rotary table, which grows as needed.
FIRST_POSITIONS = 2048
# The number of a long chain's rows that run at a time, because the mask of n rows has n * n numbers.
ROWS_AT_ONCE = 512


def pieces(positions: Sequence[Sequence[int]]) -> Iterator[tuple[int, slice, Sequence[int]]]:
    """Yields pieces of long chains, sequence by sequence, with at most ROWS_AT_ONCE rows.

    A piece is the index of its sequence, its rows among those of all sequences, and the rows' positions.
    """
    start = 0
    for number, own in enumerate(positions):
        for first in range(0, len(own), ROWS_AT_ONCE):
            piece = own[first : first + ROWS_AT_ONCE]
            yield number, slice(start, start + len(piece)), piece
            start += len(piece)


class RowCache(Protocol):
    """The rows of a decoder layer for one sequence, of which `length` are in use."""

    length: int

    def room(self, count: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns buffers of keys and values [heads, C, D] with room for `count` further rows.

        C is a multiple of TILE. The library lays out the keys of each TILE rows as [D, TILE].
        """

    def count(self, positions: Sequence[int]) -> None:
        """Registers rows that were written to the buffers."""


class NativeDecoderLayer(nn.Module):
    """Runs a decoder layer in the library, with 4-bit weights, and owns all memory that its structures point to.

    matrices, norms: the layer's modules by their names in the library; see Layer in structures.def.
    pack: packs a matrix. norm_before_residual: True if attention is added to the normalized state
    instead of the state itself. Raises ValueError if the sizes are not whole tiles of the library.
    """

    def __init__(
        self,
        matrices: Mapping[str, nn.Module],
        norms: Mapping[str, nn.RMSNorm],
        heads: int,
        rope_theta: float,
        *,
        pack: Callable[[Tensor], PackedMatrix],
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size = norms["mlp_norm"].weight.numel()
        self.heads = heads
        self.head_dim = matrices["query"].get_parameter("weight").shape[0] // heads
        self.rope_theta = rope_theta
        if self.hidden_size % UNIT or self.head_dim % TILE:
            raise ValueError(f"{self.hidden_size} floats in heads of {self.head_dim} fill no tiles")
        packed = {name: pack(module.get_parameter("weight")) for name, module in matrices.items()}
        gains = {
            name: padded_floats(norm.weight.detach().float().numpy())
            for name, norm in norms.items()
        }
        self.first_norm = None
        if norm_before_residual:  # states are normalized before they enter
            self.first_norm = norms["attention_norm"]
            del gains["attention_norm"]
        self._owned = packed, gains

        self._layer = Layer(kv=self.heads, dim=self.head_dim, scalar=1.0)
        for name, matrix in packed.items():
            setattr(self._layer, name, matrix.struct)
        for name, gain in gains.items():
            setattr(self._layer, name, gain.ctypes.data)
        self.model = Model(
            layers=1,
            hidden=self.hidden_size,
            heads=self.heads,
            eps=norms["mlp_norm"].eps,
            scale=self.head_dim**-0.5,
            residual=1.0,
            layer=pointer(self._layer),
        )
        self._tables: list[Tensor] = []
        self._lock = threading.Lock()  # guards the table, which several decoders may use
        self.reserve(FIRST_POSITIONS)

    def __deepcopy__(self, memo: dict[int, object]) -> NativeDecoderLayer:
        return self  # its weights do not change

    def extend(
        self,
        x: Tensor,
        positions: Sequence[Sequence[int]],
        caches: Sequence[RowCache],
        *embedded: Tensor,
        last: bool = False,
    ) -> Tensor:
        """Adds chains of rows to the caches of B sequences as `DecoderLayer.extend` does; returns the same output."""
        if max(map(len, positions)) > ROWS_AT_ONCE:
            outputs: dict[tuple[int, int], Tensor] = {}
            for i, part, piece in pieces(positions):
                parts = (own[part] for own in embedded)
                # With `last`, only the output of a sequence's last piece is returned.
                key = i, 0 if last else piece[0]
                outputs[key] = self.extend(x[part], [piece], [caches[i]], *parts, last=last)
            return torch.cat(list(outputs.values()))
        counts = [len(own) for own in positions]
        flat = np.array([position for own in positions for position in own], np.int32)
        self.reserve(int(flat.max()) + 1)
        states, read = self._inputs(x, embedded, len(flat))
        # `last` needs no masks. The arrays must live until the call ends, as the structures point to them.
        masks = [
            array("B", b"" if last else np.tri(count, dtype=np.uint8).tobytes()) for count in counts
        ]
        given = DraftPass(
            own=self.rows_of(caches, counts, masks, states),
            sequences=len(counts),
            last=last,
            positions=flat.ctypes.data,
            x=states.data_ptr(),
            embedded=None if read is None else read.data_ptr(),
        )
        code = library().draft(byref(self.model), byref(given))
        check(code, "rows of a draft do not fit the cache")
        for cache, own in zip(caches, positions, strict=True):
            cache.count(own)
        return (states[: len(counts)] if last else states).to(x.dtype)

    def _inputs(
        self, x: Tensor, embedded: Sequence[Tensor], rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the states, which the library overwrites, and the embeddings that precede them, if any."""
        states = self.entering(x.float()).clone(memory_format=torch.contiguous_format)
        read = [own.float().contiguous() for own in embedded]
        shape = rows, self.hidden_size
        inputs = self._owned[0]["query"].shape[1]
        require(
            inputs == self.hidden_size * (1 + len(read))
            and all(own.shape == shape for own in (states, *read)),
            f"states {tuple(x.shape)} are not those of {rows} rows",
        )
        return states, next(iter(read), None)

    def entering(self, states: Tensor) -> Tensor:
        """Returns the states that the library reads: normalized if the layer has a `first_norm`."""
        return states if self.first_norm is None else self.first_norm(states)

    def rows_of(
        self,
        caches: Sequence[RowCache],
        counts: Sequence[int],
        masks: Sequence[array[int]],
        like: Tensor,
    ) -> Any:
        """Returns the sequences' rows in the library's structures, after the caches have made room for the rows.

        masks: for each sequence, bytes [n, m] that tell which of its last m >= n rows the n new rows see.
        """
        rows = (DraftRows * len(counts))()
        for own, cache, count, mask in zip(rows, caches, counts, masks, strict=True):
            own.rows = count
            own.earlier = max(0, len(mask) // count - count)
            own.prefix = cache.length - own.earlier
            own.seen, _ = mask.buffer_info()
            keys, values = cache.room(count, self.heads, self.head_dim, like)
            own.keys = keys.data_ptr()
            own.values = values.data_ptr()
            own.capacity = keys.shape[1]
        return rows

    def reserve(self, positions: int) -> None:
        """Extends the rotary table to at least `positions` positions."""
        if positions > self.model.positions:
            with self._lock:
                self._grow(positions)

    def _grow(self, positions: int) -> None:
        """Replaces the rotary table by a longer one; `positions` is set last, because passes may run meanwhile."""
        if positions <= self.model.positions:  # another thread was faster
            return
        count = max(positions, 2 * self.model.positions)
        rates = self.rope_theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.arange(count).float()[:, None] * rates
        cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
        self._tables += [cos, sin]  # a call in another thread may still read earlier tables
        self.model.cos[0] = cos.data_ptr()
        self.model.sin[0] = sin.data_ptr()
        self.model.rotary[0] = self.head_dim
        self.model.positions = count
