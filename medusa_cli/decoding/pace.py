"""How much to draft: the size of tree that pays best by acceptance as it comes and steps as they are, down to none."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_cli.decoding.types import Step
from medusa_cli.tree import Tree

# Tokens of evidence that what is expected beforehand counts for.
PRIOR = 4.0
# How much of what was seen before a step is left after it.
MEMORY = 0.98
# Another size must promise so much more before the pace changes.
MARGIN = 1.03
# Plain steps between two tries whether drafts pay again, at first and at most; a try takes so many steps.
PATIENCE, MOST_PATIENCE, TRY = 48, 512, 4


@dataclass(frozen=True)
class Size:
    """A tree, the tokens a step it is expected to settle, and the seconds such a step takes, drafting included."""

    tree: Tree
    expected: float
    seconds: float


class Pace:
    """Chooses the next step's tree among sizes that are ready, the root alone among them.

    One number is learnt of the drafter as the text goes: `luck`, the share of the expected accepted drafts that come.
    A size then gives 1 + luck (expected - 1) tokens a step. Seconds are those measured, corrected by steps as they go.
    """

    def __init__(self, sizes: Sequence[Size]) -> None:
        plain = next(size for size in sizes if size.tree.size == 1)
        self._sizes = [plain, *(size for size in sizes if size.tree.size > 1)]
        self._seconds = {size.tree.size: size.seconds for size in self._sizes}
        self._hoped = self._came = PRIOR
        self._tree = self._best()
        self._plain_steps, self._patience, self._trying = 0, PATIENCE, 0

    @property
    def max_depth(self) -> int:
        return max(size.tree.max_depth for size in self._sizes)

    @property
    def size(self) -> int:
        """The nodes of the tree that drafts now."""
        return self._tree.size

    @property
    def luck(self) -> float:
        return self._came / self._hoped

    def choose(self) -> Tree:
        """The next step's tree."""
        return self._tree

    def record(self, steps: Sequence[Step]) -> None:
        """Learn from a step of one or more sequences, and settle on the next tree."""
        size = next((one for one in self._sizes if one.tree.size == steps[0].nodes), None)
        if size is None:  # cut by the context's end
            return
        together = sum(step.draft_s + step.verify_s for step in steps)
        known = self._seconds[steps[0].nodes]
        # A step that took far longer was held up by something else.
        self._seconds[steps[0].nodes] = 0.9 * known + 0.1 * min(together, 3 * known)
        for step in steps:
            if step.nodes > 1:
                self._hoped = MEMORY * self._hoped + size.expected - 1
                self._came = MEMORY * self._came + len(step.path) - 1
        if self._tree.size == 1:
            self._rest(len(steps))
        elif self._trying:
            self._trying -= 1
            if not self._trying:
                self._tree = self._best()
                self._patience = PATIENCE if self._tree.size > 1 else min(2 * self._patience, MOST_PATIENCE)
        else:
            best = self._best()
            if self._rate_of(best) > MARGIN * self._rate_of(self._tree):
                self._tree, self._plain_steps, self._patience = best, 0, PATIENCE

    def _rest(self, steps: int) -> None:
        """Count plain steps, and now and then try the smallest tree again."""
        self._plain_steps += 1
        if self._plain_steps >= self._patience and len(self._sizes) > 1:
            self._plain_steps, self._trying = 0, TRY
            self._tree = min(self._sizes[1:], key=lambda one: one.seconds).tree

    def _best(self) -> Tree:
        return max(self._sizes, key=self._rate).tree

    def _rate(self, size: Size) -> float:
        """Tokens a second to be expected."""
        return (1 + self.luck * (size.expected - 1)) / self._seconds[size.tree.size]

    def _rate_of(self, tree: Tree) -> float:
        return self._rate(next(size for size in self._sizes if size.tree is tree))
