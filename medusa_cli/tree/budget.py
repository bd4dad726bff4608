"""How many nodes pay: expected tokens a step against what a step of so many nodes costs on this machine."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from medusa_cli.tree.search import Accuracies, expected_length, largest, search
from medusa_cli.tree.tree import Tree

# Nodes over which the cost of one more is averaged.
SPAN = 12


@dataclass(frozen=True)
class StepCost:
    """Median seconds of a whole step (draft, verify, accept, keep) over the best tree of `nodes` nodes for the first
    `heads` heads: drafters that go level by level pay for depth, too."""

    heads: int
    nodes: int
    seconds: float


@dataclass(frozen=True)
class Budget:
    """A tree for the first `heads` heads, the tokens a step it is expected to settle, the seconds a step takes."""

    heads: int
    tree: Tree
    expected: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.expected / self.seconds


def judge(accuracies: Accuracies, nodes: int, costs: Sequence[StepCost], heads: int) -> Budget:
    """The best tree of so many nodes for the first heads, with its cost read off their measured curve."""
    tree = search(accuracies[:heads], nodes)
    return Budget(heads, tree, expected_length(tree, accuracies), cost_of(nodes, curve(costs, heads)))


def best_of_size(accuracies: Accuracies, nodes: int, costs: Sequence[StepCost]) -> Budget:
    """The number of heads that pays best for a tree of so many nodes."""
    fitting = [k for k in range(1, len(accuracies) + 1) if curve(costs, k) and nodes <= largest(accuracies[:k])]
    return max((judge(accuracies, nodes, costs, k) for k in fitting), key=lambda one: one.tokens_per_s)


def best_budget(accuracies: Accuracies, costs: Sequence[StepCost]) -> Budget:
    """The tree, of any size up to the largest measured and any depth, that is expected to give most tokens a second."""
    most = min(max(cost.nodes for cost in costs), largest(accuracies))
    sizes = range(1, most + 1)
    return max((best_of_size(accuracies, nodes, costs) for nodes in sizes), key=lambda one: one.tokens_per_s)


def break_even(chosen: Budget, costs: Sequence[StepCost]) -> float:
    """The chance from which on a further node pays: what it costs, in tokens at the chosen budget's rate.

    A node of chance p adds p tokens and some seconds; it pays where p exceeds those seconds times the tokens a second.
    The seconds are the mean over the next dozen nodes: between neighbours the noise of timing is as large.
    """
    points = curve(costs, max(cost.heads for cost in costs))
    nodes = chosen.tree.size
    a_node = (cost_of(nodes + SPAN, points) - cost_of(nodes, points)) / SPAN
    return max(a_node, 0.0) * chosen.tokens_per_s


def curve(costs: Sequence[StepCost], heads: int) -> list[StepCost]:
    """The costs measured for so many heads, by rising size."""
    return sorted((cost for cost in costs if cost.heads == heads), key=lambda cost: cost.nodes)


def cost_of(nodes: int, costs: Sequence[StepCost]) -> float:
    """Seconds of a step of `nodes` nodes, on straight lines between the measured sizes and level beyond them."""
    at = bisect_left([cost.nodes for cost in costs], nodes)
    if at == len(costs) or costs[at].nodes == nodes or at == 0:
        return costs[min(at, len(costs) - 1)].seconds
    low, high = costs[at - 1], costs[at]
    return low.seconds + (high.seconds - low.seconds) * (nodes - low.nodes) / (high.nodes - low.nodes)
