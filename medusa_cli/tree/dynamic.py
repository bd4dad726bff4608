"""Dynamic trees, which grow level by level in each step: their limits, and the cost of growth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

from medusa_cli.tree.tree import Tree


@dataclass(frozen=True)
class Prices:
    """Holds the costs of drafting. A cost is the number of draft tokens that must be accepted to make up for it.

    passes: the added cost of a pass over 1, 2, .. nodes per sequence, relative to a pass over only
    the root. levels: the cost of drafting 1, 2, .. levels. hits: the probability that each head's
    best guess is right.
    """

    passes: tuple[float, ...]
    levels: tuple[float, ...]
    hits: tuple[float, ...]

    def with_rows(self, rows: int) -> "Prices":
        """Returns the prices for a pass that also has `rows` other rows per sequence."""
        return replace(self, passes=self.passes[rows:])

    def best_size(self, chances: Sequence[Sequence[float]]) -> int:
        """Returns the number of nodes per sequence that maximizes the expected accepted tokens minus the price.

        chances: for each sequence, the probabilities of acceptance of its nodes below the root, highest first.
        """
        best_size = 1
        best_profit = 0.0
        profit = 0.0
        gains = map(sum, zip_longest(*chances, fillvalue=0.0))
        steps = zip(gains, pairwise(self.passes), strict=False)
        for size, (gain, (before, after)) in enumerate(steps, 2):
            profit += gain
            profit -= after - before
            if profit > best_profit:
                best_profit = profit
                best_size = size
        return best_size

    def worth_extending(
        self, head: int, size: int, chances: Sequence[Sequence[float]]
    ) -> list[list[bool]]:
        """Returns, for each node of a level, True if its children are worth drafting with a head.

        size: the result of `best_size` for the levels drafted already. chances: for each sequence, the
        probabilities of acceptance of the level's nodes. The next level as a whole must make up for
        the cost of drafting it.
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

    A head's confidences are the softmax of its scores at the head's own temperature (1 by default),
    which `calibrate` fits. With prices, the tree grows only as long as growth pays.
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
    """Grows the tree of one step level by level; the best `budget - 1` nodes below the root stay.

    A node's value is the sum of the log confidences along its path, so it is never above its parent's value. If a node
    is among the best, so are its ancestors. GrowingTrees does the same with tensors, which is slower on a CPU.
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
        """Adds children to `nodes`; returns the children that may stay.

        log_p, tokens: for each node, its children's log confidences and tokens, best first.
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
            # Nodes that tie with the last node within the budget stay; `tree` drops the excess.
            self._floor = sorted(self._values[1:], reverse=True)[limit - 1] if limit else math.inf
        return [
            node for node in range(first, len(self._values)) if self._values[node] >= self._floor
        ]

    def tree(self, size: int) -> tuple[Tree, list[int]]:
        """Returns the tree of the best `size` nodes, including the root, and their tokens."""
        # The sort is stable: of two nodes with equal values, the earlier, which is never deeper, comes first.
        best = sorted(range(1, len(self._values)), key=lambda node: -self._values[node])
        kept = [0, *sorted(best[: size - 1])]
        return Tree.select(self.parents, self._ranks, kept), [self.tokens[node] for node in kept]
