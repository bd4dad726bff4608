"""The tree of guesses: parents and ranks; masks, depths and paths are derived from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from medusa_cli.errors import UserError


@dataclass(frozen=True)
class Tree:
    """N nodes by their parents and ranks; node 0 is the root (parent -1), every other node comes after its parent.

    A node at depth d >= 1 with rank r holds the r-th best guess (from 0) of head d.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks) or not self.parents or self.parents[0] != -1:
            raise ValueError("a tree needs one parent and one rank a node, the root's parent being -1")
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents) if node):
            raise ValueError("every node but the root must come after its parent")
        if any(rank < 0 for rank in self.ranks):
            raise ValueError("a rank is negative; ranks count from 0")

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> "Tree":
        """From paths of ranks, one a node (the reference's medusa_choices); a missing ancestor is a UserError."""
        paths = sorted({tuple(path) for path in choices if len(path)}, key=lambda path: (len(path), path))
        index: dict[tuple[int, ...], int] = {(): 0}
        parents, ranks = [-1], [0]
        for path in paths:
            if path[:-1] not in index:
                raise UserError(
                    f"the tree's path {list(path)} has no parent {list(path[:-1])}", "add the parent's path"
                )
            if path[-1] < 0:
                raise UserError(f"the tree's path {list(path)} has a negative rank", "ranks count from 0")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
        return cls(tuple(parents), tuple(ranks))

    @classmethod
    def dense(cls, shape: Sequence[int]) -> "Tree":
        """The Cartesian product of each head's top shape[k] guesses (Medusa, section 3.1.2)."""
        choices: list[tuple[int, ...]] = [()]
        level: list[tuple[int, ...]] = [()]
        for width in shape:
            level = [(*path, rank) for path in level for rank in range(width)]
            choices += level
        return cls.from_choices(choices)

    @classmethod
    def chain(cls, length: int) -> "Tree":
        """The best guess of each of the first `length` heads, one below the other."""
        return cls.dense([1] * length)

    @classmethod
    def root_only(cls) -> "Tree":
        """No guesses: a plain decoding step."""
        return cls((-1,), (0,))

    @property
    def size(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of every node, 0 at the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> Tensor:
        """Depths as a long tensor [N]."""
        return torch.tensor(self.depths)

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """How many guesses of each head the tree uses: 1 + the highest rank at depths 1 .. max_depth."""
        widths = [0] * self.max_depth
        for depth, rank in zip(self.depths[1:], self.ranks[1:], strict=True):
            widths[depth - 1] = max(widths[depth - 1], rank + 1)
        return tuple(widths)

    @cached_property
    def mask(self) -> Tensor:
        """Who sees whom, bool [N, N]: mask[i, j] where j is i or an ancestor of i."""
        mask = torch.eye(self.size, dtype=torch.bool)
        parents = torch.tensor(self.parents[1:], dtype=torch.long)
        for _ in range(self.max_depth):  # each pass hands every node the ancestors of its parent found so far
            mask[1:] |= mask[parents]
        return mask

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of every node, in order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        return tuple(node for node, below in enumerate(self.children) if not below)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    @cached_property
    def choices(self) -> list[list[int]]:
        """Every node but the root as its path of ranks."""
        return [[self.ranks[step] for step in self.path(node)[1:]] for node in range(1, self.size)]

    def cut(self, depth: int) -> "Tree":
        """The part of the tree down to a depth."""
        return Tree.from_choices(path for path in self.choices if len(path) <= depth)

    def to_json(self) -> dict[str, Any]:
        return {"parents": list(self.parents), "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Tree":
        """From what to_json gives; ValueError for numbers that are not whole."""
        parents, ranks = tuple(data["parents"]), tuple(data["ranks"])
        if not all(type(number) is int for number in (*parents, *ranks)):
            raise ValueError("parents and ranks must be whole numbers")
        return cls(parents, ranks)
