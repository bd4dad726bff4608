"""The levels of drafts in the native library: one call looks up tokens, runs a drafter's layer and guesses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import byref
from itertools import islice

import torch
from torch import Tensor, nn

from medusa_cli.engine.native_layer import NativeDecoderLayer, RowCache
from medusa_cli.engine.native_linear import NativeEmbedding, NativeLinear
from medusa_cli.native import library
from medusa_cli.native.library import DraftLevel, check


class NativeLevels:
    """Extends the draft trees of B sequences level by level.

    The library also does a level's small operations. In torch, they would take half as long as a level's calls.

    layer: a layer that reads embeddings besides states. norm, head: normalize and score the layer's output.
    tokens [M]: the ids of the head's outputs. embedding: looks up tokens. states [B, H]: the states of the
    roots. caches: hold the rows of each sequence up to its root. starts [B]: the positions of the first level.
    """

    def __init__(
        self,
        layer: NativeDecoderLayer,
        head: NativeLinear,
        norm: nn.RMSNorm | None,
        tokens: Tensor,
        embedding: nn.Module,
        states: Tensor,
        caches: Sequence[RowCache],
        starts: Sequence[int],
    ) -> None:
        self._layer = layer
        self._head = head
        self._norm = norm
        self._tokens = tokens
        self._embedding = embedding
        self.states = states.float().contiguous()
        self._caches = caches
        self._starts = starts
        # For each row of the last level: bytes that tell which of the sequence's rows after the root this row sees.
        self._seen = [b""] * len(caches)

    def extend(
        self,
        depth: int,
        counts: Sequence[int],
        parents: Sequence[int],
        tokens: Sequence[int],
        width: int,
        temperature: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Adds a level of N nodes; returns the scores and tokens [N, width] of their best children.

        depth: 1 for the roots' children. counts [B]: the number of nodes per sequence. parents [N]: the
        index of each node's parent in the level above.
        """
        above = self._layer.entering(self.states)
        states = torch.empty(len(tokens), self._layer.hidden_size)
        embedding = self._embedding
        matrix, scale = None, 1.0
        if isinstance(embedding, NativeEmbedding):
            matrix, scale = embedding.matrix.pointer, embedding.scale
            embedded = torch.empty_like(states)
        else:
            embedded = embedding(torch.tensor(tokens)).float().contiguous()
        # The library takes no sequence without rows. Structures point to all arrays, which must outlive the call.
        present = [i for i, count in enumerate(counts) if count]
        caches = [self._caches[i] for i in present]
        places = [[self._starts[i] + depth - 1] * counts[i] for i in present]
        positions = array("i", [place for own in places for place in own])
        counts = [counts[i] for i in present]
        masks = self._masks(counts, parents)
        self._layer.reserve(max(positions) + 1)
        guesses, scores, ids = self._head.guesses(
            len(tokens), width, temperature, self._norm, self._tokens
        )
        numbers = array("q", [*tokens, *parents])
        address, _ = numbers.buffer_info()
        level = DraftLevel(
            own=self._layer.rows_of(caches, counts, masks, states),
            sequences=len(present),
            positions=positions.buffer_info()[0],
            tokens=address,
            parents=address + numbers.itemsize * len(tokens),
            above=above.data_ptr(),
            above_rows=len(above),
            x=states.data_ptr(),
            embedded=embedded.data_ptr(),
            embedding=matrix,
            embedding_scale=scale,
            head=self._head.matrix.pointer,
            guesses=guesses,
        )
        code = library().level(byref(self._layer.model), byref(level))
        check(code, "rows of a draft do not fit the cache")
        for cache, own in zip(caches, places, strict=True):
            cache.count(own)
        self.states = states
        return scores, ids

    def _masks(self, counts: Sequence[int], parents: Sequence[int]) -> list[array[int]]:
        """Returns the masks [n, m] of a level as bytes: each row sees what its parent sees, and itself."""
        every = iter(parents)
        masks = []
        rows = []
        for count in counts:
            own = [
                self._seen[parent] + bytes(row) + b"\1" + bytes(count - 1 - row)
                for row, parent in enumerate(islice(every, count))
            ]
            masks.append(array("B", b"".join(own)))
            rows += own
        self._seen = rows
        return masks
