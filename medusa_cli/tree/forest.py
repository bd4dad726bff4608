"""Trees of several sequences side by side, as one pass takes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_cli.tree.tree import Tree


def side_by_side(tokens: Sequence[Tensor], trees: Sequence[Tree]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, N], depths and who sees whom of B trees with tokens [N] each, all as wide as the largest.

    Depths are [N] and the mask is [N, N] where all trees are one, else [B, N] and [B, N, N]. A node that fills up sees
    itself alone, and nobody sees it.
    """
    if all(tree is trees[0] or tree == trees[0] for tree in trees):
        return torch.stack(list(tokens)), trees[0].depth, trees[0].mask
    size = max(tree.size for tree in trees)
    device = tokens[0].device
    whole = torch.zeros(len(trees), size, dtype=torch.long, device=device)
    depth = torch.zeros(len(trees), size, dtype=torch.long)
    sees = torch.eye(size, dtype=torch.bool).repeat(len(trees), 1, 1)
    for number, (tree, ids) in enumerate(zip(trees, tokens, strict=True)):
        whole[number, : tree.size] = ids
        depth[number, : tree.size] = tree.depth
        sees[number, : tree.size, : tree.size] = tree.mask
    return whole, depth.to(device), sees.to(device)
