"""Draft trees as tensors of fixed shapes: static trees are filled, dynamic trees grow.

Nothing here reads the value of a tensor or derives a shape from one, so CUDA graphs can capture it.
"""

from functools import cache, lru_cache

import torch
from torch import Tensor

from medusa_cli.device import numbered
from medusa_cli.tree.dynamic import DynamicTree
from medusa_cli.tree.tree import PADDING, ROOT_PARENT, UNREAD, Tree


class TreeTensors:
    """Holds B static trees of up to N nodes; each node receives its head's guess of the node's rank.

    depth, parents, ranks, tokens [B, N]; mask bool [B, N, N]: each node sees itself and its
    ancestors. A padding node has depth 0 and the parent PADDING. A node that is still to be drafted
    has the token UNREAD.
    """

    def __init__(
        self, depth: Tensor, parents: Tensor, ranks: Tensor, tokens: Tensor, mask: Tensor
    ) -> None:
        self.depth = depth
        self.parents = parents
        self.ranks = ranks
        self.tokens = tokens
        self.mask = mask

    @property
    def width(self) -> int:
        """Returns the number of guesses read per node."""
        return self.depth.shape[1]

    def temperature(self, head: int) -> float | None:
        """Returns the temperature of a head's confidences, or None if only their order matters."""
        return None

    def extend(self, head: int, log_p: Tensor, ids: Tensor) -> Tensor:
        """Adds a head's log confidences and tokens [B, N or 1, W], best first, below the nodes at its depth.

        Returns the index [B, N] that each node's parent had before.
        """
        parents = self.parents.clamp(min=0)
        width = ids.shape[-1]
        if head:
            ids = ids.gather(1, parents[..., None].expand(-1, -1, width))
        ranks = self.ranks.clamp(max=width - 1)[..., None]
        chosen = ids.expand(-1, self.width, -1).gather(2, ranks)[..., 0]
        drafted = (self.depth == head + 1) & (self.tokens == UNREAD)
        self.tokens = torch.where(drafted, chosen, self.tokens)
        return parents


class GrowingTrees(TreeTensors):
    """Grows B dynamic trees in place of the UNREAD nodes of static ones (see `outline`).

    As many nodes stay as the static trees have. They are the most likely ones of all levels, chosen
    as in TreeBuilder. Nodes with known tokens stay and get no children. A grown sibling may hold
    the same token as such a node; the longer path is accepted.
    """

    def __init__(self, limits: DynamicTree, *outlines: Tensor) -> None:
        super().__init__(*outlines)
        self._limits = limits
        unread = self.tokens == UNREAD
        absent = self.parents == PADDING
        self._room = (~absent).sum(1, keepdim=True)
        self._levels = (self.depth * unread).amax(1, keepdim=True)
        known = torch.zeros_like(self.depth, dtype=torch.float).masked_fill(
            self.parents != ROOT_PARENT, torch.inf
        )
        self._values = known.masked_fill(unread | absent, -torch.inf)

    @property
    def width(self) -> int:
        return self._limits.width

    def temperature(self, head: int) -> float | None:
        return self._limits.temperature(head)

    def extend(self, head: int, log_p: Tensor, ids: Tensor) -> Tensor:
        (_, count) = self.depth.shape
        width = ids.shape[-1]
        every = numbered(count, ids.device)
        lowest, padding, itself = _constants(count, ids.device)
        below = self._values[..., None] + log_p  # [B, N, W]
        extended = (self.depth == head) & (self._values.abs() < torch.inf) & (head < self._levels)
        below = torch.where(extended[..., None], below, lowest)
        worst = lowest.expand(len(below), 1)
        values = torch.cat([self._values, below.flatten(1), worst], dim=1)
        # The sort is stable: among equal values, the earlier node comes first, which is never
        # deeper.
        best = values.sort(dim=1, descending=True, stable=True)
        kept = (best.values[:, :count] > -torch.inf) & (every < self._room)
        nowhere = values.shape[1] - 1
        # Parents come before their children.
        order = torch.where(kept, best.indices[:, :count], nowhere).sort(dim=1).values
        nodes = torch.stack([self.parents, self.ranks, self.depth, self.tokens])  # [4, B, N]
        ranks = numbered(width, ids.device)
        level = numbered(head + 2, ids.device)[-1]
        children = torch.stack(
            [field.expand(below.shape) for field in (every[:, None], ranks, level, ids)]
        )
        nowhere_fields = padding.expand(4, len(below), 1)
        fields = torch.cat([nodes, children.flatten(2), nowhere_fields], dim=2)
        above, self.ranks, self.depth, self.tokens = fields.gather(
            2, order.expand(4, -1, -1)
        ).unbind()
        self._values = values.gather(1, order)
        self.parents = torch.where(above < 0, above, torch.searchsorted(order, above))
        self.parents = self.parents.masked_fill(order == nowhere, PADDING)
        # An old node keeps its row of the mask; a new node takes its parent's row.
        old = order < count
        above = above.clamp(min=0)
        source = torch.where(old, order, above)
        mask = self.mask.gather(1, source[..., None].expand(-1, -1, count))
        mask = mask.gather(2, source[:, None].expand(-1, count, -1))
        self.mask = mask & old[:, None] | itself
        return above


@cache
@torch.inference_mode(False)
def _constants(count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns -inf, 0 and the mask [N, N] of nodes that see only themselves, which no level has to make again."""
    lowest = torch.full((), -torch.inf, device=device)
    every = torch.arange(count, device=device)
    return lowest, torch.zeros_like(every[0]), every == every[:, None]


@lru_cache(maxsize=256)
def outline(tree: Tree | DynamicTree) -> Tree:
    """Returns a static tree with the maximum nodes and levels of a dynamic one: a chain and leaves."""
    if isinstance(tree, Tree):
        return tree
    chain = min(tree.max_depth, tree.budget - 1)
    leaves = tree.budget - 1 - chain if chain else 0
    parents = (ROOT_PARENT, *range(chain), *[0] * leaves)
    ranks = (0, *[0] * chain, *range(1, leaves + 1))
    return Tree(parents, ranks)
