"""Draft policies decide what each sequence drafts in its next step: a tree, and n-gram matches beside its nodes."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from medusa_cli.decode.accept import AcceptanceEstimate
from medusa_cli.decode.ngram import (
    MAX_TOKENS,
    PAIR,
    Corpus,
    CorpusMatches,
    NgramIndex,
    NgramMatch,
    NgramSource,
    NgramTrust,
    likeliest,
    ngram_trust,
)
from medusa_cli.decode.sampling import Sampling, cuts
from medusa_cli.tree import DynamicTree, Tree
from medusa_cli.tree.search import Accuracies, SizedTree, StepTimes, node_values

if TYPE_CHECKING:
    from medusa_cli.decode.answer import Step
    from medusa_cli.decode.sequence import Sequence

ROOT = Tree.root_only()
# A node below this chance is not worth a row of any tree.
MIN_CHANCE = 0.05
# A match in a corpus below this chance is no likelier than what a drafter has learnt from such texts.
MIN_CORPUS_CHANCE = 0.5
# Assumed chance of a head's first guess where no calibration exists.
UNCALIBRATED = 0.3


@dataclass
class DraftState:
    """Holds what a policy knows of one sequence: its acceptance, and the sources of its n-gram matches.

    speculative: False for a sequence that drafts nothing.
    """

    acceptance: AcceptanceEstimate | None = None
    ngrams: tuple[NgramSource, ...] = ()
    speculative: bool = True


# What one sequence drafts: a tree for the drafter, and paths of tokens that n-gram matches add from the root.
Proposal = tuple[Tree | DynamicTree, list[tuple[int, ...]]]


class DraftPolicy(ABC):
    """Decides what each sequence drafts. Several sequences share one policy; each has a DraftState of its own.

    ngrams: n-gram matches of the text (prompt lookup) and of the `corpora` are drafted, too. The trust in a match
    depends on its source and its length and is learnt, as in SAM Decoding (arXiv:2411.10666). Tokens that a grammar
    forces are drafted in the place of all.
    """

    max_depth: int
    size: int
    trees: str  # the trees in words

    def __init__(self, ngrams: bool = False) -> None:
        self.ngrams = ngrams
        self.corpora: list[Corpus] = []
        self._trust: dict[tuple[str, int], NgramTrust] = {}  # by kind of sampling and number of the source

    @property
    def description(self) -> str:
        if not self.ngrams:
            return self.trees
        tokens = sum(map(len, self.corpora))
        matched = f"n-grams of the text and of a corpus of {tokens:,} tokens" if tokens else "n-grams of the text"
        return f"{self.trees}, and {matched}" if self.max_depth else matched

    def begin(self, sampling: Sampling) -> DraftState:
        """Returns the state of a sequence that begins."""
        if not self.ngrams:
            return DraftState()
        kind, _ = sampling_kind(sampling)
        text = NgramIndex(self._trust.setdefault((kind, 0), ngram_trust()))
        earlier = []
        for number, corpus in enumerate(self.corpora, 1):
            shared = self._trust.setdefault((kind, number), ngram_trust(priors=CorpusMatches.priors))
            earlier.append(CorpusMatches(corpus, shared, MIN_CORPUS_CHANCE if self.max_depth else 0.0))
        return DraftState(ngrams=(text, *earlier))

    def next(self, sequences: Several[Sequence]) -> list[Proposal]:
        """Returns what each sequence drafts next."""
        speculative = [sequence for sequence in sequences if sequence.draft.speculative]
        if len(speculative) < len(sequences):
            drafts = iter(self.next(speculative) if speculative else ())
            return [next(drafts) if sequence.draft.speculative else (ROOT, []) for sequence in sequences]
        matches = [
            likeliest(match for source in of.draft.ngrams for match in source.find(of.tokens, of.root))
            for of in sequences
        ]
        proposals = self.propose(sequences, matches)
        for i, sequence in enumerate(sequences):
            processors = sequence.sampler.processors
            # Plain decoding drafts nothing.
            if processors is not None and (self.max_depth or self.ngrams) and (forced := processors.forced()):
                proposals[i] = ROOT, [tuple(forced)]
        return proposals

    @abstractmethod
    def propose(self, sequences: Several[Sequence], matches: Several[Several[NgramMatch]]) -> list[Proposal]:
        """Returns each sequence's next draft, to which its matches may add."""

    def record(self, sequences: Several[Sequence], steps: Several[Step]) -> None:
        """Learns from the step that each sequence has just made."""
        for sequence, step in zip(sequences, steps, strict=True):
            for source in sequence.draft.ngrams:
                source.learn(step.tokens)

    def fork(self) -> DraftPolicy:
        """Returns this policy for another decoder; what it learnt of kinds and of step times is shared."""
        return self


class StaticTreePolicy(DraftPolicy):
    """Drafts one static tree in every step; matches replace its least likely nodes."""

    def __init__(self, tree: Tree, accuracies: Accuracies = (), ngrams: bool = False) -> None:
        super().__init__(ngrams)
        self.tree = tree
        self.size = tree.size
        self.max_depth = tree.max_depth
        self.trees = f"tree of {tree.size} nodes"
        assumed = [[UNCALIBRATED / (1 + rank) for rank in range(width)] for width in tree.widths]
        self._chances = node_values(tree, accuracies or assumed)
        self._likeliest: dict[int, Tree] = {}  # by size

    def propose(self, sequences: Several[Sequence], matches: Several[Several[NgramMatch]]) -> list[Proposal]:
        return [self._replace_nodes(of_sequence) if of_sequence else (self.tree, []) for of_sequence in matches]

    def _replace_nodes(self, matches: Several[NgramMatch]) -> Proposal:
        """Gives nodes of the tree to matched tokens that are likelier."""
        ascending = sorted(self._chances[1:])
        counts = [0] * len(matches)
        taken = 0
        while taken < len(ascending):
            chance, best = max((match.chance ** (counts[i] + 1), i) for i, match in enumerate(matches))
            if chance <= max(ascending[taken], MIN_CHANCE) or counts[best] == MAX_TOKENS:
                break
            counts[best] += 1
            taken += 1
        if taken not in self._likeliest:  # a parent is as likely as its children and comes before them
            order = sorted(range(1, self.size), key=lambda node: (-self._chances[node], node))
            nodes = [0, *sorted(order[: self.size - taken - 1])]
            self._likeliest[taken] = Tree.select(self.tree.parents, self.tree.ranks, nodes)
        return self._likeliest[taken], _prefixes(matches, counts)


class DynamicTreePolicy(DraftPolicy):
    """Lets the drafter grow a tree of its likeliest guesses in every step; matches take at most half of the budget."""

    def __init__(self, tree: DynamicTree, ngrams: bool = False) -> None:
        super().__init__(ngrams)
        self.tree = tree
        self.size = tree.budget
        self.max_depth = tree.max_depth
        self.trees = f"dynamic trees of at most {tree.budget} nodes"

    def propose(self, sequences: Several[Sequence], matches: Several[Several[NgramMatch]]) -> list[Proposal]:
        return [self._share_budget(of_sequence) if of_sequence else (self.tree, []) for of_sequence in matches]

    def _share_budget(self, matches: Several[NgramMatch]) -> Proposal:
        threshold = max(2 * MIN_CHANCE, self.tree.min_chance)
        left = self.tree.budget // 2
        counts = []
        for match in matches:
            likely = sum(match.chance**level >= threshold for level in range(1, MAX_TOKENS + 1))
            counts.append(min(left, likely))
            left -= counts[-1]
        return replace(self.tree, budget=self.tree.budget - sum(counts)), _prefixes(matches, counts)


def _prefixes(matches: Several[NgramMatch], counts: Several[int]) -> list[tuple[int, ...]]:
    return [match.tokens[:count] for match, count in zip(matches, counts, strict=True) if count]


def policy_of(tree: Tree | DynamicTree) -> DraftPolicy:
    """Returns the policy that drafts one tree."""
    return StaticTreePolicy(tree) if isinstance(tree, Tree) else DynamicTreePolicy(tree)


# Another tree must promise this factor more before the policy changes, and any tree this factor more than plain.
MARGIN, MIN_GAIN = 1.03, 1.02
# A step slower than this factor of its expected time is an outlier, unless the next one is slow, too.
OUTLIER_RATIO = 1.5
# Plain steps between two trials of a tree, at first and at most; steps of a trial without accepted tokens.
RETRY_STEPS, MAX_RETRY_STEPS, TRIAL_STEPS = 12, 96, 2
# Share of the time of plain steps that a trial may add to them.
MAX_TRIAL_COST = 0.02
# Weight of a prior, in expected draft tokens; decay of older steps in a sequence, and over all sequences of a kind.
PRIOR, SEQUENCE_DECAY, KIND_DECAY = 2.0, 0.98, 0.995
# Above this temperature the acceptance prior stays the same.
MAX_TEMPERATURE = 100.0
# Rate at which step times correct the measured ones, the largest correction of one step, and the rate at which the
# corrections of other trees follow.
EMA_RATE, MAX_RATIO, FOLLOW_RATE = 0.1, 3.0, 0.02
# Numbers of matched tokens that are weighed.
MATCH_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


class AdaptivePolicy(DraftPolicy):
    """Chooses the tree size that gives the most tokens a second, down to plain decoding.

    Tracks one ratio per sequence: accepted / expected draft tokens. A tree then gives 1 + ratio * (expected - 1)
    tokens a step. Step time is measured per (tree, batch size) and corrected by the steps. All sequences of a pass
    draft the same tree. A new sequence starts from the estimate of its kind of sampling.
    """

    def __init__(
        self, trees: Several[SizedTree], step_times: StepTimes, ngrams: bool = False, max_nodes: int | None = None
    ) -> None:
        """Takes trees of all sizes; max_nodes: of a tree with the matched tokens beside it, if any tree is so small."""
        super().__init__(ngrams)
        self._max_nodes = math.inf if max_nodes is None else max_nodes
        fitting = [sized for sized in trees if sized.tree.size <= self._max_nodes] or trees
        self._trees = [SizedTree(ROOT, 1.0), *(sized for sized in fitting if sized.tree.size > 1)]
        self._index = {sized.tree.size: i for i, sized in enumerate(self._trees)}
        self._expected = np.array([sized.expected for sized in self._trees])
        self._measured = cache(step_times.step)  # seconds by nodes, depth and batch
        self._times = cache(self._times_of)
        self._kinds: dict[str, AcceptanceEstimate] = {}
        self.max_depth = max(sized.tree.max_depth for sized in self._trees)
        self._reset()
        self.trees = "drafts where they pay" if self.max_depth else "plain decoding"
        if self._current:
            self.trees = f"trees of a size that pays, {self.size} nodes to begin with"

    def _times_of(self, batch: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """Returns the measured seconds of a step over each tree, their corrections, and which trees were timed."""
        measured = [self._measured(sized.tree.size, sized.tree.max_depth, batch) for sized in self._trees]
        return np.array(measured), np.ones(len(measured)), np.zeros(len(measured), bool)

    def _reset(self) -> None:
        self._sequences = [AcceptanceEstimate(1.0, PRIOR, SEQUENCE_DECAY)]
        self._plain_steps = 0
        self._retry_after = RETRY_STEPS
        self._trial_left = 0
        self._outlier = False
        self._current, _ = self._best()  # an index of `_trees`

    def fork(self) -> AdaptivePolicy:
        other = copy.copy(self)
        other._reset()
        return other

    @property
    def size(self) -> int:  # type: ignore[override]
        """Returns the nodes of the current tree."""
        return self._trees[self._current].tree.size

    @property
    def acceptance(self) -> float:
        """Returns the mean ratio of accepted to expected tokens of the running sequences."""
        return sum(sequence.ratio for sequence in self._sequences) / len(self._sequences)

    def begin(self, sampling: Sampling) -> DraftState:
        """Returns a new sequence's state; trials come as often as at first, however rare they had become.

        Plain steps count on: answers may be shorter than the steps between two trials.
        """
        state = super().begin(sampling)
        (kind, prior) = sampling_kind(sampling)
        self._retry_after = RETRY_STEPS
        shared = self._kinds.setdefault(kind, AcceptanceEstimate(prior, PRIOR, KIND_DECAY))
        state.acceptance = AcceptanceEstimate(shared.ratio, PRIOR, SEQUENCE_DECAY, shared)
        return state

    def propose(self, sequences: Several[Sequence], matches: Several[Several[NgramMatch]]) -> list[Proposal]:
        acceptances = [sequence.draft.acceptance for sequence in sequences if sequence.draft.acceptance]
        if acceptances and acceptances != self._sequences:
            self._sequences = acceptances
            best, _ = self._best()
            if best or not self._trial_left:  # else the trial goes on: sequences may come and go with every step
                self._current = best
                self._trial_left = 0
        # A match of a single token is no likelier than the drafter's own guess.
        chances = [first[0].chance if first and first[0].length >= PAIR else 0.0 for first in matches]
        if not any(chances):
            return [(self._trees[self._current].tree, [])] * len(sequences)
        return [
            (tree, [of_sequence[0].tokens[:count]] if count else [])
            for (tree, count), of_sequence in zip(self.weigh_matches(chances), matches, strict=True)
        ]

    def weigh_matches(self, chances: Several[float]) -> list[tuple[Tree, int]]:
        """Returns each sequence's tree and how many matched tokens it drafts beside it.

        chances: that a matched token is right if those before it are; 0 without a match. The widest draft sets the
        time of the pass, and the drafter runs for all sequences or for none: sizes are chosen for all together.
        """
        current = self._trees[self._current]
        plain = self._trees[0]
        ratio = self.acceptance
        batch = len(chances)
        measured, corrections, _ = self._times(batch)
        correction = corrections[self._current]
        seconds = (measured * corrections)[self._current]
        best_rate = MARGIN * batch * (1 + ratio * (current.expected - 1)) / seconds
        choice = [(current.tree, 0)] * batch
        for options in [(plain,), (current, plain)] if current is not plain else [(plain,)]:
            widths = {sized.tree.size + count for sized in options for count in MATCH_LENGTHS}
            for rows in sorted(width for width in widths if options[0].tree.size <= width <= self._max_nodes):
                drafts = [best_in_rows(options, ratio, chance, rows) for chance in chances]
                seconds = correction * self._measured(rows, options[0].tree.max_depth, batch)
                rate = sum(tokens for tokens, _, _ in drafts) / seconds
                if rate > best_rate:
                    best_rate = rate
                    choice = [(sized.tree, count) for _, sized, count in drafts]
        return choice

    def record(self, sequences: Several[Sequence], steps: Several[Step]) -> None:
        """Learns acceptance and step time, and decides on the next tree.

        Steps with matched tokens teach nothing of the drafter, nor do trees cut at the end of the context.
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
            self._correct_time(tree, sum(step.draft_s + step.verify_s for step in steps), batch)
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
        if not tree:  # FIRP had no extra rows yet in the trial's first step
            return
        self._trial_left -= not accepted
        best, rates = self._best()
        if self._trial_left and rates[tree] < MIN_GAIN * rates[0]:
            return
        self._trial_left = 0
        self._current = best
        self._retry_after = RETRY_STEPS if best else min(2 * self._retry_after, MAX_RETRY_STEPS)

    def _count_plain_step(self) -> None:
        """Counts plain steps; tries the cheapest tree after `_retry_after` of them, and enough to pay for the trial."""
        self._plain_steps += 1
        if self._plain_steps < self._retry_after or len(self._trees) == 1:
            return
        measured, corrections, _ = self._times(len(self._sequences))
        seconds = measured * corrections
        cheapest = 1 + int(seconds[1:].argmin())
        trial_cost = TRIAL_STEPS * (seconds[cheapest] / seconds[0] - 1)  # in plain steps
        if trial_cost > MAX_TRIAL_COST * self._plain_steps:
            return
        self._plain_steps = 0
        self._trial_left = TRIAL_STEPS
        self._current = cheapest
        for sequence in self._sequences:
            sequence.weight = min(sequence.weight, PRIOR)  # what was observed weighs less

    def _correct_time(self, tree: int, seconds: float, batch: int) -> None:
        """Updates the time of steps over a tree. Trees not yet timed take the smallest correction seen."""
        measured, corrections, timed = self._times(batch)
        ratio = min(seconds / measured[tree], MAX_RATIO)
        known = corrections[tree] if timed[tree] else 1.0
        previous = self._outlier
        self._outlier = ratio > OUTLIER_RATIO * known
        if self._outlier and not previous:
            return
        corrections[tree] = new = (1 - EMA_RATE) * known + EMA_RATE * ratio if timed[tree] else ratio
        timed[tree] = True
        corrections += FOLLOW_RATE * (new - corrections)  # a machine's speed changes for all trees
        corrections[~timed] = corrections[timed].min()
        if not timed[0]:
            corrections[0] = min(corrections[0], 1.0)

    def _best(self) -> tuple[int, NDArray[np.float64]]:
        """Returns the tree with the most tokens a second, the root alone if none pays, and those of each tree."""
        measured, corrections, _ = self._times(len(self._sequences))
        rates = (1 + self.acceptance * (self._expected - 1)) / (measured * corrections)
        best = int(rates.argmax())
        return best if rates[best] > MIN_GAIN * rates[0] else 0, rates


def best_in_rows(
    options: Several[SizedTree], acceptance: float, chance: float, rows: int
) -> tuple[float, SizedTree, int]:
    """Returns the most tokens to be expected in so many rows, the tree that gives them, and its matched tokens.

    The drafter's guesses count where the first matched token fails. acceptance: its ratio.
    """
    drafts = []
    for sized in options:
        count = min(rows - sized.tree.size, MAX_TOKENS) if chance else 0
        matched = chance * (1 - chance**count) / (1 - chance)
        failed = 1 - chance if count else 1.0
        drafts.append((1 + matched + failed * acceptance * (sized.expected - 1), sized, count))
    return max(drafts, key=itemgetter(0))


def sampling_kind(sampling: Sampling) -> tuple[str, float]:
    """Returns a kind of sampling with similar acceptance, and the acceptance ratio to assume where nothing is known.

    Expectations come from greedy calibration. The hotter the sampling, the fewer drafts are accepted; top-p and top-k
    soften that.
    """
    if sampling.greedy:
        return "greedy", 1.0
    temperature = min(sampling.temperature, MAX_TEMPERATURE)
    rounded = round(4 * temperature) / 4
    if sampling.mode == "typical":
        return f"typical {rounded:g}", 1.0
    truncated = bool(cuts(sampling.top_p, sampling.top_k, sampling.min_p))
    prior = 1 / (1 + temperature) if truncated else 1 / (1 + temperature**3)
    return f"exact {rounded:g}{' truncated' if truncated else ''}", prior
