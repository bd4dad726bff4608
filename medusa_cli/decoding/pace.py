"""How much to draft: the size of tree that pays best by acceptance as it comes and steps as they are, down to none."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from medusa_cli.decoding.luck import PRIOR, Fortune, Fortunes, Luck
from medusa_cli.decoding.sampling import Sampling
from medusa_cli.decoding.types import Step
from medusa_cli.tree.budget import Budget, Costs
from medusa_cli.tree.tree import Tree

# Another size must promise so much more before the pace changes, and any size so much more than none.
MARGIN, EDGE = 1.03, 1.02
# A step that takes so many times what is known of its size was held up by something else, unless the next is, too.
HELD = 1.5
# Plain steps between two tries whether drafts pay again, at first and at most; a try takes so many steps, and goes on
# while drafts come true.
PATIENCE, MOST_PATIENCE, TRY = 12, 512, 2
# How quickly what steps are seen to take corrects what was measured, and the most one step may add; and how quickly
# what was seen of other sizes gives way to what is seen now, for a machine's speed changes for all of them.
QUICK, HELD_UP, FADING = 0.1, 3.0, 0.02
# How many tokens from the text itself are weighed.
LOOKED_UP = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True)
class Size:
    """A tree and the tokens a step that it is expected to settle."""

    tree: Tree
    expected: float


class Pace:
    """Chooses the next step's tree among sizes that are ready, the root alone among them.

    One number is learnt of each text as it goes: its luck, the share of the expected accepted drafts that come. A size
    then gives 1 + luck (expected - 1) tokens a step. A text begins with the luck of its kind of sampling, and gives up
    within a few steps where it has none. A size's seconds are those measured, by the number of sequences side by side,
    corrected by steps as they go.
    """

    def __init__(self, sizes: Sequence[Size], costs: Costs, fortunes: Fortunes | None = None) -> None:
        drafting = [size for size in sizes if size.tree.size > 1]
        self._sizes = [Size(Tree.root_only(), 1.0), *drafting]
        self._costs = costs
        self._fortunes = fortunes or Fortunes()
        self._known: dict[tuple[int, int, int], float] = {}  # by nodes, levels, sequences: seconds that were measured
        self._slower: dict[tuple[int, int], float] = {}  # and those seen while decoding over them
        self._quickest: dict[int, float] = {}  # the least of these by sequences
        self._forget()

    @classmethod
    def of(cls, budgets: Sequence[Budget], costs: Costs, fortunes: Fortunes | None = None) -> "Pace":
        """A pace among the best trees of several sizes."""
        return cls([Size(one.tree, one.expected) for one in budgets], costs, fortunes)

    def _forget(self) -> None:
        """Know nothing of any text."""
        self._texts: tuple[Luck, ...] = (Luck(PRIOR, PRIOR),)
        self._plain_steps, self._patience, self._trying = 0, PATIENCE, 0
        self._held = False
        self._now = self._best()

    def fork(self) -> "Pace":
        """This pace for other texts under way: what steps take, and what is known of kinds of texts, is of both."""
        other = copy.copy(self)
        other._forget()
        return other

    @property
    def most(self) -> int:
        """The nodes of its largest tree."""
        return max(size.tree.size for size in self._sizes)

    @property
    def max_depth(self) -> int:
        return max(size.tree.max_depth for size in self._sizes)

    @property
    def size(self) -> int:
        """The nodes of the tree that drafts now."""
        return self._now.tree.size

    @property
    def luck(self) -> float:
        """The mean of the texts that are under way."""
        return sum(text.came / text.hoped for text in self._texts) / len(self._texts)

    def begin(self, sampling: Sampling) -> Fortune:
        """The luck of a text that begins; it is looked at anew, however seldom the last one was."""
        self._plain_steps, self._patience = 0, PATIENCE
        return self._fortunes.begin(sampling)

    def end(self) -> None:
        """A text has ended."""
        self._fortunes.tell()

    def choose(self, texts: Sequence[Fortune]) -> Tree:
        """The next step's tree, for these texts side by side."""
        if texts and [*map(id, texts)] != [*map(id, self._texts)]:
            self._texts, self._trying = tuple(texts), 0
            self._now = self._best()
        return self._now.tree

    def beside(self, shares: Sequence[float], most: int) -> list[tuple[Tree, int]]:
        """For each text the tree to draft over now, and how many tokens that it suggests itself, at most so many.

        Each of a text's tokens comes true by the chance `shares` says if those before it do, and none by 0; the heads'
        drafts count where the first one fails. The widest of all drafts sets what a pass takes, and the heads draft for
        all at once or not at all: both are chosen for all texts together.
        """
        now, plain, batch = self._now, self._sizes[0], len(shares)
        slower = self._seconds(now) / self._cost(now.tree.size, now.tree.max_depth, batch)
        best, found = MARGIN * batch * self._rate(now), [(now.tree, 0)] * batch
        for sizes in [(plain,), (now, plain)] if now is not plain else [(plain,)]:
            widths = {size.tree.size + count for size in sizes for count in LOOKED_UP if count <= most}
            for rows in sorted(one for one in widths if one >= sizes[0].tree.size):
                each = [self._likeliest(sizes, share, rows, most) for share in shares]
                seconds = slower * self._cost(rows, sizes[0].tree.max_depth, batch)
                rate = sum(tokens for tokens, _, _ in each) / seconds
                if rate > best:
                    best, found = rate, [(size.tree, count) for _, size, count in each]
        return found

    def _likeliest(self, sizes: Sequence[Size], share: float, rows: int, most: int) -> tuple[float, Size, int]:
        """The tokens that a text is expected to settle in so many rows, over which of the sizes, and beside how many
        that it suggests itself."""
        found = []
        for size in sizes:
            count = min(rows - size.tree.size, most) if share else 0
            came = share * (1 - share**count) / (1 - share)
            missed = 1 - share if count else 1.0
            found.append((1 + came + missed * self.luck * (size.expected - 1), size, count))
        return max(found, key=lambda one: one[0])

    def record(self, steps: Sequence[Step], texts: Sequence[Fortune]) -> None:
        """Learn from a step of one or more texts, and settle on the next size."""
        drafted = [(step, text) for step, text in zip(steps, texts, strict=True) if not step.looked_up]
        if not drafted:  # what they came to is not the heads' doing
            return
        nodes, batch = drafted[0][0].nodes, len(steps)
        size = next((one for one in self._sizes if one.tree.size == nodes), None)
        if size is None or any(step.nodes != nodes for step, _ in drafted):  # cut by the context's end
            return
        if len(drafted) == batch:
            self._time(size, sum(step.draft_s + step.verify_s for step in steps), batch)
        came = 0
        if nodes > 1:
            for step, text in drafted:
                self._fortunes.learn(text, size.expected - 1, len(step.path) - 1)
                came += len(step.path) - 1
        if self._trying:
            if nodes == 1:  # chosen before the try was
                return
            self._trying -= not came
            if self._trying and self._rate(size) < EDGE * self._rate(self._sizes[0]):
                return
            self._trying, self._now = 0, self._best()
            self._patience = PATIENCE if self.size > 1 else min(2 * self._patience, MOST_PATIENCE)
        elif self.size == 1:
            self._rest()
        else:
            best = self._best()
            if best is self._sizes[0] or self._rate(best) > MARGIN * self._rate(self._now):
                self._now, self._plain_steps, self._patience = best, 0, PATIENCE

    def _time(self, size: Size, seconds: float, batch: int) -> None:
        """Learn what a step over a size took."""
        nodes = size.tree.size
        known = self._cost(nodes, size.tree.max_depth, batch)
        ratio = min(seconds / known, HELD_UP)
        slower = self._slower.get((nodes, batch), 1.0)
        before, self._held = self._held, ratio > HELD * slower
        if before or not self._held:
            new = (nodes, batch) not in self._slower
            self._slower[nodes, batch] = ratio if new else (1 - QUICK) * slower + QUICK * ratio
            now = self._slower[nodes, batch]
            for other in [one for one in self._slower if one[1] == batch]:
                self._slower[other] += FADING * (now - self._slower[other])
            self._quickest[batch] = min(one for (_, many), one in self._slower.items() if many == batch)

    def _rest(self) -> None:
        """Count plain steps, and now and then try the smallest tree again."""
        self._plain_steps += 1
        if self._plain_steps >= self._patience and len(self._sizes) > 1:
            self._plain_steps, self._trying = 0, TRY
            for text in self._texts:
                text.doubt()
            self._now = min(self._sizes[1:], key=self._seconds)

    def _best(self) -> Size:
        plain, *drafting = self._sizes
        best = max(drafting, key=self._rate, default=plain)
        return best if self._rate(best) > EDGE * self._rate(plain) else plain

    def _rate(self, size: Size) -> float:
        """Tokens a second of one sequence to be expected."""
        return (1 + self.luck * (size.expected - 1)) / self._seconds(size)

    def _seconds(self, size: Size) -> float:
        at = (size.tree.size, len(self._texts))
        known = self._cost(size.tree.size, size.tree.max_depth, len(self._texts))
        # What was never seen here is taken to be as slow as the quickest that was; the root alone is worth a try.
        quickest = self._quickest.get(at[1], 1.0)
        return known * self._slower.get(at, quickest if at[0] > 1 else min(quickest, 1.0))

    def _cost(self, nodes: int, depth: int, batch: int) -> float:
        """Seconds of a step as they were measured."""
        at = (nodes, depth, batch)
        if at not in self._known:
            self._known[at] = self._costs.step(*at)
        return self._known[at]
