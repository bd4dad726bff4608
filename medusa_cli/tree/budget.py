"""How many nodes pay: expected tokens a step against what a step of so many nodes costs on this machine."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from medusa_cli.tree.search import Accuracies, expected_length, largest, search
from medusa_cli.tree.tree import Tree


@dataclass(frozen=True)
class StepCost:
    """Median seconds of a whole step (draft, verify, accept, keep) over a tree of `nodes` nodes."""

    nodes: int
    seconds: float


@dataclass(frozen=True)
class Budget:
    """A tree with the tokens a step it is expected to settle and the seconds a step of its size takes."""

    tree: Tree
    expected: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.expected / self.seconds


def judge(accuracies: Accuracies, nodes: int, costs: Sequence[StepCost]) -> Budget:
    """The best tree of so many nodes, with its cost read off the measured curve."""
    tree = search(accuracies, nodes)
    return Budget(tree, expected_length(tree, accuracies), cost_of(nodes, costs))


def best_budget(accuracies: Accuracies, costs: Sequence[StepCost]) -> Budget:
    """The tree, of any size up to the largest measured, that is expected to give most tokens a second."""
    most = min(costs[-1].nodes, largest(accuracies))
    return max((judge(accuracies, nodes, costs) for nodes in range(1, most + 1)), key=lambda one: one.tokens_per_s)


def cost_of(nodes: int, costs: Sequence[StepCost]) -> float:
    """Seconds of a step of `nodes` nodes, on straight lines between the measured sizes and level beyond them."""
    at = bisect_left([cost.nodes for cost in costs], nodes)
    if at == len(costs) or costs[at].nodes == nodes or at == 0:
        return costs[min(at, len(costs) - 1)].seconds
    low, high = costs[at - 1], costs[at]
    return low.seconds + (high.seconds - low.seconds) * (nodes - low.nodes) / (high.nodes - low.nodes)
