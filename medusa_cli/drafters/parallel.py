"""Drafting for heads that all guess at once: one row of scores a head fills any tree.

With a conditional bias a node's guesses depend on its token, but on nothing else: levels follow one another over a few
candidates, without another pass through any head.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa_cli.drafters.base import Draft
from medusa_cli.drafters.conditional import Conditional
from medusa_cli.drafters.levels import levels
from medusa_cli.tree import Growing, Growth, Tree

if TYPE_CHECKING:
    from medusa_cli.drafters.heads import HeadDrafter

Scoring = Callable[..., Sequence[Tensor]]


def drafts_of(
    drafter: "HeadDrafter", score: Scoring, inputs: Sequence[Tensor], shape: Tree | Growth, roots: Tensor
) -> list[Draft]:
    """Fill each node with the guess of its head and rank, or grow trees over the heads' confidences.

    score(*inputs): rows [B, M] for each head that the shape needs; roots [B].
    """
    if not shape.max_depth:
        return [Draft(root, Tree.root_only()) for root in roots[:, None]]
    scores = drafter.repeated(("scores", shape.max_depth), lambda *given: torch.stack(list(score(*given))), *inputs)
    if isinstance(shape, Growth):
        return [_grow(drafter, scores[:, i : i + 1], shape, roots[i]) for i in range(len(roots))]
    return [Draft(tokens, shape) for tokens in fill(drafter, scores, shape, roots)]


def _grow(drafter: "HeadDrafter", scores: Tensor, growth: Growth, root: Tensor) -> Draft:
    growing, nodes = Growing(growth, int(root)), [0]
    for head, row in enumerate(scores):
        if not nodes:
            break
        nodes = growing.extend(nodes, *_offered(drafter, head, row, [growing.tokens[node] for node in nodes], growth))
    grown, drafted = growing.tree()
    return Draft(torch.tensor(drafted, device=root.device), grown)


def _offered(
    drafter: "HeadDrafter", head: int, row: Tensor, nodes: list[int], growth: Growth
) -> tuple[list[list[float]], list[list[int]]]:
    """Log confidences and tokens of a head's best guesses below each node of a token, by its scores [1, M]."""
    if drafter.conditional is None:
        log_p, tokens = drafter.confidences(head, row, growth)
        return log_p * len(nodes), tokens * len(nodes)
    before = torch.tensor(nodes, device=row.device)
    found, places = drafter.conditional.confident(row, before, growth.width, growth.temperature(head))
    return found.tolist(), drafter.draft_ids[places].tolist()


def fill(drafter: "HeadDrafter", scores: Tensor, tree: Tree, roots: Tensor) -> Tensor:
    """Tokens [B, N] of a static tree for B sequences with roots [B], from scores [K, B, M] of the heads it needs."""
    if not tree.max_depth:
        return roots[:, None]
    if drafter.conditional is not None:
        return _fill_after(drafter, drafter.conditional, scores, tree, roots)
    best = scores.topk(max(tree.widths), dim=-1).indices  # [K, B, widest]
    heads, ranks = _lookup(tree, roots.device)
    return torch.cat([roots[:, None], drafter.draft_ids[best[heads, :, ranks].T]], dim=1)


def _fill_after(drafter: "HeadDrafter", conditional: Conditional, scores: Tensor, tree: Tree, roots: Tensor) -> Tensor:
    tokens, before = roots[:, None].repeat(1, tree.size), roots[:, None]
    for row, level in zip(scores, levels(tree, roots.device), strict=False):
        best = conditional.best(row, before, level.width)
        tokens[:, level.nodes] = drafter.draft_ids[best[:, level.rows, level.ranks]]
        before = tokens[:, level.nodes[level.inner]]
    return tokens


@lru_cache(maxsize=64)
def _lookup(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Head index and rank of every node but the root, [N-1] each."""
    heads = torch.tensor([depth - 1 for depth in tree.depths[1:]], device=device)
    return heads, torch.tensor(tree.ranks[1:], device=device)
