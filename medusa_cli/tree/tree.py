"""The draft tree: parents and ranks, what is derived from them, and its files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli.errors import UserError
from medusa_cli.runs.io import convert, read_json, write_json

# A step verifies all nodes at once under an N x N mask: no machine gains from more.
MAX_NODES = 1024
REMEDY = "make one with `medusa tree`, or give a list of rank paths"


@dataclass(frozen=True)
class Tree:
    """A tree of N nodes; node 0 is the root (parent -1), every other node comes after its parent.

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
        """Builds a tree from rank paths, one a node (medusa_choices); raises UserError for a missing parent."""
        paths = sorted({tuple(path) for path in choices if len(path)}, key=lambda path: (len(path), path))
        index: dict[tuple[int, ...], int] = {(): 0}
        parents, ranks = [-1], [0]
        for path in paths:
            if path[:-1] not in index or path[-1] < 0:
                raise UserError(
                    f"the tree's path {list(path)} has a negative rank or no parent", "add the parent's path"
                )
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
        return cls(tuple(parents), tuple(ranks))

    @classmethod
    def dense(cls, shape: Sequence[int]) -> "Tree":
        """Returns the Cartesian product of each head's top shape[k] guesses (Medusa, section 3.1.2)."""
        level: list[tuple[int, ...]] = [()]
        choices: list[tuple[int, ...]] = []
        for width in shape:
            level = [(*path, rank) for path in level for rank in range(width)]
            choices += level
        return cls.from_choices(choices)

    @classmethod
    def chain(cls, length: int) -> "Tree":
        """Returns the best guess of each of the first `length` heads, one below the other."""
        return cls.dense([1] * length)

    @classmethod
    def root_only(cls) -> "Tree":
        """Returns the tree of plain decoding: no guesses."""
        return cls((-1,), (0,))

    @property
    def size(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Returns the depth of every node, 0 at the root."""
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
        """Returns the guesses of each head that the tree uses: 1 + the highest rank at depths 1 .. max_depth."""
        widths = [0] * self.max_depth
        for depth, rank in zip(self.depths[1:], self.ranks[1:], strict=True):
            widths[depth - 1] = max(widths[depth - 1], rank + 1)
        return tuple(widths)

    @cached_property
    def mask(self) -> Tensor:
        """Returns the attention mask, bool [N, N]: mask[i, j] where j is i or an ancestor of i."""
        mask = torch.eye(self.size, dtype=torch.bool)
        parents = torch.tensor(self.parents[1:], dtype=torch.long)
        for _ in range(self.max_depth):  # each pass hands every node the ancestors of its parent found so far
            mask[1:] |= mask[parents]
        return mask

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
        """Returns every node but the root as its path of ranks."""
        return [[self.ranks[step] for step in self.path(node)[1:]] for node in range(1, self.size)]

    def truncate(self, depth: int) -> "Tree":
        """Returns the part of the tree down to a depth."""
        return Tree.from_choices(path for path in self.choices if len(path) <= depth)

    def truncate_to(self, positions: int) -> "Tree":
        """Returns the part of the tree that fits into so many positions, the root included."""
        return self if self.max_depth < positions else self.truncate(max(positions - 1, 0))

    def to_json(self) -> dict[str, Any]:
        return {"parents": list(self.parents), "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Tree":
        """Reads what to_json wrote; raises ValueError for numbers that are not integers."""
        parents, ranks = tuple(data["parents"]), tuple(data["ranks"])
        if not all(type(number) is int for number in (*parents, *ranks)):
            raise ValueError("parents and ranks must be integers")
        return cls(parents, ranks)


def save_tree(path: Path, tree: Tree, provenance: dict[str, Any]) -> None:
    """Writes a tree and its provenance atomically."""
    write_json(path, {**tree.to_json(), "choices": tree.choices, "provenance": provenance})


@dataclass(frozen=True)
class TreeProvenance:
    """The drafter that a tree was searched for, and the chance from which a node pays on the machine of the search."""

    drafter_stamp: str | None = None
    break_even: float = 0.0

    def __post_init__(self) -> None:
        if not self.break_even >= 0:
            raise ValueError("break_even is below 0")


@dataclass(frozen=True)
class TreeFile:
    """The content of a tree file: parents and ranks, or rank paths under one of two names."""

    parents: list[int] | None = None
    ranks: list[int] | None = None
    choices: list[list[int]] | None = None
    medusa_choices: list[list[int]] | None = None
    provenance: TreeProvenance = TreeProvenance()

    def tree(self) -> Tree:
        """Returns the tree; raises ValueError where the file holds none."""
        if self.parents is not None and self.ranks is not None:
            return Tree(tuple(self.parents), tuple(self.ranks))
        paths = self.choices if self.choices is not None else self.medusa_choices
        if paths is None or not all(paths):
            raise ValueError("neither parents and ranks nor a list of paths")
        return Tree.from_choices(paths)


def load_tree(path: Path) -> Tree:
    """Reads a tree from {"parents", "ranks"}, {"choices": [[...]]} or a bare list of choices; raises UserError."""
    try:
        tree = _read(path).tree()
    except ValueError as reason:
        raise UserError(f"the tree {path} cannot be used: {reason}", REMEDY) from reason
    if tree.size > MAX_NODES:
        raise UserError(f"the tree {path} has {tree.size:,} nodes", f"use {MAX_NODES:,} at most")
    return tree


def tree_provenance(path: Path) -> TreeProvenance:
    """Reads the provenance of a tree file; a bare list of choices has none."""
    return _read(path).provenance


def _read(path: Path) -> TreeFile:
    data = read_json(Path(path), "the tree")
    return convert({"choices": data} if isinstance(data, list) else data, TreeFile, f"the tree {path}", REMEDY)


def batch_trees(tokens: Sequence[Tensor], trees: Sequence[Tree]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens [B, N], depths and masks of B trees for one pass, padded to the largest.

    Depths are [N] and the mask is [N, N] if all trees are equal, else [B, N] and [B, N, N]. A padded node sees itself
    alone, and no node sees it.
    """
    if all(tree is trees[0] or tree == trees[0] for tree in trees):
        return torch.stack(list(tokens)), trees[0].depth, trees[0].mask
    size = max(tree.size for tree in trees)
    device = tokens[0].device
    padded = torch.zeros(len(trees), size, dtype=torch.long, device=device)
    depth = torch.zeros(len(trees), size, dtype=torch.long)
    mask = torch.eye(size, dtype=torch.bool).repeat(len(trees), 1, 1)
    for i, (tree, ids) in enumerate(zip(trees, tokens, strict=True)):
        padded[i, : tree.size] = ids
        depth[i, : tree.size] = tree.depth
        mask[i, : tree.size, : tree.size] = tree.mask
    return padded, depth.to(device), mask.to(device)
