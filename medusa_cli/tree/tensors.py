"""Draft trees as tensors of fixed shapes: static trees are filled, dynamic trees grow.

No function here reads the value of a tensor or derives a shape from a value, so CUDA graphs can capture all of them.
"""

from functools import cache, lru_cache

import torch
from torch import Tensor

from medusa_cli.device import numbered
from medusa_cli.tree.dynamic import DynamicTree
from medusa_cli.tree.tree import PADDING, ROOT_PARENT, UNREAD, Tree


class TreeTensors:
    """Holds B static trees of up to N nodes. Each node receives the guess with the node's rank from its head.

    nodes [B, 4, N]: depths, parents, ranks and tokens; mask bool [B, N, N]: each node sees itself
    and its ancestors. A padding node has depth 0 and the parent PADDING. A node that is still to be
    drafted has the token UNREAD. grows: True if a new level changes more than the tokens.
    """

    grows = False

    def __init__(self, nodes: Tensor, mask: Tensor) -> None:
        self.take(nodes, mask)
        # Shared by all levels: parents, their rows, ranks among the guesses, and the depths of UNREAD nodes.
        self._shared: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def take(self, nodes: Tensor, mask: Tensor) -> None:
        """Replaces the nodes and masks."""
        self.nodes = nodes
        self.tokens = nodes[:, 3]
        self.mask = mask

    @property
    def depth(self) -> Tensor:
        return self.nodes[:, 0]

    @property
    def parents(self) -> Tensor:
        return self.nodes[:, 1]

    @property
    def ranks(self) -> Tensor:
        return self.nodes[:, 2]

    @property
    def width(self) -> int:
        """Returns the number of guesses read per node."""
        return self.depth.shape[1]

    def temperature(self, head: int) -> float | None:
        """Returns the temperature of a head's confidences, or None if only their order matters."""
        return None

    def extend(self, head: int, log_p: Tensor, ids: Tensor) -> Tensor:
        """Adds a head's guesses below the nodes at the head's depth.

        log_p, ids [B, N or 1, W]: the log confidences and tokens of the guesses, best first. Returns, for each node,
        the row [B * N] that its parent had before this call among the nodes of all trees.
        """
        if self._shared is None:
            parents = self.parents.clamp(min=0)
            rows = (parents + _first_rows(*parents.shape, parents.device)).flatten()
            ranks = self.ranks.clamp(max=ids.shape[-1] - 1)[..., None]
            self._shared = parents, rows, ranks, self.depth * (self.tokens == UNREAD)
            self.tokens = self.tokens.clamp(min=0)
        parents, rows, ranks, depth = self._shared
        if head:
            ids = ids.gather(1, parents[..., None].expand(-1, -1, ids.shape[-1]))
        chosen = ids.expand(-1, self.width, -1).gather(2, ranks)[..., 0]
        self.tokens = torch.where(depth == head + 1, chosen, self.tokens)
        return rows


class GrowingTrees(TreeTensors):
    """Grows B dynamic trees in place of the UNREAD nodes of static trees (see `outline`).

    As many nodes stay as the static trees have: the most likely nodes of all levels, chosen as in
    TreeBuilder. Nodes with known tokens stay and get no children. A grown sibling may hold the same
    token as a node with a known token; the longer path is then accepted.
    """

    grows = True
    _open: Tensor
    _least: Tensor
    _complete: Tensor

    def __init__(self, limits: DynamicTree, nodes: Tensor, mask: Tensor) -> None:
        super().__init__(nodes, mask)
        self._limits = limits
        self._outline = nodes
        self._values: Tensor | None = None

    @property
    def width(self) -> int:
        return self._limits.width

    def temperature(self, head: int) -> float | None:
        return self._limits.temperature(head)

    def extend(self, head: int, log_p: Tensor, ids: Tensor) -> Tensor:
        size, count = self.depth.shape
        width = ids.shape[-1]
        lowest, itself, known, nowhere = _constants(count, width, head, ids.device)
        own = self._begin() if self._values is None else self._values
        below = self._open[..., None] + log_p  # [B, N, W]
        values = torch.cat([own, below.flatten(1), lowest.expand(size, 1)], dim=1)
        # The sort is stable: of two nodes with equal values, the earlier, which is never deeper, comes
        # first.
        best = values.sort(dim=1, descending=True, stable=True)
        lost = best.values[:, :count] <= self._least
        # Parents come before their children.
        order = best.indices[:, :count].masked_fill(lost, values.shape[1] - 1).sort(dim=1).values
        shape = size, -1, count, width
        children = torch.cat([known.expand(shape), ids[:, None].expand(shape)], dim=1).flatten(2)
        nodes = torch.cat([self.nodes, children, nowhere.expand(size, -1, -1)], dim=2)
        nodes = nodes.gather(2, order[:, None].expand(-1, 4, -1))
        parents = nodes[:, 1]
        above = parents.clamp(min=0)
        places = torch.searchsorted(order, parents.contiguous())
        torch.where(parents < 0, parents, places, out=parents)
        old = order < count
        self._values = values.gather(1, order)
        level = min(head + 1, count - 1)
        closed = old | self._complete[:, level : level + 1]
        self._open = self._values.masked_fill(closed, -torch.inf)
        # An old node keeps its row of the mask; a new node takes its parent's row.
        source = torch.where(old, order, above)
        mask = self.mask.gather(1, source[..., None].expand(-1, -1, count))
        mask = mask.gather(2, source[:, None].expand(-1, count, -1))
        self.take(nodes, mask & old[:, None] | itself)
        return (above + _first_rows(size, count, above.device)).flatten()

    def _begin(self) -> Tensor:
        """Returns the values [B, N] of the outline's nodes."""
        unread = self.tokens == UNREAD
        absent = self.parents == PADDING
        is_root = self.parents == ROOT_PARENT
        levels = (self.depth * unread).amax(1, keepdim=True)
        self._complete = levels <= numbered(self.depth.shape[1], self.depth.device)
        # The values of the nodes that get children next. The logarithm is 0 for True, and -inf for False.
        self._open = (is_root & (levels > 0)).log()
        # Padding comes last, and no node takes its place.
        self._least = absent.log()
        return (-is_root.log()).masked_fill(unread | absent, -torch.inf)


@cache
@torch.inference_mode(False)
def _first_rows(size: int, count: int, device: torch.device) -> Tensor:
    """Returns the row [B, 1] of each tree's root among the nodes of B trees of N nodes."""
    return count * torch.arange(size, device=device)[:, None]


@cache
@torch.inference_mode(False)
def _constants(
    count: int, width: int, head: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the constants that all steps share, for N nodes with W children each.

    The constants are -inf; the mask [N, N] of nodes that see only themselves; the depths, parents and ranks
    [1, 3, N, W] of a head's children; and the fields [1, 4, 1] of a padding node.
    """
    every = torch.arange(count, device=device)
    ranks = torch.arange(width, device=device).expand(count, -1)
    known = torch.stack([torch.full_like(ranks, head + 1), every[:, None].expand(-1, width), ranks])
    nowhere = torch.tensor([0, PADDING, 0, 0], device=device).view(1, 4, 1)
    lowest = torch.full((), -torch.inf, device=device)
    return lowest, every == every[:, None], known[None], nowhere


@lru_cache(maxsize=256)
def outline(tree: Tree | DynamicTree) -> Tree:
    """Returns a static tree with a dynamic tree's maximum numbers of nodes and levels: a chain plus leaves."""
    if isinstance(tree, Tree):
        return tree
    chain = min(tree.max_depth, tree.budget - 1)
    leaves = tree.budget - 1 - chain if chain else 0
    parents = (ROOT_PARENT, *range(chain), *[0] * leaves)
    ranks = (0, *[0] * chain, *range(1, leaves + 1))
    return Tree(parents, ranks)
