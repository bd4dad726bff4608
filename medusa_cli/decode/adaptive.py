"""The adaptive policy, which chooses the tree size that gives the most tokens per second."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medusa_cli.decode.answer import Step
from medusa_cli.decode.ngram import MAX_TOKENS, PAIR, AcceptanceEstimate, NgramMatch
from medusa_cli.decode.policy import ROOT, DraftPolicy, Proposal
from medusa_cli.decode.sampling import Sampling, sampling_kind
from medusa_cli.decode.sequence import DraftState, Sequence
from medusa_cli.tree import DynamicTree, Prices, Tree
from medusa_cli.tree.search import SizedTree, StepTimes

# The policy switches to another tree if that promises this many times the tokens per second.
MARGIN = 1.03
# It drafts only if a tree promises this many times the tokens per second of plain decoding.
MIN_GAIN = 1.02
# A step that takes more than this multiple of its expected time is an outlier, unless the next step
# is slow, too.
OUTLIER_RATIO = 1.5
# Number of plain steps between two trials of a tree: initially, and at most.
RETRY_STEPS = 12
MAX_RETRY_STEPS = 96
# A trial ends after this many steps without accepted draft tokens.
TRIAL_STEPS = 2
# A trial may add at most this share to the time of the plain steps before it.
MAX_TRIAL_COST = 0.02
# Weight of a prior, in expected draft tokens: for a calibration over all texts, and for confidences
# in each text.
PRIOR = 2.0
CONFIDENCE_PRIOR = 8.0
# Decay of older steps within a sequence, and over all sequences with the same kind of sampling.
SEQUENCE_DECAY = 0.98
KIND_DECAY = 0.995
# Rate at which observed step times correct the measured ones.
EMA_RATE = 0.1
# Rate at which the usual size of a growing tree follows the latest ones.
USUAL_RATE = 0.02
# Rate at which the corrections of the other trees follow.
FOLLOW_RATE = 0.02
# The largest ratio of observed to measured time that one step may contribute.
MAX_RATIO = 3.0
# Prices of draft tokens do not rise further below this ratio of accepted to expected ones.
LEAST_ACCEPTANCE = 0.1
# Numbers of matched tokens to try.
MATCH_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(eq=False)
class BatchCosts:
    """Holds the step cost of each of T trees at one batch size.

    measured [T]: seconds measured before decoding; for a tree that grows, those of the usual step.
    corrections [T]: factors learned from steps. timed [T]: True for trees with at least one
    observed step.
    """

    measured: NDArray[np.float64]
    corrections: NDArray[np.float64]
    timed: NDArray[np.bool_]

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Returns the expected duration in seconds of a step with each tree, [T]."""
        return self.measured * self.corrections

    def known(self, tree: int) -> float:
        """Returns the correction learned from steps with a tree, or 1 before the first step."""
        return self.corrections[tree] if self.timed[tree] else 1.0

    def correct(self, tree: int, ratio: float) -> None:
        """Learns from a step with a tree. Trees without an observed step get the smallest correction so far."""
        new = (1 - EMA_RATE) * self.known(tree) + EMA_RATE * ratio if self.timed[tree] else ratio
        self.corrections[tree] = new
        self.timed[tree] = True
        # A change in the machine's speed affects all trees.
        self.corrections += FOLLOW_RATE * (new - self.corrections)
        self.corrections[~self.timed] = self.corrections[self.timed].min()
        if not self.timed[0]:
            self.corrections[0] = min(self.corrections[0], 1.0)


class StepCosts:
    """Estimates step times: measured seconds, corrected by the steps of all decoders that share them."""

    def __init__(self, trees: Iterable[Tree], step_times: StepTimes) -> None:
        self._trees = list(trees)
        self.measured = cache(step_times.step)  # seconds by nodes, depth and batch size
        self._batches: dict[int, BatchCosts] = {}

    def of_batch(self, batch: int) -> BatchCosts:
        """Returns the costs at a batch size; later steps correct them."""
        if batch not in self._batches:
            measured = np.array(
                [self.measured(tree.size, tree.max_depth, batch) for tree in self._trees]
            )
            count = len(measured)
            self._batches[batch] = BatchCosts(measured, np.ones(count), np.zeros(count, bool))
        return self._batches[batch]


@dataclass(frozen=True)
class Growing:
    """Describes trees that grow: their limits, and the probabilities [K] that a head's best guess is right."""

    limits: DynamicTree
    hits: tuple[float, ...]

    def prices(self, costs: StepCosts, batch: int, rate: float, acceptance: float) -> Prices:
        """Returns the prices of draft tokens at a rate in tokens per second.

        acceptance: the ratio of accepted tokens to the sum of confidences.
        """
        draft_rate = rate / max(acceptance, LEAST_ACCEPTANCE)
        passes = [costs.measured(nodes, 0, batch) for nodes in range(1, self.limits.budget + 1)]
        levels = [costs.measured(1, depth + 1, batch) for depth in range(self.limits.max_depth)]
        return Prices(
            tuple(draft_rate * (seconds - passes[0]) for seconds in convex(passes)),
            tuple(draft_rate * (seconds - passes[0]) for seconds in levels),
            tuple(min(acceptance, 1.0) * hit for hit in self.hits),
        )


class AdaptivePolicy(DraftPolicy):
    """Chooses the tree size that gives the most tokens per second, down to plain decoding.

    It tracks one ratio per sequence: accepted to expected draft tokens. A tree then gives 1 + ratio
    * (expected - 1) tokens per step. The step time is measured per (tree, batch size) and corrected
    by later steps. All sequences in a pass draft the same tree. A new sequence starts from the
    estimate for its kind of sampling.

    With a drafter whose confidences are calibrated, one tree replaces those of all sizes: in each
    step, it grows as far as it pays. The ratio is then that of accepted tokens to the sum of the
    confidences.
    """

    def __init__(
        self,
        trees: Iterable[SizedTree],
        step_times: StepTimes,
        ngrams: bool = False,
        growing: Growing | None = None,
    ) -> None:
        """Creates a policy that chooses among trees of all sizes, or lets a tree grow."""
        super().__init__(ngrams)
        drafted = [sized for sized in trees if sized.tree.size > 1]
        self._growing = growing if drafted else None
        self._prior = PRIOR if self._growing is None else CONFIDENCE_PRIOR
        if self._growing is not None:
            drafted = [max(drafted, key=lambda sized: sized.expected / _seconds(sized, step_times))]
        self._trees = [SizedTree(ROOT, 1.0), *drafted]
        self._index = {sized.tree.size: i for i, sized in enumerate(self._trees)}
        self._expected = np.array([sized.expected for sized in self._trees])
        self.costs = StepCosts((sized.tree for sized in self._trees), step_times)
        self._kinds: dict[str, AcceptanceEstimate] = {}
        self.max_depth = max(sized.tree.max_depth for sized in self._trees)
        self._reset()
        self.trees = "drafts where they pay" if self.max_depth else "plain decoding"
        if self._growing is not None:
            self.max_depth = self._growing.limits.max_depth
            self.trees = "trees that grow where they pay"
        elif self._current:
            self.trees = f"trees of a size that pays, {self.size} nodes to begin with"

    def _reset(self) -> None:
        """Resets the policy to its state before the first sequence.

        Step costs and the estimates per kind of sampling are kept.
        """
        self._sequences = [AcceptanceEstimate(1.0, self._prior, SEQUENCE_DECAY)]
        self._plain_steps = 0
        self._retry_after = RETRY_STEPS
        self._trial_left = 0
        self._outlier = False
        self._current, _ = self._best()  # an index into `_trees`

    def fork(self) -> AdaptivePolicy:
        """Returns a copy of this policy for another decoder.

        Both share `costs` and the estimates per kind of sampling, and both update them.
        """
        other = copy.copy(self)
        other._reset()
        return other

    @property
    def size(self) -> int:  # type: ignore[override]
        """Returns the number of nodes in the current tree, at most if it grows."""
        if self._current and self._growing is not None:
            return self._growing.limits.budget
        return self._trees[self._current].tree.size

    @property
    def acceptance(self) -> float:
        """Returns the ratio of accepted to expected draft tokens, averaged over the running sequences."""
        return sum(sequence.ratio for sequence in self._sequences) / len(self._sequences)

    def begin(self, sampling: Sampling) -> DraftState:
        """Returns the state of a new sequence, and resets the retry interval.

        The count of plain steps continues, because an answer may be shorter than the interval
        between two trials.
        """
        state = super().begin(sampling)
        kind, prior = sampling_kind(sampling)
        self._retry_after = RETRY_STEPS
        shared = self._kinds.setdefault(kind, AcceptanceEstimate(prior, self._prior, KIND_DECAY))
        state.acceptance = AcceptanceEstimate(shared.ratio, self._prior, SEQUENCE_DECAY, shared)
        return state

    def propose(self, sequences: list[Sequence], matches: list[list[NgramMatch]]) -> list[Proposal]:
        acceptances = [
            sequence.draft.acceptance for sequence in sequences if sequence.draft.acceptance
        ]
        if acceptances and acceptances != self._sequences:
            self._sequences = acceptances
            best, _ = self._best()
            # Otherwise the trial continues: sequences may come and go at every step.
            if best or not self._trial_left:
                self._current = best
                self._trial_left = 0
        # A single-token match is no more likely than the drafter's own guess.
        chances = [
            found[0].chance if found and found[0].length >= PAIR else 0.0 for found in matches
        ]
        batch = len(sequences)
        if not any(chances):
            return [(self._proposed(self._trees[self._current].tree, batch), [])] * batch
        proposals: list[Proposal] = []
        for (tree, count), found in zip(self.weigh_matches(chances), matches, strict=True):
            tokens = [found[0].tokens[:count]] if count else []
            proposals.append((self._proposed(tree, batch, count), tokens))
        return proposals

    def _proposed(self, tree: Tree, batch: int, matched: int = 0) -> Tree | DynamicTree:
        """Returns the tree to draft for a chosen one: the tree itself, or one that grows in its place.

        matched: the number of matched tokens beside it in the pass.
        """
        if self._growing is None or not tree.max_depth:
            return tree
        usual = self.costs.of_batch(batch).measured[1]
        tokens = batch * (1 + self.acceptance * (self._expected[1] - 1))
        prices = self._growing.prices(self.costs, batch, tokens / usual, self.acceptance)
        limits = self._growing.limits.truncate(1) if self._trial_left else self._growing.limits
        return replace(limits, prices=prices.beside(matched))

    def weigh_matches(self, chances: list[float]) -> list[tuple[Tree, int]]:
        """Returns the tree of each sequence, and the number of matched tokens to add to it.

        chances: the probability that a matched token is right if those before it are; 0 without a
        match. The widest draft determines the time of the pass, and the drafter runs either for all
        sequences or for none. Therefore the sizes are chosen for all sequences together.
        """
        plain = self._trees[0]
        current = self._trees[self._current]
        if current is not plain:
            current = replace(current, expected=self._expected[self._current])
        ratio = self.acceptance
        batch = len(chances)
        costs = self.costs.of_batch(batch)
        correction = costs.corrections[self._current]
        tokens = batch * (1 + ratio * (current.expected - 1))
        best_rate = MARGIN * tokens / costs.seconds[self._current]
        choice = [(current.tree, 0)] * batch
        for options in [(plain,)] if current is plain else [(plain,), (current, plain)]:
            first = options[0].tree
            widths = {sized.tree.size + count for sized in options for count in MATCH_LENGTHS}
            for rows in sorted(width for width in widths if width >= first.size):
                drafts = [best_in_rows(options, ratio, chance, rows) for chance in chances]
                seconds = correction * self.costs.measured(rows, first.max_depth, batch)
                rate = sum(draft.expected for draft in drafts) / seconds
                if rate > best_rate:
                    best_rate = rate
                    choice = [(draft.tree, draft.matched) for draft in drafts]
        return choice

    def record(self, sequences: list[Sequence], steps: list[Step]) -> None:
        """Updates the acceptance estimates and step costs, and chooses the next tree.

        Steps that drafted n-gram matches or a truncated tree do not update the drafter's estimate.
        """
        super().record(sequences, steps)
        drafted = [
            (step, sequence.draft.acceptance)
            for sequence, step in zip(sequences, steps, strict=True)
            if not step.looked_up and sequence.draft.acceptance and sequence.draft.speculative
        ]
        tree = self._drafted_tree([step for step, _ in drafted])
        if tree is None:
            return
        if len(drafted) == len(steps):
            self._correct_cost(tree, steps)
        if tree:
            for step, acceptance in drafted:
                if step.growth is None:
                    expected = self._expected[tree] - 1
                else:
                    expected = step.growth.expected
                    self._expected[tree] += USUAL_RATE * (1 + expected - self._expected[tree])
                if expected:
                    acceptance.update(expected, len(step.path) - 1)
        if self._trial_left:
            self._continue_trial(tree, any(len(step.path) > 1 for step, _ in drafted))
        elif not self._current:
            self._count_plain_step()
        else:
            best, rates = self._best()
            if not best or rates[best] > MARGIN * rates[self._current]:
                self._current = best
                self._plain_steps = 0
                self._retry_after = RETRY_STEPS

    def _drafted_tree(self, steps: list[Step]) -> int | None:
        """Returns the index of the tree that all steps drafted, or None if there is no such tree."""
        if self._growing is not None and steps and all(step.growth for step in steps):
            return 1
        sizes = {step.nodes for step in steps}
        return self._index.get(sizes.pop()) if len(sizes) == 1 else None

    def _continue_trial(self, tree: int, accepted: bool) -> None:
        if not tree:  # FIRP has no extra rows yet in the first step of a trial
            return
        self._trial_left -= not accepted
        best, rates = self._best()
        if self._trial_left and rates[tree] < MIN_GAIN * rates[0]:
            return
        self._trial_left = 0
        self._current = best
        self._retry_after = RETRY_STEPS if best else min(2 * self._retry_after, MAX_RETRY_STEPS)

    def _count_plain_step(self) -> None:
        """Counts a plain step, and starts a trial of the cheapest tree once enough steps have passed.

        There must be at least `_retry_after` plain steps, and enough to keep the cost of the trial
        within MAX_TRIAL_COST of their time.
        """
        self._plain_steps += 1
        if self._plain_steps < self._retry_after or len(self._trees) == 1:
            return
        batch = len(self._sequences)
        costs = self.costs.of_batch(batch)
        seconds = costs.seconds
        cheapest = 1 + int(seconds[1:].argmin())
        trial = seconds[cheapest]
        if self._growing is not None:  # it grows by one level then
            trial = costs.corrections[cheapest] * self.costs.measured(2, 1, batch)
        trial_cost = TRIAL_STEPS * (trial / seconds[0] - 1)  # in units of plain steps
        if trial_cost > MAX_TRIAL_COST * self._plain_steps:
            return
        self._plain_steps = 0
        self._trial_left = TRIAL_STEPS
        self._current = cheapest
        for sequence in self._sequences:
            sequence.weight = min(sequence.weight, PRIOR)  # earlier steps weigh less in the trial

    def _correct_cost(self, tree: int, steps: list[Step]) -> None:
        """Corrects the cost of a tree, but ignores a single slow step, which may be an outlier."""
        batch = len(steps)
        costs = self.costs.of_batch(batch)
        measured = costs.measured[tree]
        if levels := max(step.growth.levels if step.growth else 0 for step in steps):
            measured = self.costs.measured(max(step.nodes for step in steps), levels, batch)
            costs.measured[tree] += USUAL_RATE * (measured - costs.measured[tree])
        seconds = sum(step.draft_s + step.verify_s for step in steps)
        ratio = min(seconds / measured, MAX_RATIO)
        after_outlier = self._outlier
        self._outlier = ratio > OUTLIER_RATIO * costs.known(tree)
        if not self._outlier or after_outlier:
            costs.correct(tree, ratio)

    def _best(self) -> tuple[int, NDArray[np.float64]]:
        """Returns the index of the best tree, and the tokens per second of each tree.

        The index is 0 (plain decoding) unless a tree gives more than MIN_GAIN times the tokens per
        second of plain decoding.
        """
        tokens = 1 + self.acceptance * (self._expected - 1)
        rates = tokens / self.costs.of_batch(len(self._sequences)).seconds
        best = int(rates.argmax())
        return best if rates[best] > MIN_GAIN * rates[0] else 0, rates


def _seconds(sized: SizedTree, step_times: StepTimes) -> float:
    return step_times.step(sized.tree.size, sized.tree.max_depth)


def convex(values: list[float]) -> list[float]:
    """Returns the highest curve below the values that rises ever faster: disturbances only add time."""

    def slope(start: int, end: int) -> float:
        return (values[end] - values[start]) / (end - start)

    corners: list[int] = []
    for i in range(len(values)):
        while len(corners) > 1 and slope(corners[-2], corners[-1]) >= slope(corners[-2], i):
            corners.pop()
        corners.append(i)
    curve = [values[0]]
    for start, end in pairwise(corners):
        step = max(0.0, slope(start, end))
        for _ in range(start, end):
            curve.append(curve[-1] + step)
    return curve


class MatchedDraft(NamedTuple):
    """Holds a tree, the number of matched tokens to add, and the expected tokens per step."""

    tree: Tree
    matched: int
    expected: float


def best_in_rows(
    options: Iterable[SizedTree], acceptance: float, chance: float, rows: int
) -> MatchedDraft:
    """Returns the draft with the most expected tokens: one of the trees in `options`, and a match.

    rows: the maximum number of nodes. acceptance: the ratio of accepted to expected draft tokens.
    chance: the probability that a matched token is right; 0 without a match. The drafter's guesses
    count only if the first matched token is wrong.
    """
    drafts = []
    for sized in options:
        count = min(rows - sized.tree.size, MAX_TOKENS) if chance else 0
        matched = chance * (1 - chance**count) / (1 - chance)
        failed = 1 - chance if count else 1.0
        guessed = acceptance * (sized.expected - 1)
        drafts.append(MatchedDraft(sized.tree, count, 1 + matched + failed * guessed))
    return max(drafts, key=lambda draft: draft.expected)
