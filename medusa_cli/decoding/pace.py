"""How much to draft: the size of tree that pays best by acceptance as it comes and steps as they are, down to none."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_cli.decoding.types import Step
from medusa_cli.tree.budget import Budget, Costs
from medusa_cli.tree.tree import Tree

# Accepted drafts that what is expected beforehand counts for.
PRIOR = 4.0
# How much of what was seen before a step is left after it.
MEMORY = 0.98
# Another size must promise so much more before the pace changes.
MARGIN = 1.03
# A step that takes so many times what is known of its size was held up by something else, unless the next is, too.
HELD = 1.5
# Plain steps between two tries whether drafts pay again, at first and at most; a try takes so many steps.
PATIENCE, MOST_PATIENCE, TRY = 48, 512, 4
# How quickly what steps are seen to take corrects what was measured, and the most one step may add.
QUICK, HELD_UP = 0.1, 3.0


@dataclass(frozen=True)
class Size:
    """A tree and the tokens a step that it is expected to settle."""

    tree: Tree
    expected: float


class Pace:
    """Chooses the next step's tree among sizes that are ready, the root alone among them.

    One number is learnt of the drafter as the text goes: `luck`, the share of the expected accepted drafts that come.
    A size then gives 1 + luck (expected - 1) tokens a step. Its seconds are those measured, by the number of sequences
    side by side, corrected by steps as they go.
    """

    def __init__(self, sizes: Sequence[Size], costs: Costs) -> None:
        drafting = [size for size in sizes if size.tree.size > 1]
        self._sizes = [Size(Tree.root_only(), 1.0), *drafting]
        self._costs = costs
        self._slower: dict[tuple[int, int], float] = {}  # by nodes and sequences: seconds over those measured
        self._hoped = self._came = PRIOR
        self._batch = 1
        self._plain_steps, self._patience, self._trying = 0, PATIENCE, 0
        self._held = False
        self._now = self._best()

    @classmethod
    def of(cls, budgets: Sequence[Budget], costs: Costs) -> "Pace":
        """A pace among the best trees of several sizes."""
        return cls([Size(one.tree, one.expected) for one in budgets], costs)

    @property
    def max_depth(self) -> int:
        return max(size.tree.max_depth for size in self._sizes)

    @property
    def size(self) -> int:
        """The nodes of the tree that drafts now."""
        return self._now.tree.size

    @property
    def luck(self) -> float:
        return self._came / self._hoped

    def choose(self, batch: int = 1) -> Tree:
        """The next step's tree, for so many sequences side by side."""
        if batch != self._batch and batch:
            self._batch = batch
            if not self._trying:
                self._now = self._best()
        return self._now.tree

    def record(self, steps: Sequence[Step]) -> None:
        """Learn from a step of one or more sequences, and settle on the next size."""
        nodes, batch = steps[0].nodes, len(steps)
        size = next((one for one in self._sizes if one.tree.size == nodes), None)
        if size is None or any(step.nodes != nodes for step in steps):  # cut by the context's end
            return
        known = self._costs.step(nodes, size.tree.max_depth, batch)
        ratio = min(sum(step.draft_s + step.verify_s for step in steps) / known, HELD_UP)
        slower = self._slower.get((nodes, batch), 1.0)
        before, self._held = self._held, ratio > HELD * slower
        if before or not self._held:
            new = (nodes, batch) not in self._slower
            self._slower[nodes, batch] = ratio if new else (1 - QUICK) * slower + QUICK * ratio
        if nodes > 1:
            for step in steps:
                self._hoped = MEMORY * self._hoped + size.expected - 1
                self._came = MEMORY * self._came + len(step.path) - 1
        if self._trying:
            self._trying -= 1
            if not self._trying:
                self._now = self._best()
                self._patience = PATIENCE if self.size > 1 else min(2 * self._patience, MOST_PATIENCE)
        elif self.size == 1:
            self._rest()
        else:
            best = self._best()
            if self._rate(best) > MARGIN * self._rate(self._now):
                self._now, self._plain_steps, self._patience = best, 0, PATIENCE

    def _rest(self) -> None:
        """Count plain steps, and now and then try the smallest tree again."""
        self._plain_steps += 1
        if self._plain_steps >= self._patience and len(self._sizes) > 1:
            self._plain_steps, self._trying = 0, TRY
            self._now = min(self._sizes[1:], key=self._seconds)

    def _best(self) -> Size:
        return max(self._sizes, key=self._rate)

    def _rate(self, size: Size) -> float:
        """Tokens a second of one sequence to be expected."""
        return (1 + self.luck * (size.expected - 1)) / self._seconds(size)

    def _seconds(self, size: Size) -> float:
        nodes = size.tree.size
        known = self._costs.step(nodes, size.tree.max_depth, self._batch)
        # What was never seen here is taken to be as slow as the quickest that was; the root alone is worth a try.
        seen = [ratio for (_, batch), ratio in self._slower.items() if batch == self._batch]
        unseen = min(seen) if seen and nodes > 1 else 1.0
        return known * self._slower.get((nodes, self._batch), unseen)
