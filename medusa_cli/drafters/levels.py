"""A static tree level by level, for drafters whose guesses depend on those before them."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from medusa_cli.tree import Tree


@dataclass(frozen=True)
class Level:
    """The nodes of one depth: their ids, ranks and the rows of their parents [n]; which of them have children.

    A row is a place among the nodes of the depth above that have children; paths [rows, depth] are the nodes from the
    root to each of those.
    """

    nodes: Tensor
    rows: Tensor
    ranks: Tensor
    inner: Tensor
    paths: Tensor
    width: int


@lru_cache(maxsize=64)
def levels(tree: Tree, device: torch.device) -> list[Level]:
    """The levels of a tree below its root."""
    found = []
    row = {0: 0}  # nodes of the level above that have children -> row
    for depth in range(1, tree.max_depth + 1):
        nodes = [node for node in range(tree.size) if tree.depths[node] == depth]
        inner = [i for i, node in enumerate(nodes) if tree.children[node]]
        rows = torch.tensor([row[tree.parents[node]] for node in nodes], device=device)
        ranks = torch.tensor([tree.ranks[node] for node in nodes], device=device)
        inside = torch.tensor(inner, dtype=torch.long, device=device)
        paths = torch.tensor([tree.path(node) for node in row], device=device)
        found.append(Level(torch.tensor(nodes, device=device), rows, ranks, inside, paths, tree.widths[depth - 1]))
        row = {nodes[i]: place for place, i in enumerate(inner)}
    return found
