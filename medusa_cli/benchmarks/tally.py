"""Sums over steps that also remember what was accepted: how deep, and through which nodes of the tree."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from medusa_cli.decoding import Stats, Step


@dataclass
class Tally(Stats):
    """Stats with the steps counted by accepted depth, and every accepted node counted by (tree's size, node).

    Trees differ in size where the end of the context cuts them, and a dynamic tree's nodes mean something else at each
    step: so a node is counted together with the size of its tree. Steps that name no path are left out of both.
    """

    depths: Counter[int] = field(default_factory=Counter)
    hits: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, step: Step) -> None:
        super().add(step)
        if step.path:  # a prefill verifies no tree
            self.depths[len(step.path) - 1] += 1
            self.hits.update((step.nodes, node) for node in step.path)

    def __iadd__(self, other: Stats) -> "Tally":
        super().__iadd__(other)
        return self

    def by_depth(self) -> list[int]:
        """Steps that accepted exactly 0, 1, 2... drafts; empty where no step named its path."""
        return [self.depths[depth] for depth in range(max(self.depths) + 1)] if self.depths else []

    @property
    def usual_size(self) -> int:
        """The size of tree that most steps verified, 0 where no step named its path."""
        steps = {size: count for (size, node), count in self.hits.items() if node == 0}
        return max(steps, key=lambda size: steps[size], default=0)

    def of_tree(self, nodes: int) -> list[int]:
        """How often each node of the tree of that size was accepted; the root's count is that of its steps."""
        return [self.hits[nodes, node] for node in range(nodes)] if self.hits[nodes, 0] else []


def reached(depths: Sequence[int]) -> list[int]:
    """Steps that accepted at least 1, 2, 3... drafts, from the steps that accepted exactly 0, 1, 2..."""
    return [sum(depths[depth:]) for depth in range(1, len(depths))]


def by_position(depths: Sequence[int]) -> list[Mapping[str, float]]:
    """Acceptance at draft position 1, 2...: `reached` is the share of all steps that accepted it (as vLLM and
    SPEED-Bench count), `after` the share of those steps that had accepted the position before (EAGLE's k-alpha)."""
    counts = [sum(depths), *reached(depths)]
    return [
        {"reached": count / counts[0], "after": count / before if before else 0.0}
        for before, count in zip(counts, counts[1:], strict=False)
    ]
