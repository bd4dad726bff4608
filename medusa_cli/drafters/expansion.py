"""Tree expansion, which drafts static and dynamic trees level by level."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress

import torch
from torch import Tensor

from medusa_cli.device import upload
from medusa_cli.drafters.base import NewTokens
from medusa_cli.tree import Draft, DynamicTree, Growth, Prices, Tree, TreeBuilder


@dataclass(frozen=True)
class Frontier:
    """Holds the N nodes of B sequences' trees whose children are drafted next, sequence by sequence.

    counts [B]: the number of nodes per sequence. parents [N]: the index of each node's parent among the
    nodes of the previous frontier; in the first frontier, the index of the node's sequence. ids [N]:
    the tokens of the nodes. parents and ids are tensors, or lists that are uploaded to `device` when needed.
    """

    counts: list[int]
    parents: Tensor | list[int]
    ids: Tensor | list[int]
    device: torch.device | None = None

    @cached_property
    def tensors(self) -> Tensor | tuple[Tensor, Tensor]:
        """Returns parents and tokens as tensors [N]."""
        if isinstance(self.parents, Tensor) and isinstance(self.ids, Tensor):
            return self.parents, self.ids
        assert self.device is not None
        return upload([self.parents, self.ids], self.device)

    @property
    def parent_rows(self) -> Tensor:
        return self.tensors[0]

    @property
    def tokens(self) -> Tensor:
        return self.tensors[1]

    @property
    def lists(self) -> tuple[list[int], list[int]]:
        """Returns parents and tokens as lists."""
        if isinstance(self.parents, list) and isinstance(self.ids, list):
            return self.parents, self.ids
        return self.parent_rows.tolist(), self.tokens.tolist()


# guess(head, width, temperature, frontier) returns the log confidences and token ids [N, width] of
# the children, best first.
Guess = Callable[[int, int, float | None, Frontier], tuple[Tensor, Tensor]]


def roots_of(new: Sequence[NewTokens]) -> Tensor:
    """Returns the root tokens [B] of B sequences."""
    return upload([tokens.root for tokens in new], new[0].tokens.device)


def draft_by_level(tree: Tree | DynamicTree, new: Sequence[NewTokens], guess: Guess) -> list[Draft]:
    """Drafts B trees below the roots of B sequences, one level of children at a time."""
    if isinstance(tree, DynamicTree):
        return _grow(tree, new, guess)
    tokens = roots_of(new)[:, None].repeat(1, tree.size)  # [B, N]
    count = len(new)
    for head, level in enumerate(_levels(tree, count, tokens.device)):
        frontier = Frontier(
            [len(level.parents)] * count, level.parent_rows, tokens[:, level.parents].flatten()
        )
        # [B, n, width]
        best = guess(head, level.width, None, frontier)[1].unflatten(0, (count, -1))
        tokens[:, level.nodes] = best[:, level.rows, level.ranks]
    return [Draft(row, tree) for row in tokens]


def _grow(limits: DynamicTree, new: Sequence[NewTokens], guess: Guess) -> list[Draft]:
    builders = [TreeBuilder(limits, tokens.root) for tokens in new]
    device = new[0].tokens.device
    nodes = [[0] for _ in builders]
    parent_rows = list(range(len(builders)))
    size = limits.budget
    levels = 0
    while parent_rows and levels < limits.max_depth:
        tokens = [
            builder.tokens[node]
            for builder, own in zip(builders, nodes, strict=True)
            for node in own
        ]
        frontier = Frontier([len(own) for own in nodes], parent_rows, tokens, device)
        log_p, ids = _lists(*guess(levels, limits.width, limits.temperature(levels), frontier))
        levels += 1
        extended = nodes
        nodes = []
        start = 0
        for builder, own in zip(builders, extended, strict=True):
            end = start + len(own)
            nodes.append(builder.extend(own, log_p[start:end], ids[start:end]))
            start = end
        if limits.prices is not None:
            size = limits.prices.best_size([builder.chances for builder in builders])
            nodes = _worth_extending(limits.prices, builders, nodes, levels, size)
        parent_rows = _rows_of_parents(builders, extended, nodes)
    drafts = []
    for builder in builders:
        tree, chosen = builder.tree(size)
        growth = Growth(sum(builder.chances[: size - 1]), levels)
        drafts.append(Draft(upload(chosen, device), tree, growth=growth))
    return drafts


def _lists(log_p: Tensor, ids: Tensor) -> tuple[list[list[float]], list[list[int]]]:
    """Returns confidences and token ids as lists, after one transfer from a GPU."""
    if not log_p.is_cpu:
        # Floats of 32 bits hold the ids of any vocabulary exactly.
        log_p, ids = torch.stack([log_p.float(), ids.float()]).cpu()
        ids = ids.long()
    return log_p.tolist(), ids.tolist()


def _worth_extending(
    prices: Prices,
    builders: Sequence[TreeBuilder],
    nodes: Sequence[Sequence[int]],
    head: int,
    size: int,
) -> list[list[int]]:
    """Returns the nodes of each tree whose children are worth drafting with a head."""
    chances = [
        [builder.chance(node) for node in own] for builder, own in zip(builders, nodes, strict=True)
    ]
    worth = prices.worth_extending(head, size, chances)
    return [list(compress(own, kept)) for own, kept in zip(nodes, worth, strict=True)]


def _rows_of_parents(
    builders: Sequence[TreeBuilder],
    above: Sequence[Sequence[int]],
    nodes: Sequence[Sequence[int]],
) -> list[int]:
    """Returns the index of each node's parent among the nodes of the level above, over all trees."""
    rows = []
    start = 0
    for builder, parents, own in zip(builders, above, nodes, strict=True):
        row = {parent: start + i for i, parent in enumerate(parents)}
        rows += [row[builder.parents[node]] for node in own]
        start += len(parents)
    return rows


@dataclass(frozen=True)
class _Level:
    """Holds the nodes of one depth and their ranks.

    parents [m]: the nodes of the level above that have children. rows [n]: the index of each node's parent in
    `parents`. parent_rows [B * m]: for each of B sequences, the index of the parent of each of `parents` in the
    previous level's `parents`.
    """

    width: int
    nodes: Tensor
    ranks: Tensor
    rows: Tensor
    parents: Tensor
    parent_rows: Tensor


@lru_cache(maxsize=64)
def _levels(tree: Tree, count: int, device: torch.device) -> list[_Level]:
    """Returns the levels of a tree below its root, for drafts of `count` sequences."""
    depths, parent_of, ranks = map(torch.tensor, (tree.depths, tree.parents, tree.ranks))
    levels = []
    before = torch.tensor([-1])  # the parents of the previous level
    for depth in range(1, tree.max_depth + 1):
        nodes = (depths == depth).nonzero().squeeze(-1)
        parents, rows = parent_of[nodes].unique(return_inverse=True)
        first = torch.searchsorted(before, parent_of[parents])
        parent_rows = (first + len(before) * torch.arange(count)[:, None]).flatten()
        tensors = (
            upload(values, device) for values in (nodes, ranks[nodes], rows, parents, parent_rows)
        )
        levels.append(_Level(tree.widths[depth - 1], *tensors))
        before = parents
    return levels
