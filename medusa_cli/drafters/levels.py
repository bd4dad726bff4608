"""Drafting a tree level by level: the one way in which static and dynamic trees are filled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from medusa_cli.drafters.base import NewTokens
from medusa_cli.tree import Draft, DynamicTree, Tree, TreeBuilder


@dataclass(frozen=True)
class Frontier:
    """The N nodes of B sequences' trees whose children are drafted next, one sequence after another.

    counts [B]: nodes of each sequence. above [N]: each one's parent among the nodes of the frontier before, or at first
    the sequences. tokens [N]: what they hold.
    """

    counts: list[int]
    above: Tensor
    tokens: Tensor


# guess(head, width, temperature, frontier): log confidences and token ids [N, width] of the children, best first.
Guess = Callable[[int, int, float | None, Frontier], tuple[Tensor, Tensor]]


def roots_of(new: Sequence[NewTokens]) -> Tensor:
    """Returns the roots [B] of B sequences."""
    return torch.tensor([tokens.root for tokens in new], device=new[0].tokens.device)


def draft_by_level(tree: Tree | DynamicTree, new: Sequence[NewTokens], guess: Guess) -> list[Draft]:
    """Drafts B trees below the roots of B sequences, the children of one level's nodes at a time."""
    if isinstance(tree, DynamicTree):
        return _grow(tree, roots_of(new), guess)
    tokens, count = roots_of(new)[:, None].repeat(1, tree.size), len(new)  # [B, N]
    for head, level in enumerate(_levels(tree, count, tokens.device)):
        frontier = Frontier([len(level.parents)] * count, level.above, tokens[:, level.parents].flatten())
        best = guess(head, level.width, None, frontier)[1].unflatten(0, (count, -1))  # [B, n, width]
        tokens[:, level.nodes] = best[:, level.rows, level.ranks]
    return [Draft(row, tree) for row in tokens]


def _grow(limits: DynamicTree, roots: Tensor, guess: Guess) -> list[Draft]:
    builders = [TreeBuilder(limits, root) for root in roots.tolist()]
    nodes, above = [[0] for _ in builders], list(range(len(builders)))
    for head in range(limits.max_depth):
        tokens = [builder.tokens[node] for builder, own in zip(builders, nodes, strict=True) for node in own]
        tensors = (torch.tensor(values, device=roots.device) for values in (above, tokens))
        frontier = Frontier([len(own) for own in nodes], *tensors)
        best = guess(head, limits.width, limits.temperature(head), frontier)
        log_p, ids = (values.tolist() for values in best)
        above, start = [], 0
        for number, builder in enumerate(builders):
            row = {node: start + i for i, node in enumerate(nodes[number])}
            end = start + len(row)
            nodes[number] = builder.extend(nodes[number], log_p[start:end], ids[start:end])
            above += [row[builder.parents[node]] for node in nodes[number]]
            start = end
        if not above:
            break
    grown = (builder.tree() for builder in builders)
    return [Draft(torch.tensor(tokens, device=roots.device), tree) for tree, tokens in grown]


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth and their ranks; rows [n]: the number of each one's parent among `parents`.

    above: each parent's own parent among the parents of the level before, for B sequences one after another.
    """

    width: int
    nodes: Tensor
    ranks: Tensor
    rows: Tensor
    parents: Tensor
    above: Tensor


@lru_cache(maxsize=64)
def _levels(tree: Tree, count: int, device: torch.device) -> list[_Level]:
    """Returns the levels of a tree below its root, for drafts of `count` sequences."""
    levels, before = [], {-1: 0}  # parents of the level before -> their number
    for depth in range(1, tree.max_depth + 1):
        nodes = [node for node in range(tree.size) if tree.depths[node] == depth]
        parents = sorted({tree.parents[node] for node in nodes})
        number = {parent: i for i, parent in enumerate(parents)}
        first = [before[tree.parents[parent]] for parent in parents]
        above = [row + sequence * len(before) for sequence in range(count) for row in first]
        lists = (nodes, [tree.ranks[node] for node in nodes], [number[tree.parents[node]] for node in nodes])
        tensors = [torch.tensor(values, device=device) for values in (*lists, parents, above)]
        levels.append(_Level(tree.widths[depth - 1], *tensors))
        before = number
    return levels
