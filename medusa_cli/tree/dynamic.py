"""Dynamic trees: each step grows its own tree, best first by the drafter's confidence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from medusa_cli.tree.tree import Tree


@dataclass(frozen=True)
class DynamicTree:
    """Limits of a tree that grows in a step: `budget` nodes, root included, none with a chance below `min_chance`.

    A head's confidences are its softmax at its own temperature (1 by default), which `calibrate` fits.
    """

    budget: int
    max_depth: int
    temperatures: tuple[float, ...] = ()
    min_chance: float = 0.0
    width: int = 10  # guesses considered below one node

    @property
    def size(self) -> int:
        """Returns the most nodes a step can have."""
        return self.budget

    def temperature(self, head: int) -> float:
        return self.temperatures[head] if head < len(self.temperatures) else 1.0

    def truncate_to(self, positions: int) -> "DynamicTree":
        """Returns limits that fit into so many positions, the root included."""
        return self if self.max_depth < positions else replace(self, max_depth=max(positions - 1, 0))


class TreeBuilder:
    """Grows one step's tree level by level; the best `budget - 1` candidates stay.

    A node's value is the product of the confidences along its path, never more than its parent's: the ancestors of a
    node among the best are among the best, too.
    """

    def __init__(self, limits: DynamicTree, root: int) -> None:
        self._limits = limits
        self.parents, self._ranks, self._values, self.tokens = [-1], [0], [0.0], [root]
        self._floor = math.log(limits.min_chance) if limits.min_chance > 0 else -math.inf

    def extend(
        self, nodes: Sequence[int], log_p: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]
    ) -> list[int]:
        """Adds children of `nodes` by their log confidences, best first, and tokens; returns those worth extending."""
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
            # Equal values stay together; `tree` drops what is too much.
            self._floor = max(self._floor, sorted(self._values[1:], reverse=True)[limit - 1] if limit else math.inf)
        return [node for node in range(first, len(self._values)) if self._values[node] >= self._floor]

    def tree(self) -> tuple[Tree, list[int]]:
        """Returns the tree and the tokens of its nodes."""
        # The sort is stable: of equal nodes the earlier one, which is never deeper, comes first.
        best = sorted(range(1, len(self._values)), key=lambda node: -self._values[node])[: self._limits.budget - 1]
        kept = [0, *sorted(node for node in best if self._values[node] >= self._floor)]
        index = {node: i for i, node in enumerate(kept)}
        parents = tuple(index[self.parents[node]] if node else -1 for node in kept)
        return Tree(parents, tuple(self._ranks[node] for node in kept)), [self.tokens[node] for node in kept]
