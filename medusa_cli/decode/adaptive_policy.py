"""The adaptive policy, which chooses the tree size that gives the most tokens per second."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from medusa_cli.decode.answer import Step
from medusa_cli.decode.ngram import MAX_TOKENS, PAIR, AcceptanceEstimate, NgramMatch
from medusa_cli.decode.policy import ROOT, DraftPolicy, Proposal
from medusa_cli.decode.sampling_options import Sampling, sampling_kind
from medusa_cli.decode.sequence import DraftState, Sequence
from medusa_cli.decode.step_costs import BatchCosts, StepCosts
from medusa_cli.tree import DynamicTree, Prices, Tree
from medusa_cli.tree.search import SizedTree, StepTimes

# The policy switches to another tree if that tree promises more than this many times the tokens per
# second of the current tree.
MARGIN = 1.03
# The policy keeps drafting only if a tree promises this many times the tokens per second of plain
# decoding.
MIN_GAIN = 1.02
# A batch of n sequences begins to draft only if a tree promises a gain over plain decoding of n times
# this share, because the drafter must first read the prompts and the last tokens that it has missed.
GAIN_PER_SEQUENCE = 0.02
# The minimum number of plain steps before a trial of a tree.
RETRY_STEPS = 12
# A trial ends after this many steps without accepted draft tokens.
TRIAL_STEPS = 2
# After a batch in which drafts could not pay, a smaller batch waits for this many steps before it drafts.
# The batch may be smaller for only a moment, between two requests of a client. A drafter that has missed a
# part of a text needs the time of several steps to read the text's end.
RESUME_STEPS = 16
# The maximum number of plain steps before a trial, however much the last trial cost.
MAX_RETRY_STEPS = 512
# A trial may add at most this share to the time of the plain steps before it.
MAX_TRIAL_COST = 0.005
# Drafts are tried if they would pay with this share more accepted tokens than calibration expects.
# The mean over n texts varies less than one text, so the share is divided by the square root of n.
OPTIMISM = 0.5
# The weights of priors, in expected draft tokens. PRIOR is that of the calibration, which is a mean
# over all texts. CONFIDENCE_PRIOR is that of the drafter's confidences in each text.
PRIOR = 2.0
CONFIDENCE_PRIOR = 8.0
# Older steps lose weight by these factors with each new step: in the estimate of one sequence, and
# in that of all sequences with the same kind of sampling.
SEQUENCE_DECAY = 0.98
KIND_DECAY = 0.995
# The rate at which the usual size of growing trees follows the sizes of the latest trees.
USUAL_RATE = 0.02
# The prices of draft tokens rise as the ratio of accepted to expected draft tokens falls. Below this
# ratio, they do not rise further.
LEAST_ACCEPTANCE = 0.1
# The numbers of tokens from an n-gram match that the policy considers for a draft.
MATCH_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True)
class Growing:
    """Describes trees that grow. limits: their maximum sizes. hits [K]: how often each head's best guess is right."""

    limits: DynamicTree
    hits: tuple[float, ...]

    def prices(self, costs: BatchCosts, length: float, rate: float, acceptance: float) -> Prices:
        """Returns the prices of draft tokens after texts of this mean length.

        rate: the expected tokens per second. acceptance: the ratio of accepted tokens to the sum of confidences.
        """
        draft_rate = rate / max(acceptance, LEAST_ACCEPTANCE)
        passes = [costs.added(nodes, 0, length) for nodes in range(1, self.limits.budget + 1)]
        levels = [costs.added(1, depth + 1, length) for depth in range(self.limits.max_depth)]
        return Prices(
            tuple(draft_rate * seconds for seconds in convex(passes)),
            tuple(draft_rate * seconds for seconds in levels),
            tuple(min(acceptance, 1.0) * hit for hit in self.hits),
        )


@dataclass
class TreeSize:
    """Holds the size of a tree, and the expected tokens of a step with this tree.

    For trees that grow, the fields are averages over the latest steps.
    """

    nodes: float
    depth: float
    expected: float

    def follow(self, step: Step, levels: int, expected: float) -> None:
        """Moves the averages toward the tree that has grown in a step."""
        self.nodes += USUAL_RATE * (step.nodes - self.nodes)
        self.depth += USUAL_RATE * (levels - self.depth)
        self.expected += USUAL_RATE * (expected - self.expected)


@dataclass
class Trial:
    """Holds a trial's steps and seconds so far, and how many more steps it may take without accepted draft tokens."""

    left: float = TRIAL_STEPS
    steps: int = 0
    seconds: float = 0.0


class AdaptivePolicy(DraftPolicy):
    """Chooses the tree size that gives the most tokens per second, down to plain decoding.

    For each sequence, the policy tracks the ratio of accepted to expected draft tokens. If calibration
    expects n tokens per step from a tree, the policy expects 1 + ratio * (n - 1). Step times are
    measured before decoding, and each step corrects them. From time to time, a plain step checks that
    drafting still pays. All sequences in a pass draft the same tree. A new sequence starts from the
    estimate for its kind of sampling.

    With a drafter whose confidences are calibrated, one growing tree replaces the trees of all
    sizes: in each step, the tree grows as long as its growth pays. The tracked ratio is then that
    of accepted tokens to the sum of the confidences.

    The policy decodes plainly, tries drafts (a trial), or drafts. It changes between these states:

        plain -> trial      after some plain steps, whose number rises with the last trial's cost
        trial -> drafting   as soon as drafts pay
        trial -> plain      after some steps without accepted draft tokens
        drafting -> plain   as soon as drafts no longer pay, or if the batch grows
        any -> plain        for some steps, after a batch in which drafts could not pay
    """

    def __init__(
        self,
        trees: Iterable[SizedTree],
        step_times: StepTimes,
        ngrams: bool = False,
        growing: Growing | None = None,
    ) -> None:
        """Creates a policy that chooses among `trees` or, with `growing`, lets one tree grow."""
        super().__init__(ngrams)
        drafted = [sized for sized in trees if sized.tree.size > 1]
        self._growing = growing if drafted else None
        self._prior = PRIOR if self._growing is None else CONFIDENCE_PRIOR
        if self._growing is not None:
            drafted = [max(drafted, key=lambda sized: sized.expected / _seconds(sized, step_times))]
        self._trees = [SizedTree(ROOT, 1.0), *drafted]
        self._index = {sized.tree.size: i for i, sized in enumerate(self._trees)}
        self._sizes = [
            TreeSize(sized.tree.size, sized.tree.max_depth, sized.expected) for sized in self._trees
        ]
        self._grown: dict[int, TreeSize] = {}  # the usual size of growing trees, by batch size
        self.costs = StepCosts(step_times)
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
        self._length = 0.0  # mean number of tokens in the sequences
        self._resume_in = 0  # steps until a batch may draft again
        self._plain_steps = 0
        self._retry_after = float(RETRY_STEPS)
        self._trial: Trial | None = None
        self._drafting = False  # the drafter runs in the current step
        self._current = 0  # an index into `_trees`
        self._current, _ = self._best()

    def fork(self) -> AdaptivePolicy:
        """Returns a copy of this policy for another decoder.

        Both policies share and update the step costs, the sizes of grown trees and the estimates per kind of sampling.
        """
        other = copy.copy(self)
        other._reset()
        return other

    @property
    def size(self) -> int:  # type: ignore[override]
        """Returns the number of nodes in the current tree, or the maximum if the tree grows."""
        if self._current and self._growing is not None:
            return self._growing.limits.budget
        return self._trees[self._current].tree.size

    @property
    def acceptance(self) -> float:
        """Returns the ratio of accepted to expected draft tokens, averaged over the running sequences."""
        return sum(sequence.ratio for sequence in self._sequences) / len(self._sequences)

    def _size_of(self, tree: int, batch: int) -> TreeSize:
        """Returns the size of a tree, or its usual size at this batch size if the tree grows."""
        if self._growing is None or not tree:
            return self._sizes[tree]
        return self._grown.setdefault(batch, replace(self._sizes[tree]))

    def _seconds(self, tree: int, batch: int) -> float:
        size = self._size_of(tree, batch)
        return self.costs.of_batch(batch).seconds(
            round(size.nodes), round(size.depth), self._length
        )

    def reads_states(self, batch: int) -> bool:
        """Returns True while the drafter drafts, and while drafting may soon pay."""
        if self._resume_in and batch > 1:
            return False
        drafts = self._current > 0 and batch <= len(self._sequences)
        return drafts or self._may_pay(batch)

    def _may_pay(self, batch: int) -> bool:
        """Returns True if a tree would pay at this batch size with more accepted tokens than expected; see OPTIMISM."""
        if len(self._trees) == 1:
            return False
        costs = self.costs.of_batch(batch)
        plain = costs.seconds(1, 0, self._length)
        factor = 1 + OPTIMISM / math.sqrt(batch)
        return any(
            (1 + min(depth, factor * (expected - 1))) * plain
            > gain_to_begin(batch) * costs.seconds(nodes, depth, self._length)
            for nodes, depth, expected in self._smallest()
        )

    def _smallest(self) -> list[tuple[int, int, float]]:
        """Returns the nodes, depth and expected tokens of each tree that a trial may draft."""
        if self._growing is not None:  # a trial's tree grows by one level
            return [(2, 1, 1 + self._growing.hits[0])]
        return [
            (sized.tree.size, sized.tree.max_depth, sized.expected) for sized in self._trees[1:]
        ]

    def begin(self, sampling: Sampling) -> DraftState:
        """Returns the state of a new sequence."""
        state = super().begin(sampling)
        kind, prior = sampling_kind(sampling)
        shared = self._kinds.setdefault(kind, AcceptanceEstimate(prior, self._prior, KIND_DECAY))
        state.acceptance = AcceptanceEstimate(shared.ratio, self._prior, SEQUENCE_DECAY, shared)
        return state

    def propose(self, sequences: list[Sequence], matches: list[list[NgramMatch]]) -> list[Proposal]:
        proposals = self._propose(sequences, matches)
        self._drafting = any(tree.max_depth for tree, _ in proposals)
        return proposals

    def _propose(
        self, sequences: list[Sequence], matches: list[list[NgramMatch]]
    ) -> list[Proposal]:
        batch = len(sequences)
        self._length = sum(len(sequence.tokens) for sequence in sequences) / max(batch, 1)
        acceptances = [
            sequence.draft.acceptance for sequence in sequences if sequence.draft.acceptance
        ]
        if acceptances and acceptances != self._sequences:
            grows = len(acceptances) > len(self._sequences)
            self._sequences = acceptances
            if grows and not self._trial:
                self._current = 0  # a larger batch begins with plain steps
            best, _ = self._best()
            # Sequences may come and go at every step, so a change of the batch does not end a trial
            # unless a tree pays.
            if best or not self._trial:
                self._current = best
                self._trial = None
        self._wait_to_resume(batch)
        if self.costs.of_batch(batch).plain_is_old:
            return [(ROOT, [])] * batch
        # A match of a single token is no more likely to be right than the drafter's own guess.
        chances = [
            max(0.0, found[0].chance - found[0].doubt) if found and found[0].length >= PAIR else 0.0
            for found in matches
        ]
        if not any(chances):
            return [(self._proposed(self._trees[self._current].tree, batch), [])] * batch
        proposals: list[Proposal] = []
        for (tree, count), found in zip(self.weigh_matches(chances), matches, strict=True):
            tokens = [found[0].tokens[:count]] if count else []
            proposals.append((self._proposed(tree, batch, count), tokens))
        return proposals

    def _wait_to_resume(self, batch: int) -> None:
        """Keeps decoding plainly for RESUME_STEPS steps after a batch in which drafts could not pay."""
        if not self._current and not self._may_pay(batch):
            self._resume_in = RESUME_STEPS
        elif self._resume_in:
            self._resume_in -= 1
            self._trial = None
            self._current = 0 if self._resume_in else self._best()[0]

    def _proposed(self, tree: Tree, batch: int, matched: int = 0) -> Tree | DynamicTree:
        """Returns the tree to draft: the chosen tree itself, or a growing tree in its place.

        matched: the number of matched tokens in the same pass.
        """
        if self._growing is None or not tree.max_depth:
            return tree
        tokens = batch * (1 + self.acceptance * (self._size_of(1, batch).expected - 1))
        rate = tokens / self._seconds(1, batch)
        prices = self._growing.prices(
            self.costs.of_batch(batch), self._length, rate, self.acceptance
        )
        limits = self._growing.limits.truncate(1) if self._trial else self._growing.limits
        return replace(limits, prices=prices.with_rows(matched))

    def weigh_matches(self, chances: list[float]) -> list[tuple[Tree, int]]:
        """Returns the tree of each sequence, and the number of matched tokens to add to it.

        chances: for each sequence, the probability that a token of its match is right if all tokens
        before it are; 0 without a match. The widest draft determines the time of the pass, and the
        drafter runs for all sequences or for none. So the sizes are chosen for all sequences together.
        """
        batch = len(chances)
        plain = self._trees[0]
        current = self._trees[self._current]
        if current is not plain:
            expected = self._size_of(self._current, batch).expected
            current = replace(current, expected=expected)
        ratio = self.acceptance
        costs = self.costs.of_batch(batch)
        tokens = batch * (1 + ratio * (current.expected - 1))
        best_rate = MARGIN * tokens / self._seconds(self._current, batch)
        choice = [(current.tree, 0)] * batch
        for options in [(plain,)] if current is plain else [(plain,), (current, plain)]:
            first = options[0].tree
            widths = {sized.tree.size + count for sized in options for count in MATCH_LENGTHS}
            guessed = max(0.0, ratio * (options[0].expected - 1))
            limit = sum(1 + guessed + chance / (1 - chance) for chance in chances)
            for rows in sorted(width for width in widths if width >= first.size):
                seconds = costs.seconds(rows, first.max_depth, self._length)
                if limit <= best_rate * seconds:  # wider passes take even longer
                    break
                drafts = [best_in_rows(options, ratio, chance, rows) for chance in chances]
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
        levels = self._trees[tree].tree.max_depth if tree is not None else 0
        levels = max([levels, *(step.growth.levels for step in steps if step.growth)])
        batch = len(steps)
        seconds = sum(step.draft_s + step.verify_s for step in steps)
        if (tree is not None and len(drafted) == batch) or not self._drafting:
            nodes = max(step.nodes for step in steps)
            self.costs.of_batch(batch).record(nodes, levels, self._length, seconds)
        if tree is None:
            return
        if tree:
            size = self._size_of(tree, batch)
            for step, acceptance in drafted:
                _update(acceptance, size, step, levels)
        if self._trial:
            if tree:  # in a trial's first step, FIRP has no extra rows yet and drafts only the root
                self._continue_trial(self._trial, tree, [step for step, _ in drafted], seconds)
        elif not self._current:
            self._count_plain_step()
        else:
            best, rates = self._best()
            if not best or rates[best] > MARGIN * rates[self._current]:
                self._current = best
                self._plain_steps = 0

    def _drafted_tree(self, steps: list[Step]) -> int | None:
        """Returns the index of the tree that all steps drafted, or None if there is no such tree."""
        if self._growing is not None and steps and all(step.growth for step in steps):
            return 1
        sizes = {step.nodes for step in steps}
        return self._index.get(sizes.pop()) if len(sizes) == 1 else None

    def _continue_trial(self, trial: Trial, tree: int, steps: list[Step], seconds: float) -> None:
        """Ends a trial if it pays, or if too many of its steps accepted nothing."""
        trial.left -= sum(len(step.path) == 1 for step in steps) / len(steps)
        trial.steps += 1
        trial.seconds += seconds
        best, rates = self._best()
        if trial.left > 0 and rates[tree] < gain_to_begin(len(steps)) * rates[0]:
            return
        self._current = best
        self._trial = None
        batch = len(steps)
        plain = self._seconds(0, batch)
        tokens = rates[tree] * self._seconds(tree, batch)
        loss = trial.seconds / plain - trial.steps * tokens
        self._retry_after = min(max(loss / MAX_TRIAL_COST, RETRY_STEPS), MAX_RETRY_STEPS)

    def _count_plain_step(self) -> None:
        """Counts a plain step, and starts a trial of the cheapest tree if it is time for one.

        The trial waits for so many plain steps that its cost is at most the share MAX_TRIAL_COST of their time.
        """
        self._plain_steps += 1
        batch = len(self._sequences)
        if self._plain_steps < self._retry_after or not self._may_pay(batch):
            return
        costs = self.costs.of_batch(batch)
        plain = self._seconds(0, batch)
        ratio = self.acceptance
        losses = [
            costs.added(nodes, depth, self._length) / plain - ratio * (expected - 1)
            for nodes, depth, expected in self._smallest()
        ]
        if TRIAL_STEPS * min(losses) > MAX_TRIAL_COST * self._plain_steps:
            return
        self._plain_steps = 0
        self._trial = Trial()
        self._current = 1 + losses.index(min(losses))
        for sequence in self._sequences:
            sequence.weight = min(sequence.weight, PRIOR)  # earlier steps weigh less in the trial

    def _best(self) -> tuple[int, list[float]]:
        """Returns the index of the best tree, and the tokens per second of each tree.

        The index is 0 (plain decoding) if no tree gives enough additional tokens per second.
        """
        batch = len(self._sequences)
        ratio = self.acceptance
        rates = [
            (1 + ratio * (self._size_of(tree, batch).expected - 1)) / self._seconds(tree, batch)
            for tree in range(len(self._trees))
        ]
        best = rates.index(max(rates))
        drafts = self._current and not self._trial
        gain = MIN_GAIN if drafts else gain_to_begin(batch)
        return best if rates[best] > gain * rates[0] else 0, rates


def _update(acceptance: AcceptanceEstimate, size: TreeSize, step: Step, levels: int) -> None:
    """Updates a sequence's estimate after a step with `levels` levels and, if the tree grew, the averages in `size`."""
    expected = size.expected - 1
    if step.growth is not None:
        expected = step.growth.expected
        size.follow(step, levels, 1 + expected)
    if expected:
        acceptance.update(expected, len(step.path) - 1)


def gain_to_begin(batch: int) -> float:
    """Returns the speed, as a multiple of plain decoding's, that a tree must promise before a batch begins to draft."""
    return 1 + GAIN_PER_SEQUENCE * batch


def _seconds(sized: SizedTree, step_times: StepTimes) -> float:
    return step_times.step(sized.tree.size, sized.tree.max_depth)


def convex(values: list[float]) -> list[float]:
    """Returns the highest convex curve that lies below measured times, as disturbances only add time.

    Where this curve would fall, the result stays level.
    """

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
    """Returns the draft with the most expected tokens: a tree from `options`, and matched tokens.

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
