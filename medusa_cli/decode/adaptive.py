"""The adaptive policy, which chooses the tree size that gives the most tokens per second."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medusa_cli.decode.answer import Step
from medusa_cli.decode.ngram import MAX_TOKENS, PAIR, AcceptanceEstimate, NgramMatch
from medusa_cli.decode.policy import ROOT, DraftPolicy, Proposal
from medusa_cli.decode.sampling import Sampling, sampling_kind
from medusa_cli.decode.sequence import DraftState, Sequence
from medusa_cli.tree import Tree
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
# Weight of a prior, in expected draft tokens.
PRIOR = 2.0
# Decay of older steps within a sequence, and over all sequences with the same kind of sampling.
SEQUENCE_DECAY = 0.98
KIND_DECAY = 0.995
# Rate at which observed step times correct the measured ones.
EMA_RATE = 0.1
# Rate at which the corrections of the other trees follow.
FOLLOW_RATE = 0.02
# The largest ratio of observed to measured time that one step may contribute.
MAX_RATIO = 3.0
# Numbers of matched tokens to try.
MATCH_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(eq=False)
class BatchCosts:
    """Holds the step cost of each of T trees at one batch size.

    measured [T]: seconds measured before decoding. corrections [T]: factors learned from steps.
    timed [T]: True for trees with at least one observed step.
    """

    measured: NDArray[np.float64]
    corrections: NDArray[np.float64]
    timed: NDArray[np.bool_]

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Returns the expected duration in seconds of a step with each tree, [T]."""
        return self.measured * self.corrections

    def ratio(self, tree: int, seconds: float) -> float:
        """Returns the ratio of a step's seconds to the tree's measured seconds, at most MAX_RATIO."""
        return min(seconds / self.measured[tree], MAX_RATIO)

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


class AdaptivePolicy(DraftPolicy):
    """Chooses the tree size that gives the most tokens per second, down to plain decoding.

    It tracks one ratio per sequence: accepted to expected draft tokens. A tree then gives 1 + ratio
    * (expected - 1) tokens per step. The step time is measured per (tree, batch size) and corrected
    by later steps. All sequences in a pass draft the same tree. A new sequence starts from the
    estimate for its kind of sampling.
    """

    def __init__(
        self,
        trees: Iterable[SizedTree],
        step_times: StepTimes,
        ngrams: bool = False,
        max_nodes: int | None = None,
    ) -> None:
        """Creates a policy that chooses among trees of all sizes.

        max_nodes: the maximum number of nodes in a draft, including n-gram matches. If all trees
        are larger, all are kept.
        """
        super().__init__(ngrams)
        trees = list(trees)
        self._max_nodes = math.inf if max_nodes is None else max_nodes
        fitting = [sized for sized in trees if sized.tree.size <= self._max_nodes] or trees
        self._trees = [SizedTree(ROOT, 1.0), *(sized for sized in fitting if sized.tree.size > 1)]
        self._index = {sized.tree.size: i for i, sized in enumerate(self._trees)}
        self._expected = np.array([sized.expected for sized in self._trees])
        self.costs = StepCosts((sized.tree for sized in self._trees), step_times)
        self._kinds: dict[str, AcceptanceEstimate] = {}
        self.max_depth = max(sized.tree.max_depth for sized in self._trees)
        self._reset()
        self.trees = "drafts where they pay" if self.max_depth else "plain decoding"
        if self._current:
            self.trees = f"trees of a size that pays, {self.size} nodes to begin with"

    def _reset(self) -> None:
        """Resets the policy to its state before the first sequence.

        Step costs and the estimates per kind of sampling are kept.
        """
        self._sequences = [AcceptanceEstimate(1.0, PRIOR, SEQUENCE_DECAY)]
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
        """Returns the number of nodes in the current tree."""
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
        shared = self._kinds.setdefault(kind, AcceptanceEstimate(prior, PRIOR, KIND_DECAY))
        state.acceptance = AcceptanceEstimate(shared.ratio, PRIOR, SEQUENCE_DECAY, shared)
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
        if not any(chances):
            return [(self._trees[self._current].tree, [])] * len(sequences)
        proposals: list[Proposal] = []
        for (tree, count), found in zip(self.weigh_matches(chances), matches, strict=True):
            proposals.append((tree, [found[0].tokens[:count]] if count else []))
        return proposals

    def weigh_matches(self, chances: list[float]) -> list[tuple[Tree, int]]:
        """Returns the tree of each sequence, and the number of matched tokens to add to it.

        chances: the probability that a matched token is right if those before it are; 0 without a
        match. The widest draft determines the time of the pass, and the drafter runs either for all
        sequences or for none. Therefore the sizes are chosen for all sequences together.
        """
        current = self._trees[self._current]
        plain = self._trees[0]
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
            for rows in sorted(width for width in widths if first.size <= width <= self._max_nodes):
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
        nodes = drafted[0][0].nodes if drafted else 0
        batch = len(steps)
        tree = self._index.get(nodes)
        if tree is None or any(step.nodes != nodes for step, _ in drafted):
            return
        if len(drafted) == batch:
            self._correct_cost(tree, sum(step.draft_s + step.verify_s for step in steps), batch)
        if tree:
            for step, acceptance in drafted:
                acceptance.update(self._trees[tree].expected - 1, len(step.path) - 1)
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
        seconds = self.costs.of_batch(len(self._sequences)).seconds
        cheapest = 1 + int(seconds[1:].argmin())
        trial_cost = TRIAL_STEPS * (seconds[cheapest] / seconds[0] - 1)  # in units of plain steps
        if trial_cost > MAX_TRIAL_COST * self._plain_steps:
            return
        self._plain_steps = 0
        self._trial_left = TRIAL_STEPS
        self._current = cheapest
        for sequence in self._sequences:
            sequence.weight = min(sequence.weight, PRIOR)  # earlier steps weigh less in the trial

    def _correct_cost(self, tree: int, seconds: float, batch: int) -> None:
        """Corrects the cost of a tree, but ignores a single slow step, which may be an outlier."""
        costs = self.costs.of_batch(batch)
        ratio = costs.ratio(tree, seconds)
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
