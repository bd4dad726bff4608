"""A drafter's decoder layer in the native library: one call extends the rows of several sequences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import byref, pointer
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medusa_cli.native import PackedMatrix, library
from medusa_cli.native.library import TILE, UNIT, DraftPass, DraftRows, Layer, Model, check, require
from medusa_cli.native.matrix import padded_floats

# The initial number of rows in the rotary table, which grows as needed.
FIRST_POSITIONS = 2048
# Rows of a long chain that enter a layer at a time, because the mask of n rows has n * n numbers.
ROWS_AT_ONCE = 512


def pieces(positions: Sequence[Sequence[int]]) -> Iterator[tuple[int, slice, Sequence[int]]]:
    """Yields pieces of long chains, sequence by sequence, with at most ROWS_AT_ONCE rows.

    Each is the number of its sequence, its rows among those of all sequences, and their positions.
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
    """Runs a decoder layer in the library, with 4-bit weights; it owns all memory that the structures point to.

    matrices, norms: the layer's modules by their names in the library; see Layer in structures.def.
    pack: packs a matrix. norm_before_residual: attention is added to the normalized state instead of
    the state itself. Raises ValueError if the sizes do not fill the library's tiles.
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
        self._model = Model(
            layers=1,
            hidden=self.hidden_size,
            heads=self.heads,
            eps=norms["mlp_norm"].eps,
            scale=self.head_dim**-0.5,
            residual=1.0,
            layer=pointer(self._layer),
        )
        self._tables: list[Tensor] = []
        self._lock = threading.Lock()  # of the table, which several decoders may use
        self._reserve(FIRST_POSITIONS)

    def __deepcopy__(self, memo: dict[int, object]) -> NativeDecoderLayer:
        return self  # its weights do not change

    def extend(
        self,
        x: Tensor,
        positions: Sequence[Sequence[int]],
        caches: Sequence[RowCache],
        *embedded: Tensor,
        masks: Sequence[Tensor] | None = None,
        last: bool = False,
    ) -> Tensor:
        """Adds rows to the caches of B sequences as `DecoderLayer.extend` does, and returns the same output."""
        if not all(map(len, positions)):
            # The library takes no sequence without rows. Such a sequence has none in `x` either.
            present = [i for i, own in enumerate(positions) if len(own)]
            return self.extend(
                x,
                [positions[i] for i in present],
                [caches[i] for i in present],
                *embedded,
                masks=None if masks is None else [masks[i] for i in present],
                last=last,
            )
        if masks is None and max(map(len, positions)) > ROWS_AT_ONCE:
            outputs: dict[tuple[int, int], Tensor] = {}
            for i, part, piece in pieces(positions):
                parts = (own[part] for own in embedded)
                # Of a sequence's pieces, `last` returns only the last one's row.
                key = i, 0 if last else piece[0]
                outputs[key] = self.extend(x[part], [piece], [caches[i]], *parts, last=last)
            return torch.cat(list(outputs.values()))
        counts = [len(own) for own in positions]
        flat = np.array([position for own in positions for position in own], np.int32)
        self._reserve(int(flat.max()) + 1)
        states, read = self._inputs(x, embedded, len(flat))
        # `last` needs no mask. The arrays are kept here, as the structures point to them.
        seen = [None] * len(counts) if last else _seen(counts, masks)
        given = DraftPass(
            own=self._rows(counts, caches, seen, states),
            sequences=len(counts),
            last=last,
            positions=flat.ctypes.data,
            x=states.data_ptr(),
            embedded=None if read is None else read.data_ptr(),
        )
        code = library().draft(byref(self._model), byref(given))
        check(code, "rows of a draft do not fit the cache")
        for cache, own in zip(caches, positions, strict=True):
            cache.count(own)
        return (states[: len(counts)] if last else states).to(x.dtype)

    def _inputs(
        self, x: Tensor, embedded: Sequence[Tensor], rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the states, which the library replaces, and the embeddings, if any, that the matrices read first."""
        states = x.float() if self.first_norm is None else self.first_norm(x.float())
        states = states.clone(memory_format=torch.contiguous_format)
        read = [own.float().contiguous() for own in embedded]
        shape = rows, self.hidden_size
        inputs = self._owned[0]["query"].shape[1]
        require(
            inputs == self.hidden_size * (1 + len(read))
            and all(own.shape == shape for own in (states, *read)),
            f"states {tuple(x.shape)} are not those of {rows} rows",
        )
        return states, next(iter(read), None)

    def _rows(
        self,
        counts: Sequence[int],
        caches: Sequence[RowCache],
        masks: Sequence[NDArray[np.uint8] | None],
        like: Tensor,
    ) -> Any:
        """Returns the sequences' rows in the library's structures, after their caches have made room for them."""
        rows = (DraftRows * len(counts))()
        for own, cache, count, mask in zip(rows, caches, counts, masks, strict=True):
            own.rows = count
            own.earlier = 0 if mask is None else mask.shape[1] - count
            own.prefix = cache.length - own.earlier
            own.seen = None if mask is None else mask.ctypes.data
            keys, values = cache.room(count, self.heads, self.head_dim, like)
            own.keys = keys.data_ptr()
            own.values = values.data_ptr()
            own.capacity = keys.shape[1]
        return rows

    def _reserve(self, positions: int) -> None:
        """Makes room for at least `positions` positions in the rotary table."""
        with self._lock:
            if positions > self._model.positions:
                self._grow(positions)

    def _grow(self, positions: int) -> None:
        """Replaces the rotary table, of which each pass reads the start; `positions` is set last."""
        count = max(positions, 2 * self._model.positions)
        rates = self.rope_theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.arange(count).float()[:, None] * rates
        cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
        self._tables += [cos, sin]  # a call in another thread may still read the earlier ones
        self._model.cos[0] = cos.data_ptr()
        self._model.sin[0] = sin.data_ptr()
        self._model.rotary[0] = self.head_dim
        self._model.positions = count


def _seen(counts: Sequence[int], masks: Sequence[Tensor] | None) -> list[NDArray[np.uint8] | None]:
    """Returns the masks as bytes; without masks, the rows of a chain see each other and the rows before them."""
    if masks is None:
        masks = [torch.ones(count, count, dtype=torch.bool).tril() for count in counts]
    require(
        all(
            mask.ndim == 2 and len(mask) == count <= mask.shape[1]
            for mask, count in zip(masks, counts, strict=True)
        ),
        "a mask does not fit the rows of a draft",
    )
    return [np.ascontiguousarray(mask.numpy(), np.uint8) for mask in masks]
