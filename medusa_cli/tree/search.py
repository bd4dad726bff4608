"""The best sparse tree for a budget of nodes, from each head's accuracy by rank (Medusa, section 3.3.3)."""

import heapq
from collections.abc import Sequence

from medusa_cli.errors import UsageError
from medusa_cli.tree.tree import Tree

Accuracies = Sequence[Sequence[float]]


def search(accuracies: Accuracies, budget: int) -> Tree:
    """The tree of `budget` nodes, root included, with the greatest expected length.

    accuracies[k][i] is the chance that guess i of head k is right. With independent heads a node counts the product
    along its path; a child never counts more than its parent, so taking the best node each time is optimal.
    Raises UsageError for a budget below 1 or above the number of nodes there are.
    """
    possible = largest(accuracies)
    if not 1 <= budget <= possible:
        raise UsageError(f"@budget {budget} cannot be", f"these heads allow 1 to {possible:,} nodes, the root included")
    # Ranks by falling accuracy: measured accuracies need not fall strictly with the rank.
    order = [sorted(range(len(head)), key=lambda i: (-head[i], i)) for head in accuracies]
    parents, ranks, depths, values = [-1], [0], [0], [1.0]
    heap: list[tuple[float, int, int, int]] = []  # (-value, depth, parent, place in the order of ranks)

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
    """How many nodes, root included, the full tree over these heads and ranks has."""
    total = level = 1
    for head in accuracies:
        level *= len(head)
        total += level
    return total


def node_values(tree: Tree, accuracies: Accuracies) -> list[float]:
    """The chance that each node is accepted, 1 for the root; ranks and depths without an accuracy count 0."""
    values = [1.0]
    for node in range(1, tree.size):
        depth, rank = tree.depths[node] - 1, tree.ranks[node]
        known = depth < len(accuracies) and rank < len(accuracies[depth])
        values.append(values[tree.parents[node]] * accuracies[depth][rank] if known else 0.0)
    return values


def expected_length(tree: Tree, accuracies: Accuracies) -> float:
    """Expected tokens a step: the backbone's own one plus every node's chance (the root is that own token)."""
    return sum(node_values(tree, accuracies))
