"""Draft trees, and the tokens of their nodes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Stands for a token that the host does not know.
UNREAD = -1
# The parents of the root and of padding nodes, in trees that are stored as tensors.
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
        """Builds a tree from one rank path per node: the ranks from the root to the node (medusa_choices).

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
        """Returns the tree of all combinations of the best shape[k] guesses of each head k (Medusa, section 3.1.2)."""
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
        """Returns the tree of the selected nodes. `nodes` is in ascending order and includes each node's parent."""
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
        """Returns the children of every node, in ascending order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        return tuple(node for node, below in enumerate(self.children) if not below)

    def path(self, node: int) -> list[int]:
        """Returns the nodes from the root to `node`, both included."""
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
class Growth:
    """Holds how many draft tokens of a grown tree are expected to be accepted, and how many levels were drafted."""

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
        """Returns the draft of only the first `nodes` nodes, which include the parents of all of them."""
        tree = Tree(self.tree.parents[:nodes], self.tree.ranks[:nodes])
        return Draft(self.tokens[:nodes], tree, self.looked_up, self.growth)


def unread_draft(root: int, tree: Tree) -> Draft:
    """Returns a draft on the host in which only the root's token is known."""
    return Draft(torch.tensor([root, *[UNREAD] * (tree.size - 1)]), tree)


def batch_drafts(drafts: Sequence[Draft]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tokens [B, N], depths and masks of B drafts for one pass, padded to the largest tree.

    If all trees are equal, depths are [N] and the mask is [N, N]. Otherwise they are [B, N] and [B,
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
