"""Dynamic trees: each step's own tree, grown best first over the drafter's confidence in its guesses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from medusa_cli.tree.tree import Tree


@dataclass(frozen=True)
class Growth:
    """How to grow a step's tree: at most `budget` nodes, root included, none that is thought less likely than `least`.

    A head's confidences are its softmax at its own temperature (1 where none is given), which `calibrate` fits.
    """

    budget: int
    max_depth: int
    temperatures: tuple[float, ...] = ()
    least: float = 0.0
    width: int = 10  # guesses looked at below one node

    @property
    def size(self) -> int:
        """The most nodes a step can have."""
        return self.budget

    def temperature(self, head: int) -> float:
        return self.temperatures[head] if head < len(self.temperatures) else 1.0

    def cut(self, depth: int) -> "Growth":
        """The same growth, no deeper than this."""
        return replace(self, max_depth=min(self.max_depth, depth))


class Growing:
    """One step's tree under way: candidates are added level by level, and the best `budget - 1` of them stay.

    A node is worth the product of the confidences along its path, so never more than its parent: whatever is among
    the best has its ancestors there too, and what is not can have no descendant among them.
    """

    def __init__(self, growth: Growth, root: int) -> None:
        self._growth = growth
        self.parents, self._ranks, self._values, self.tokens = [-1], [0], [0.0], [root]
        self._floor = math.log(growth.least) if growth.least > 0 else -math.inf

    def extend(
        self, nodes: Sequence[int], log_p: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]
    ) -> list[int]:
        """Offer children of `nodes`: their log confidences, best first, and tokens; return those worth extending."""
        first = len(self._values)
        for node, row, guesses in zip(nodes, log_p, tokens, strict=True):
            above = self._values[node]
            for rank, (one, token) in enumerate(zip(row, guesses, strict=True)):
                value = above + one
                if value < self._floor:
                    break
                self.parents.append(node)
                self._ranks.append(rank)
                self._values.append(value)
                self.tokens.append(token)
        room = self._growth.budget - 1
        if len(self._values) - 1 > room:
            # Equal values are kept together: too many is right again when the tree is made.
            self._floor = max(self._floor, sorted(self._values[1:], reverse=True)[room - 1] if room else math.inf)
        return [node for node in range(first, len(self._values)) if self._values[node] >= self._floor]

    def tree(self) -> tuple[Tree, list[int]]:
        """The grown tree and the tokens of its nodes."""
        # Stable by value: of equals the earlier, which is never deeper, comes first.
        best = sorted(range(1, len(self._values)), key=lambda node: -self._values[node])[: self._growth.budget - 1]
        kept = [0, *sorted(node for node in best if self._values[node] >= self._floor)]
        place = {node: index for index, node in enumerate(kept)}
        parents = tuple(place[self.parents[node]] if node else -1 for node in kept)
        return Tree(parents, tuple(self._ranks[node] for node in kept)), [self.tokens[node] for node in kept]
