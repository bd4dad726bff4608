"""How many nodes pay: expected tokens a step against what a step of so many nodes costs on this machine."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from medusa_cli.tree.search import Accuracies, expected_length, largest, search
from medusa_cli.tree.tree import Tree

# Nodes over which the cost of one more is averaged.
SPAN = 12
# Sizes that are looked at one by one; beyond, products go by blocks of rows so large that strides will do.
SINGLY = 20
STRIDE = 4


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a step: verifying so many rows in one pass, and drafting so many levels deep.

    Verifying covers the pass, acceptance and what is kept. A drafter that takes all levels at once costs the same for
    each depth.
    """

    verify: Mapping[int, float]
    draft: Mapping[int, float]

    def step(self, nodes: int, depth: int, batch: int = 1) -> float:
        """Seconds of a step of `batch` sequences over trees of so many nodes and levels."""
        drafting = line(self.draft, depth) if depth else 0.0
        return line(self.verify, nodes * batch) + drafting

    @property
    def most(self) -> int:
        """The most rows that were measured."""
        return max(self.verify)


@dataclass(frozen=True)
class Budget:
    """A tree, the tokens a step it is expected to settle, and the seconds such a step takes, drafting included."""

    tree: Tree
    expected: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.expected / self.seconds


def judge(accuracies: Accuracies, nodes: int, costs: Costs) -> Budget:
    """The tree of so many nodes that pays best: the most likely nodes of the first heads, of as many as pay."""
    found = []
    for heads in range(1 if nodes > 1 else len(accuracies), len(accuracies) + 1):
        if nodes <= largest(accuracies[:heads]):
            tree = search(accuracies[:heads], nodes)
            seconds = costs.step(nodes, tree.max_depth)
            found.append(Budget(tree, expected_length(tree, accuracies), seconds))
    return max(found, key=lambda one: one.tokens_per_s)


def budgets(accuracies: Accuracies, costs: Costs) -> list[Budget]:
    """The best tree of each size worth a look, the root alone first."""
    most = min(costs.most, largest(accuracies))
    sizes = [*range(1, min(most, SINGLY) + 1), *range(SINGLY + STRIDE, most + 1, STRIDE)]
    return [judge(accuracies, nodes, costs) for nodes in sizes]


def break_even(chosen: Budget, costs: Costs) -> float:
    """The chance from which on a further node pays: what it costs, in tokens at the chosen budget's rate.

    A node of chance p adds p tokens and some seconds; it pays where p exceeds those seconds times the tokens a second.
    The seconds are the mean over the next dozen nodes: between neighbours the noise of timing is as large.
    """
    nodes = chosen.tree.size
    a_node = (line(costs.verify, nodes + SPAN) - line(costs.verify, nodes)) / SPAN
    return max(a_node, 0.0) * chosen.tokens_per_s


def line(points: Mapping[int, float], at: int) -> float:
    """The value at a place, on straight lines between measured ones and, beyond them, on the last line's slope."""
    known = sorted(points)
    if at in points:
        return points[at]
    place = bisect_left(known, at)
    if len(known) == 1 or place == 0:
        return points[known[0]]
    beyond = place == len(known)
    low, high = (known[-2], known[-1]) if beyond else (known[place - 1], known[place])
    slope = (points[high] - points[low]) / (high - low)
    # Noise may let the last line fall; no step is cheaper for being larger.
    return points[high] + max(slope, 0.0) * (at - high) if beyond else points[low] + slope * (at - low)
