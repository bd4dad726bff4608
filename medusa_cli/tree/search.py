"""The search for the best sparse tree, given each head's accuracies (Medusa, section 3.3.3)."""

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from medusa_cli.errors import UsageError
from medusa_cli.tree.tree import Tree

Accuracies = Sequence[Sequence[float]]


def search(accuracies: Accuracies, budget: int) -> Tree:
    """Returns the tree of `budget` nodes, including the root, with the most expected tokens per step.

    accuracies[k][i] is the probability that guess i of head k is right. If heads are independent, a node is worth the
    product of the probabilities along its path. A child is never worth more than its parent, so adding the best node
    each time is optimal. Raises UsageError for a budget below 1 or above the number of possible nodes.
    """
    possible = largest(accuracies)
    if not 1 <= budget <= possible:
        fault = f"@budget {budget} is not valid"
        raise UsageError(fault, f"these heads allow 1 to {possible:,} nodes, the root included")
    # Each head's ranks by descending accuracy, because measured accuracies need not decrease with the rank.
    order = [sorted(range(len(head)), key=lambda i: (-head[i], i)) for head in accuracies]
    parents = [-1]
    ranks = [0]
    depths = [0]
    values = [1.0]
    heap: list[
        tuple[float, int, int, int]
    ] = []  # (-value, depth, parent, index into the sorted ranks)

    def offer(parent: int, place: int) -> None:
        depth = depths[parent]
        if depth < len(order) and place < len(order[depth]):
            value = values[parent] * accuracies[depth][order[depth][place]]
            heapq.heappush(heap, (-value, depth + 1, parent, place))

    offer(0, 0)
    while len(parents) < budget:
        value, depth, parent, place = heapq.heappop(heap)
        parents.append(parent)
        ranks.append(order[depth - 1][place])
        depths.append(depth)
        values.append(-value)
        offer(parent, place + 1)
        offer(len(parents) - 1, 0)
    return Tree(tuple(parents), tuple(ranks))


def largest(accuracies: Accuracies) -> int:
    """Returns the number of nodes, including the root, in the full tree of these heads and ranks."""
    total = level = 1
    for head in accuracies:
        level *= len(head)
        total += level
    return total


def node_values(tree: Tree, accuracies: Accuracies) -> list[float]:
    """Returns each node's probability of acceptance, 1 for the root.

    Nodes without an accuracy get 0.
    """
    values = [1.0]
    for node in range(1, tree.size):
        depth = tree.depths[node] - 1
        rank = tree.ranks[node]
        known = depth < len(accuracies) and rank < len(accuracies[depth])
        values.append(values[tree.parents[node]] * accuracies[depth][rank] if known else 0.0)
    return values


def expected_length(tree: Tree, accuracies: Accuracies) -> float:
    """Returns the expected number of tokens per step: the sum of the nodes' probabilities of acceptance.

    The root's probability of 1 stands for the bonus token.
    """
    return sum(node_values(tree, accuracies))


# Sizes up to DENSE_SIZES are tried one by one, and larger sizes in strides, because matmuls run in
# blocks of rows.
DENSE_SIZES = 20
STRIDE = 4


@dataclass(frozen=True)
class StepTimes:
    """Holds the seconds of a step's parts: verifying by number of rows, and drafting by number of levels.

    Verification time covers the pass, acceptance and the cache update. A drafter that drafts all levels at once takes
    the same time at every depth. context: the number of tokens before the step. longer: the times after more tokens,
    where attention takes a larger part of a step; None if they are not known.
    """

    verify: Mapping[int, float]
    draft: Mapping[int, float]
    context: int = 0
    longer: "StepTimes | None" = None

    def step(self, nodes: int, depth: int, batch: int = 1, length: int = 0) -> float:
        """Returns the duration in seconds of a step of `batch` sequences with trees of this size.

        length: the number of tokens before the step, on average over the sequences.
        """
        seconds = interpolate(self.verify, nodes * batch) + self._drafting(depth)
        if self.longer is None or length <= self.context:
            return seconds
        # The weights are read once for all sequences, but each sequence attends to its own text.
        own = interpolate(self.verify, nodes) + self._drafting(depth)
        added = batch * max(self.longer.step(nodes, depth) - own, 0.0)
        return seconds + added * (length - self.context) / (self.longer.context - self.context)

    def _drafting(self, depth: int) -> float:
        return interpolate(self.draft, depth) if depth else 0.0


@dataclass(frozen=True)
class SizedTree:
    """Holds a tree and its expected tokens per step according to the calibration."""

    tree: Tree
    expected: float


@dataclass(frozen=True)
class TimedTree(SizedTree):
    """Adds the duration in seconds of a step with the tree, including drafting."""

    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.expected / self.seconds


def budgets(accuracies: Accuracies, step_times: StepTimes) -> list[TimedTree]:
    """Returns, for each size worth trying, the tree with the most tokens per second over all numbers of heads.

    The first tree is only the root.
    """
    limit = min(max(step_times.verify), largest(accuracies))
    best = []
    for nodes in (
        *range(1, min(limit, DENSE_SIZES) + 1),
        *range(DENSE_SIZES + STRIDE, limit + 1, STRIDE),
    ):
        some = [accuracies[:heads] for heads in range(1, len(accuracies) + 1)]
        trees = [search(heads, nodes) for heads in some if nodes <= largest(heads)]
        timed = []
        for tree in trees:
            seconds = step_times.step(nodes, tree.max_depth)
            timed.append(TimedTree(tree, expected_length(tree, accuracies), seconds))
        best.append(max(timed, key=lambda budget: budget.tokens_per_s))
    return best


def interpolate(points: Mapping[int, float], x: int) -> float:
    """Returns the value at x of a piecewise linear function; beyond the last point, the last slope continues."""
    known = sorted(points)
    if len(known) == 1 or x <= known[0]:
        return points[known[0]]
    after = min(bisect_left(known, x), len(known) - 1)
    low = known[after - 1]
    high = known[after]
    slope = (points[high] - points[low]) / (high - low)
    # Noise may make the last slope negative, but a larger step never takes less time.
    return points[high] + (max(slope, 0.0) if x > high else slope) * (x - high)
