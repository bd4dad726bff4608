"""Drafting for heads whose guesses do not depend on one another's: one row of scores a head fills any tree."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_cli.drafters.base import Draft
from medusa_cli.tree import Growing, Growth, Tree

if TYPE_CHECKING:
    from medusa_cli.drafters.heads import HeadDrafter


def drafts_of(drafter: "HeadDrafter", scores: Sequence[Tensor], shape: Tree | Growth, roots: Tensor) -> list[Draft]:
    """Fill each node with the guess of its head and rank, or grow trees over the heads' confidences.

    scores: rows [B, M] for each head that the shape needs; roots [B].
    """
    if not shape.max_depth:
        return [Draft(root, Tree.root_only()) for root in roots[:, None]]
    if isinstance(shape, Growth):
        return [_grow(drafter, [row[i : i + 1] for row in scores], shape, roots[i]) for i in range(len(roots))]
    return [Draft(tokens, shape) for tokens in fill(drafter, scores, shape, roots)]


def _grow(drafter: "HeadDrafter", scores: Sequence[Tensor], growth: Growth, root: Tensor) -> Draft:
    growing, nodes = Growing(growth, int(root)), [0]
    for head, row in enumerate(scores):
        log_p, tokens = drafter.confidences(head, row, growth)
        nodes = growing.extend(nodes, log_p * len(nodes), tokens * len(nodes))
    grown, drafted = growing.tree()
    return Draft(torch.tensor(drafted, device=root.device), grown)


def fill(drafter: "HeadDrafter", scores: Sequence[Tensor], tree: Tree, roots: Tensor) -> Tensor:
    """Tokens [B, N] of a static tree for B sequences with roots [B], from scores [B, M] for each head it needs."""
    if not tree.max_depth:
        return roots[:, None]
    best = torch.stack(list(scores), dim=1).topk(max(tree.widths), dim=-1).indices  # [B, heads, widest]
    heads, ranks = _lookup(tree, roots.device)
    return torch.cat([roots[:, None], drafter.draft_ids[best[:, heads, ranks]]], dim=1)


@lru_cache(maxsize=64)
def _lookup(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Head index and rank of every node but the root, [N-1] each."""
    heads = torch.tensor([depth - 1 for depth in tree.depths[1:]], device=device)
    return heads, torch.tensor(tree.ranks[1:], device=device)
