"""Figures of a bench: sums over steps, acceptance by position, and bootstrap intervals over questions."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from medusa_cli.decode import Stats, Step

ROUNDS = 2000
LEVEL = 0.95
Sums = NDArray[np.float64]


@dataclass
class PathStats(Stats):
    """Stats that also count steps by accepted depth, and accepted nodes by (nodes of the tree, node).

    Trees differ in size near the end of the context, and a dynamic tree's nodes differ from step to step: so a node is
    counted with the size of its tree. Steps without a path (prefill) count in neither.
    """

    depths: Counter[int] = field(default_factory=Counter)
    hits: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, step: Step) -> None:
        super().add(step)
        if step.path:
            self.depths[len(step.path) - 1] += 1
            self.hits.update((step.nodes, node) for node in step.path)

    def __iadd__(self, other: Stats) -> "PathStats":
        super().__iadd__(other)
        return self

    def by_depth(self) -> list[int]:
        """Returns the number of steps that accepted exactly 0, 1, 2... draft tokens."""
        return [self.depths[depth] for depth in range(max(self.depths, default=-1) + 1)]

    def tree_hits(self) -> list[int]:
        """Returns how often each node was accepted, of the tree size that was verified most often."""
        steps = {size: count for (size, node), count in self.hits.items() if node == 0}
        size = max(steps, key=lambda size: steps[size], default=0)
        return [self.hits[size, node] for node in range(size)]


def reached(depths: Sequence[int]) -> list[int]:
    """Returns the steps that accepted at least 1, 2, 3... draft tokens, from those that accepted exactly 0, 1, 2..."""
    return [sum(depths[depth:]) for depth in range(1, len(depths))]


def by_position(answers: Sequence[Sequence[int]]) -> list[dict[str, float | tuple[float, float] | None]]:
    """Returns acceptance at draft positions 1, 2..., from each answer's steps by accepted depth.

    reached: share of all steps that accepted the position (as vLLM and SPEED-Bench count), with its interval; after:
    share of the steps that had accepted the position before (EAGLE's k-alpha).
    """
    width = max(map(len, answers), default=0)
    table = np.array([[*depths, *[0] * (width - len(depths))] for depths in answers], dtype=np.float64)
    counts = table[:, ::-1].cumsum(axis=1)[:, ::-1] if width else table  # [answers, at least k accepted]
    total = counts.sum(axis=0)
    return [
        {
            "reached": float(total[k] / total[0]),
            "reached_95": bootstrap(counts[:, [k, 0]], rate),
            "after": float(total[k] / total[k - 1]) if total[k - 1] else 0.0,
        }
        for k in range(1, width)
    ]


def bootstrap(
    columns: Sequence[Sequence[float]] | Sums, figure: Callable[[Sums], Sums], *, rounds: int = ROUNDS, seed: int = 0
) -> tuple[float, float] | None:
    """Returns the 95 % interval of a figure over questions drawn with replacement; None below two questions.

    columns [Q, C]: what each question adds to the sums. figure: from sums [..., C] to the figure [...]. Two methods'
    columns stand in one row, so that their ratio is drawn in pairs.
    """
    table = np.asarray(columns, dtype=np.float64)
    if len(table) < 2:
        return None
    draws = np.random.default_rng(seed).multinomial(len(table), np.full(len(table), 1 / len(table)), size=rounds)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = figure(draws @ table)  # [rounds]
    values = values[np.isfinite(values)]  # a draw of empty answers alone has no rate
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def rate(sums: Sums) -> Sums:
    """Returns column 0 over column 1."""
    return sums[..., 0] / sums[..., 1]


def ratio_of_rates(sums: Sums) -> Sums:
    """Returns column 0 over 1, over column 2 over 3."""
    return rate(sums) / rate(sums[..., 2:])
