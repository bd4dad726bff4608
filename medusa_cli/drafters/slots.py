"""Drafting within a CUDA graph: trees, new tokens and drafter caches are tensors of fixed shapes.

Nothing here reads the value of a tensor on the host, or derives a shape from a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from medusa_cli.device import numbered
from medusa_cli.drafters.expansion import Frontier, Guess
from medusa_cli.drafters.layer_rows import LayerRows
from medusa_cli.drafters.layers import DecoderLayer, SlotRows, without_first_column
from medusa_cli.tree.tensors import TreeTensors


@dataclass(frozen=True)
class NewTensors:
    """Holds, for each of B sequences, up to P tokens that the drafter has not read.

    hidden [B, P, H * taps]. following [B, P]: the token after each token. count [B]: the number of
    tokens, the last of which is followed by the root. start [B]: the position of the first token.
    held [B]: the number of a sequence's rows in the layers' caches. caches: a tensor
    [2, B, heads, C, D] per layer.
    """

    hidden: Tensor
    following: Tensor
    start: Tensor
    held: Tensor
    count: Tensor
    caches: Sequence[Tensor]

    def rows(self) -> SlotRows:
        """Returns the tokens as rows for decoder layers; each row sees itself and the earlier rows."""
        every = numbered(self.hidden.shape[1], self.hidden.device)
        tree_mask = (every <= every[:, None]).expand(len(self.hidden), -1, -1)
        return SlotRows(self.held, self.start[:, None] + every, tree_mask, empty=True)

    def nodes(self, trees: TreeTensors) -> SlotRows:
        """Returns the nodes of the trees as rows after the new tokens' rows.

        Other nodes do not see the root's row: a layer that reads next tokens has already read the
        root.
        """
        lengths, before = self._ends
        mask = trees.mask & without_first_column(trees.mask)
        return SlotRows(lengths, before + trees.depth, mask)

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Returns the number of rows [B] in the caches, new rows included, and the position [B, 1] of the last row."""
        return self.held + self.count, (self.start + self.count)[:, None] - 1

    def last(self, x: Tensor) -> Tensor:
        """Returns the rows [B, H] of x [B, P, H] that belong to each sequence's last token."""
        return x.gather(1, (self.count - 1)[:, None, None].expand(-1, -1, x.shape[-1]))[:, 0]


class LayerSlots:
    """Holds rows of decoder layers in S slots of C rows, at fixed addresses that CUDA graphs use.

    When a graph runs a sequence in a slot, the sequence's caches move into the slot, and those of the
    slot's previous sequence move out. rows: the maximum number of new tokens per sequence that a
    graph reads.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], slots: int, capacity: int, rows: int
    ) -> None:
        self.rows = rows
        # Unused rows must hold finite numbers.
        self.buffers = [
            layer.new_rows(2, slots, layer.heads, capacity, layer.head_dim) for layer in layers
        ]
        self._views = [buffer.unbind(1) for buffer in self.buffers]
        self._owners: list[Sequence[LayerRows]] = [()] * slots

    def take(self, slot: int, caches: Sequence[LayerRows]) -> None:
        """Moves a sequence's caches into a slot."""
        for owner, views in zip(self._owners[slot], self._views, strict=False):
            if owner.rows is views[slot] and not any(owner is cache for cache in caches):
                owner.move(views[slot].clone())
        for cache, views in zip(caches, self._views, strict=True):
            if cache.rows is not views[slot]:
                cache.move(views[slot])
        self._owners[slot] = caches

    def held(self, slot: int) -> int:
        """Returns the number of rows in a slot that belong to a sequence."""
        owner = next(iter(self._owners[slot]), None)
        return owner.length if owner is not None and owner.rows is self._views[0][slot] else 0


def fill_by_level(trees: TreeTensors, levels: int, guess: Guess) -> None:
    """Drafts the tree nodes whose tokens are not known, level by level; every level computes all nodes."""
    size, count = trees.depth.shape
    sequences = numbered(size, trees.depth.device)
    frontier = Frontier([1] * size, sequences, trees.tokens[:, 0])
    for head in range(levels):
        log_p, ids = guess(head, trees.width, trees.temperature(head), frontier)
        rows = trees.extend(head, log_p.unflatten(0, (size, -1)), ids.unflatten(0, (size, -1)))
        if not head:
            rows = sequences[:, None].expand(-1, count).flatten()
        frontier = Frontier([count] * size, rows, trees.tokens.flatten())
