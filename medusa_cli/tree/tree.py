"""Draft trees: static trees, dynamic trees that grow in each step, and the tokens of their nodes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Stands for a token that the host does not know.
UNREAD = -1
# Parents of the root and of padding nodes in trees stored as tensors.
ROOT_PARENT = -1
PADDING = -2


@dataclass(frozen=True)
class Tree:
    """Holds a tree of N nodes; node 0 is the root (parent -1), and every other node comes after its parent.

    A node at depth d >= 1 with rank r holds the r-th best guess (from 0) of head d.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks) or (self.parents[:1], self.ranks[:1]) != (
            (-1,),
            (0,),
        ):
            raise ValueError(
                "a tree needs one parent and one rank per node; the root's are -1 and 0"
            )
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents) if node):
            raise ValueError("every node but the root must come after its parent")
        if any(rank < 0 for rank in self.ranks):
            raise ValueError("a rank is negative; ranks count from 0")

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> "Tree":
        """Builds a tree from rank paths, one per node (medusa_choices).

        Raises ValueError for a missing parent or a negative rank.
        """
        paths = sorted(
            {tuple(path) for path in choices if len(path)}, key=lambda path: (len(path), path)
        )
        index: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        ranks = [0]
        for path in paths:
            if path[:-1] not in index or path[-1] < 0:
                raise ValueError(f"the path {list(path)} has a negative rank or no parent")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
        return cls(tuple(parents), tuple(ranks))

    @classmethod
    def dense(cls, shape: Sequence[int]) -> "Tree":
        """Returns the tree of the Cartesian product of each head's top shape[k] guesses (Medusa, section 3.1.2)."""
        level: list[tuple[int, ...]] = [()]
        choices: list[tuple[int, ...]] = []
        for width in shape:
            level = [(*path, rank) for path in level for rank in range(width)]
            choices += level
        return cls.from_choices(choices)

    @classmethod
    def chain(cls, length: int) -> "Tree":
        """Returns a chain of the best guesses of the first `length` heads."""
        return cls.dense([1] * length)

    @classmethod
    def root_only(cls) -> "Tree":
        """Returns the tree of plain decoding, which has only the root."""
        return cls((-1,), (0,))

    @classmethod
    def select(cls, parents: Sequence[int], ranks: Sequence[int], nodes: Sequence[int]) -> "Tree":
        """Returns the tree of the selected nodes, which are in ascending order and include their parents."""
        index = {node: i for i, node in enumerate(nodes)}
        return cls(
            tuple(index[parents[node]] if node else -1 for node in nodes),
            tuple(ranks[node] for node in nodes),
        )

    @cached_property
    def size(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Returns the depth of every node; the root has depth 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> Tensor:
        """Returns the depths as a long tensor [N]."""
        return torch.tensor(self.depths)

    @cached_property
    def max_depth(self) -> int:
        return max(self.depths)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Returns the number of guesses that the tree uses per head: 1 + the highest rank at each depth."""
        widths = [0] * self.max_depth
        for depth, rank in zip(self.depths[1:], self.ranks[1:], strict=True):
            widths[depth - 1] = max(widths[depth - 1], rank + 1)
        return tuple(widths)

    @cached_property
    def mask(self) -> Tensor:
        """Returns the attention mask, bool [N, N]: mask[i, j] is True if j is i or an ancestor of i."""
        mask = torch.eye(self.size, dtype=torch.bool)
        above = torch.tensor([0, *self.parents[1:]])
        # Each iteration doubles the number of generations that a node sees.
        for _ in range(self.max_depth.bit_length()):
            mask |= mask[above]
            above = above[above]
        return mask

    @cached_property
    def bits(self) -> tuple[int, ...]:
        """Returns the mask's rows as the bits of 64-bit integers, for trees of at most 64 nodes."""
        bits: list[int] = []
        for node, parent in enumerate(self.parents):
            bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
        return tuple(row - (row >> 63 << 64) for row in bits)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Returns the children of every node, in order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        return tuple(node for node, below in enumerate(self.children) if not below)

    def path(self, node: int) -> list[int]:
        """Returns the nodes from the root to this one."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    @cached_property
    def choices(self) -> list[list[int]]:
        """Returns the rank path of every node except the root."""
        return [[self.ranks[step] for step in self.path(node)[1:]] for node in range(1, self.size)]

    def truncate(self, depth: int) -> "Tree":
        """Returns the part of the tree down to a depth."""
        if self.max_depth <= depth:
            return self
        return Tree.select(
            self.parents,
            self.ranks,
            [node for node in range(self.size) if self.depths[node] <= depth],
        )

    def to_json(self) -> dict[str, Any]:
        return {"parents": list(self.parents), "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Tree":
        """Reads the output of to_json; raises ValueError for numbers that are not integers."""
        parents = tuple(data["parents"])
        ranks = tuple(data["ranks"])
        if not all(type(number) is int for number in (*parents, *ranks)):
            raise ValueError("parents and ranks must be integers")
        return cls(parents, ranks)


@dataclass(frozen=True)
class Prices:
    """Holds what drafting costs, in draft tokens that must be accepted to pay for it.

    passes: the cost of a pass over 1, 2, .. nodes per sequence, compared to the root alone. levels:
    the cost of drafting 1, 2, .. levels. hits: the probability that a head's best guess is right.
    """

    passes: tuple[float, ...]
    levels: tuple[float, ...]
    hits: tuple[float, ...]

    def beside(self, rows: int) -> "Prices":
        """Returns the prices in a pass that has `rows` more rows."""
        return replace(self, passes=self.passes[rows:])

    def best_size(self, chances: Sequence[Sequence[float]]) -> int:
        """Returns the number of nodes per sequence for which the most is accepted beyond its price.

        chances: for each sequence, the probabilities of acceptance of its nodes below the root,
        highest first.
        """
        best_size = 1
        best_profit = 0.0
        profit = 0.0
        for size in range(1, min(len(self.passes), 1 + max(map(len, chances)))):
            profit += sum(own[size - 1] for own in chances if len(own) >= size)
            profit -= self.passes[size] - self.passes[size - 1]
            if profit > best_profit:
                best_profit = profit
                best_size = size + 1
        return best_size

    def worth_extending(
        self, head: int, size: int, chances: Sequence[Sequence[float]]
    ) -> list[list[bool]]:
        """Returns for each node of a level whether its children are worth drafting with a head.

        size: the number of nodes per sequence that pay so far. chances: for each sequence, the
        probabilities of acceptance of the level's nodes. A whole level must pay for its drafting.
        """
        if head >= min(len(self.levels), len(self.hits)) or size >= len(self.passes):
            return [[False] * len(own) for own in chances]
        row = (self.passes[size] - self.passes[size - 1]) / len(chances)
        profits = [[self.hits[head] * chance - row for chance in own] for own in chances]
        profit = sum(max(value, 0.0) for own in profits for value in own)
        pays = profit > self.levels[head] - self.levels[head - 1]
        return [[pays and value > 0 for value in own] for own in profits]


@dataclass(frozen=True)
class DynamicTree:
    """Limits a tree that grows in each step: at most `budget` nodes including the root.

    A head's confidences are its softmax at a temperature of its own (1 by default), which
    `calibrate` fits. With prices, the tree grows only as far as it pays.
    """

    budget: int
    max_depth: int
    temperatures: tuple[float, ...] = ()
    width: int = 10  # guesses considered per node
    prices: Prices | None = None

    def temperature(self, head: int) -> float:
        return self.temperatures[head] if head < len(self.temperatures) else 1.0

    def truncate(self, depth: int) -> "DynamicTree":
        """Returns the same limits with at most this depth."""
        return self if self.max_depth <= depth else replace(self, max_depth=depth)


class TreeBuilder:
    """Grows the tree of one step level by level; the best `budget - 1` candidates stay.

    A node's value is the product of the confidences along its path, and never more than its
    parent's. So if a node is among the best, its ancestors are, too. GrowingTrees does the same
    with tensors, which is slower on a CPU.
    """

    def __init__(self, limits: DynamicTree, root: int) -> None:
        self._limits = limits
        self.parents = [-1]
        self._ranks = [0]
        self._values = [0.0]
        self.tokens = [root]
        self._floor = -math.inf

    def chance(self, node: int) -> float:
        """Returns the product of the confidences along a node's path."""
        return math.exp(self._values[node])

    @property
    def chances(self) -> list[float]:
        """Returns the chances of the best nodes below the root, highest first."""
        values = sorted(self._values[1:], reverse=True)[: self._limits.budget - 1]
        return [math.exp(value) for value in values]

    def extend(
        self,
        nodes: Sequence[int],
        log_p: Sequence[Sequence[float]],
        tokens: Sequence[Sequence[int]],
    ) -> list[int]:
        """Adds children to `nodes`, given the children's log confidences, best first, and tokens.

        Returns the children that may stay.
        """
        first = len(self._values)
        for node, row, guesses in zip(nodes, log_p, tokens, strict=True):
            above = self._values[node]
            for rank, (confidence, token) in enumerate(zip(row, guesses, strict=True)):
                value = above + confidence
                if value < self._floor:
                    break
                self.parents.append(node)
                self._ranks.append(rank)
                self._values.append(value)
                self.tokens.append(token)
        limit = self._limits.budget - 1
        if len(self._values) - 1 > limit:
            # Nodes with equal values all stay; `tree` drops those beyond the budget.
            self._floor = sorted(self._values[1:], reverse=True)[limit - 1] if limit else math.inf
        return [
            node for node in range(first, len(self._values)) if self._values[node] >= self._floor
        ]

    def tree(self, size: int) -> tuple[Tree, list[int]]:
        """Returns the tree of the best `size` nodes, including the root, and their tokens."""
        # The sort is stable: among equal nodes, the earlier one comes first, which is never deeper.
        best = sorted(range(1, len(self._values)), key=lambda node: -self._values[node])
        kept = [0, *sorted(best[: size - 1])]
        return Tree.select(self.parents, self._ranks, kept), [self.tokens[node] for node in kept]


@dataclass(frozen=True)
class Growth:
    """Holds the number of tokens expected to be accepted from a grown tree, and the number of levels drafted for it."""

    expected: float
    levels: int


@dataclass(frozen=True)
class Draft:
    """Holds draft tokens [N] for the nodes of a tree; tokens[0] is the root.

    looked_up: the number of nodes from n-gram matches. growth: None for a static tree. Raises
    ValueError if there is not one token for each node.
    """

    tokens: Tensor
    tree: Tree
    looked_up: int = 0
    growth: Growth | None = None

    def __post_init__(self) -> None:
        if tuple(self.tokens.shape) != (self.tree.size,):
            shape = tuple(self.tokens.shape)
            raise ValueError(f"draft tokens {shape} do not fit a tree of {self.tree.size} nodes")

    @cached_property
    def ids(self) -> list[int]:
        """Returns the tokens on the host; the first call waits for the device."""
        ids: list[int] = self.tokens.tolist()
        return ids

    def first(self, nodes: int) -> "Draft":
        """Returns the draft of the first `nodes` nodes; parents come before their children."""
        tree = Tree(self.tree.parents[:nodes], self.tree.ranks[:nodes])
        return Draft(self.tokens[:nodes], tree, self.looked_up, self.growth)


def unread_draft(root: int, tree: Tree) -> Draft:
    """Returns a draft on the host in which only the root's token is known."""
    return Draft(torch.tensor([root, *[UNREAD] * (tree.size - 1)]), tree)


def batch_drafts(drafts: Sequence[Draft]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tokens [B, N], depths and masks of B drafts for one pass, padded to the largest.

    Depths are [N] and the mask is [N, N] if all trees are equal. Otherwise they are [B, N] and [B,
    N, N]. A padding node sees only itself, and no other node sees it.
    """
    first = drafts[0].tree
    if all(draft.tree is first or draft.tree == first for draft in drafts):
        return torch.stack([draft.tokens for draft in drafts]), first.depth, first.mask
    size = max(draft.tree.size for draft in drafts)
    device = drafts[0].tokens.device
    tokens = torch.zeros(len(drafts), size, dtype=torch.long, device=device)
    depth = torch.zeros(len(drafts), size, dtype=torch.long)
    mask = torch.eye(size, dtype=torch.bool).repeat(len(drafts), 1, 1)
    for i, draft in enumerate(drafts):
        nodes = draft.tree.size
        tokens[i, :nodes] = draft.tokens
        depth[i, :nodes] = draft.tree.depth
        mask[i, :nodes, :nodes] = draft.tree.mask
    return tokens, depth.to(device), mask.to(device)
