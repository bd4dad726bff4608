"""Draft policies decide what each sequence drafts in its next step: a tree, and n-gram matches beside its nodes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from medusa_cli.decode.estimates import PRIOR, AcceptanceEstimate, AcceptancePriors, SequenceAcceptance, sampling_kind
from medusa_cli.decode.ngram import MAX_TOKENS, PAIR, NgramIndex, NgramMatch, NgramTrust
from medusa_cli.decode.sampling import Sampling
from medusa_cli.tree import DynamicTree, Tree
from medusa_cli.tree.search import Accuracies, Costs, node_values

if TYPE_CHECKING:
    from medusa_cli.decode.sequence import Sequence
    from medusa_cli.decode.stats import Step

# A node below this chance is not worth a row of any tree.
MIN_CHANCE = 0.05
# Assumed chance of a head's first guess where no calibration exists.
UNCALIBRATED = 0.3


@dataclass
class DraftState:
    """Holds what a policy knows of one sequence: its acceptance, and the n-gram index of its text."""

    acceptance: SequenceAcceptance | None = None
    ngrams: NgramIndex | None = None


# What one sequence drafts: a tree for the drafter, and paths of tokens that n-gram matches add from the root.
DraftPlan = tuple[Tree | DynamicTree, list[tuple[int, ...]]]


class DraftPolicy(ABC):
    """Decides what each sequence drafts. Several sequences share one policy; each has a DraftState of its own."""

    max_depth: int
    size: int
    # CUDA graphs replay a few fixed trees.
    fixed_trees = True
    description: str

    @property
    def drafts(self) -> bool:
        """Returns False for plain decoding."""
        return self.max_depth > 0

    def begin(self, sampling: Sampling) -> DraftState:
        """Returns the state of a sequence that begins."""
        return DraftState()

    @abstractmethod
    def next(
        self, sequences: Several[Sequence], matches: Several[Several[NgramMatch]] | None = None
    ) -> list[DraftPlan]:
        """Returns each sequence's next draft; `matches` are n-gram matches that may take nodes of it."""

    def record(self, sequences: Several[Sequence], steps: Several[Step]) -> None:  # noqa: B027
        """Learns from the step that each sequence has just made."""

    def fork(self) -> DraftPolicy:
        """Returns this policy for another decoder; what it learnt of kinds and of step times is shared."""
        return self

    def without_ngrams(self) -> DraftPolicy:
        return self


class StaticTreePolicy(DraftPolicy):
    """Drafts one static tree in every step; matches replace its least likely nodes."""

    def __init__(self, tree: Tree, accuracies: Accuracies = ()) -> None:
        self.tree, self.size, self.max_depth = tree, tree.size, tree.max_depth
        self.description = f"tree of {tree.size} nodes"
        self._accuracies = accuracies
        self._chances: list[float] | None = None
        self._pruned: dict[int, Tree] = {}

    def next(
        self, sequences: Several[Sequence], matches: Several[Several[NgramMatch]] | None = None
    ) -> list[DraftPlan]:
        if matches is None:
            return [(self.tree, []) for _ in sequences]
        return [self._replace_nodes(of_sequence) for of_sequence in matches]

    def _replace_nodes(self, matches: Several[NgramMatch]) -> DraftPlan:
        """Gives nodes of the tree to matched tokens that are likelier."""
        if not matches:
            return self.tree, []
        if self._chances is None:
            self._chances = _node_chances(self.tree, self._accuracies)
        ascending, counts, taken = sorted(self._chances), [0] * len(matches), 0
        while taken < len(ascending):
            chance, best = max((match.chance ** (counts[i] + 1), i) for i, match in enumerate(matches))
            if chance <= max(ascending[taken], MIN_CHANCE) or counts[best] == MAX_TOKENS:
                break
            counts[best] += 1
            taken += 1
        if taken not in self._pruned:
            self._pruned[taken] = _pruned(self.tree, self._chances, self.size - taken)
        return self._pruned[taken], _prefixes(matches, counts)


class DynamicTreePolicy(DraftPolicy):
    """Lets the drafter grow a tree of its likeliest guesses in every step; matches take at most half of the budget."""

    fixed_trees = False

    def __init__(self, tree: DynamicTree) -> None:
        self.tree, self.size, self.max_depth = tree, tree.size, tree.max_depth
        self.description = f"dynamic trees of at most {tree.size} nodes"

    def next(
        self, sequences: Several[Sequence], matches: Several[Several[NgramMatch]] | None = None
    ) -> list[DraftPlan]:
        if matches is None:
            return [(self.tree, []) for _ in sequences]
        return [self._share_budget(of_sequence) for of_sequence in matches]

    def _share_budget(self, matches: Several[NgramMatch]) -> DraftPlan:
        threshold, left, counts = max(2 * MIN_CHANCE, self.tree.min_chance), self.tree.budget // 2, []
        for match in matches:
            likely = sum(match.chance**level >= threshold for level in range(1, MAX_TOKENS + 1))
            counts.append(min(left, likely))
            left -= counts[-1]
        return replace(self.tree, budget=self.tree.budget - sum(counts)), _prefixes(matches, counts)


# Another tree must promise this factor more before the policy changes, and any tree this factor more than plain.
MARGIN, MIN_GAIN = 1.03, 1.02
# A step slower than this factor of its expected time is an outlier, unless the next one is slow, too.
OUTLIER_RATIO = 1.5
# Plain steps between two trials of a tree, at first and at most; steps of a trial without accepted tokens.
RETRY_STEPS, MAX_RETRY_STEPS, TRIAL_STEPS = 12, 96, 2
# Rate at which step times correct the measured ones, the largest correction of one step, and the rate at which the
# corrections of other trees follow.
EMA_RATE, MAX_RATIO, FOLLOW_RATE = 0.1, 3.0, 0.02
# Numbers of matched tokens that are weighed.
MATCH_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True)
class SizedTree:
    """Holds a tree and the tokens a step that calibration expects of it."""

    tree: Tree
    expected: float


class AdaptivePolicy(DraftPolicy):
    """Chooses the tree size that gives the most tokens a second, down to plain decoding.

    Tracks one ratio per sequence: accepted / expected draft tokens. A tree then gives 1 + ratio * (expected - 1)
    tokens a step. Step time is measured per (tree, batch size) and corrected by the steps. All sequences of a pass
    draft the same tree.
    """

    def __init__(self, trees: Several[SizedTree], costs: Costs, priors: AcceptancePriors | None = None) -> None:
        self._trees = [SizedTree(Tree.root_only(), 1.0), *(sized for sized in trees if sized.tree.size > 1)]
        self._costs = costs
        self._priors = priors or AcceptancePriors()
        self._seconds: dict[tuple[int, int, int], float] = {}  # measured, by (nodes, depth, batch)
        self._correction: dict[tuple[int, int], float] = {}  # observed / measured, by (nodes, batch)
        self._smallest: dict[int, float] = {}  # the least correction, by batch
        self.max_depth = max(sized.tree.max_depth for sized in self._trees)
        self.max_size = max(sized.tree.size for sized in self._trees)
        self._reset()

    def _reset(self) -> None:
        self._sequences: tuple[AcceptanceEstimate, ...] = (AcceptanceEstimate(PRIOR, PRIOR),)
        self._plain_steps, self._retry_after, self._trial_left = 0, RETRY_STEPS, 0
        self._outlier = False
        self._current = self._best()

    def fork(self) -> AdaptivePolicy:
        other = copy.copy(self)
        other._reset()
        return other

    @property
    def size(self) -> int:  # type: ignore[override]
        """Returns the nodes of the current tree."""
        return self._current.tree.size

    @property
    def description(self) -> str:  # type: ignore[override]
        if not self.max_depth:
            return "plain decoding"
        return (
            f"trees of a size that pays, {self.size} nodes to begin with" if self.size > 1 else "drafts where they pay"
        )

    @property
    def acceptance(self) -> float:
        """Returns the mean ratio of accepted to expected tokens of the running sequences."""
        return sum(sequence.ratio for sequence in self._sequences) / len(self._sequences)

    def begin(self, sampling: Sampling) -> DraftState:
        """Returns a new sequence's state; trials start over, however rare they had become."""
        self._plain_steps, self._retry_after = 0, RETRY_STEPS
        return DraftState(self._priors.begin(sampling))

    def next(
        self, sequences: Several[Sequence], matches: Several[Several[NgramMatch]] | None = None
    ) -> list[DraftPlan]:
        tree = self.choose([sequence.draft.acceptance for sequence in sequences if sequence.draft.acceptance])
        if matches is None:
            return [(tree, []) for _ in sequences]
        # A match of a single token is no likelier than the drafter's own guess.
        chances = [first[0].chance if first and first[0].length >= PAIR else 0.0 for first in matches]
        if not any(chances):
            return [(tree, []) for _ in sequences]
        return [
            (tree, [of_sequence[0].tokens[:count]] if count else [])
            for (tree, count), of_sequence in zip(self.weigh_matches(chances), matches, strict=True)
        ]

    def choose(self, acceptances: Several[SequenceAcceptance]) -> Tree:
        """Returns the next step's tree for these sequences."""
        if acceptances and [*map(id, acceptances)] != [*map(id, self._sequences)]:
            self._sequences, self._trial_left = tuple(acceptances), 0
            self._current = self._best()
        return self._current.tree

    def weigh_matches(self, chances: Several[float], limit: int = MAX_TOKENS) -> list[tuple[Tree, int]]:
        """Returns each sequence's tree and how many matched tokens it drafts beside it, at most `limit`.

        chances: that a matched token is right if those before it are; 0 without a match. The widest draft sets the
        time of the pass, and the drafter runs for all sequences or for none: sizes are chosen for all together.
        """
        current, plain, batch = self._current, self._trees[0], len(chances)
        correction = self._step_seconds(current) / self._measured(current.tree.size, current.tree.max_depth, batch)
        best_rate = MARGIN * batch * self._rate(current)
        choice = [(current.tree, 0)] * batch
        for options in [(plain,), (current, plain)] if current is not plain else [(plain,)]:
            widths = {sized.tree.size + count for sized in options for count in MATCH_LENGTHS if count <= limit}
            for rows in sorted(width for width in widths if width >= options[0].tree.size):
                drafts = [self._best_in_rows(options, chance, rows, limit) for chance in chances]
                seconds = correction * self._measured(rows, options[0].tree.max_depth, batch)
                rate = sum(tokens for tokens, _, _ in drafts) / seconds
                if rate > best_rate:
                    best_rate, choice = rate, [(sized.tree, count) for _, sized, count in drafts]
        return choice

    def _best_in_rows(
        self, options: Several[SizedTree], chance: float, rows: int, limit: int
    ) -> tuple[float, SizedTree, int]:
        """Returns the most tokens to be expected in so many rows, the tree that gives them, and its matched tokens.

        The drafter's guesses count where the first matched token fails.
        """
        drafts = []
        for sized in options:
            count = min(rows - sized.tree.size, limit) if chance else 0
            matched = chance * (1 - chance**count) / (1 - chance)
            failed = 1 - chance if count else 1.0
            drafts.append((1 + matched + failed * self.acceptance * (sized.expected - 1), sized, count))
        return max(drafts, key=lambda draft: draft[0])

    def record(self, sequences: Several[Sequence], steps: Several[Step]) -> None:
        """Learns acceptance and step time, and decides on the next tree.

        Steps with matched tokens teach nothing of the drafter, nor do trees cut at the end of the context.
        """
        drafted = [
            (step, sequence.draft.acceptance)
            for sequence, step in zip(sequences, steps, strict=True)
            if not step.looked_up and sequence.draft.acceptance
        ]
        if not drafted:
            return
        nodes, batch = drafted[0][0].nodes, len(steps)
        sized = next((sized for sized in self._trees if sized.tree.size == nodes), None)
        if sized is None or any(step.nodes != nodes for step, _ in drafted):
            return
        if len(drafted) == batch:
            self._correct_time(sized, sum(step.draft_s + step.verify_s for step in steps), batch)
        accepted = 0
        if nodes > 1:
            for step, acceptance in drafted:
                self._priors.update(acceptance, sized.expected - 1, len(step.path) - 1)
                accepted += len(step.path) - 1
        if self._trial_left:
            self._continue_trial(sized, accepted)
        elif self.size == 1:
            self._count_plain_step()
        else:
            best = self._best()
            if best is self._trees[0] or self._rate(best) > MARGIN * self._rate(self._current):
                self._current, self._plain_steps, self._retry_after = best, 0, RETRY_STEPS

    def _continue_trial(self, sized: SizedTree, accepted: int) -> None:
        if sized.tree.size == 1:  # FIRP chose this step before the trial began
            return
        self._trial_left -= not accepted
        if self._trial_left and self._rate(sized) < MIN_GAIN * self._rate(self._trees[0]):
            return
        self._trial_left, self._current = 0, self._best()
        self._retry_after = RETRY_STEPS if self.size > 1 else min(2 * self._retry_after, MAX_RETRY_STEPS)

    def _count_plain_step(self) -> None:
        """Counts plain steps; after `_retry_after` of them the cheapest tree is tried again."""
        self._plain_steps += 1
        if self._plain_steps >= self._retry_after and len(self._trees) > 1:
            self._plain_steps, self._trial_left = 0, TRIAL_STEPS
            for sequence in self._sequences:
                sequence.shrink_to_prior()
            self._current = min(self._trees[1:], key=self._step_seconds)

    def _correct_time(self, sized: SizedTree, seconds: float, batch: int) -> None:
        """Updates the time of steps over a tree."""
        key = sized.tree.size, batch
        ratio = min(seconds / self._measured(sized.tree.size, sized.tree.max_depth, batch), MAX_RATIO)
        known = self._correction.get(key, 1.0)
        previous, self._outlier = self._outlier, ratio > OUTLIER_RATIO * known
        if self._outlier and not previous:
            return
        new = (1 - EMA_RATE) * known + EMA_RATE * ratio if key in self._correction else ratio
        self._correction[key] = new
        for other in self._correction:  # a machine's speed changes for all trees
            if other[1] == batch:
                self._correction[other] += FOLLOW_RATE * (new - self._correction[other])
        self._smallest[batch] = min(ratio for (_, size), ratio in self._correction.items() if size == batch)

    def _best(self) -> SizedTree:
        plain, *trees = self._trees
        best = max(trees, key=self._rate, default=plain)
        return best if self._rate(best) > MIN_GAIN * self._rate(plain) else plain

    def _rate(self, sized: SizedTree) -> float:
        """Returns the expected tokens a second of one sequence."""
        return (1 + self.acceptance * (sized.expected - 1)) / self._step_seconds(sized)

    def _step_seconds(self, sized: SizedTree) -> float:
        """Returns the corrected seconds of a step. A tree not yet timed takes the smallest correction seen."""
        batch, nodes = len(self._sequences), sized.tree.size
        smallest = self._smallest.get(batch, 1.0)
        unknown = smallest if nodes > 1 else min(smallest, 1.0)
        return self._measured(nodes, sized.tree.max_depth, batch) * self._correction.get((nodes, batch), unknown)

    def _measured(self, nodes: int, depth: int, batch: int) -> float:
        key = nodes, depth, batch
        if key not in self._seconds:
            self._seconds[key] = self._costs.step(*key)
        return self._seconds[key]


class NgramPolicy(DraftPolicy):
    """Adds n-gram matches to what another policy drafts, while the extra nodes are expected to pay.

    Prompt lookup. The trust in a match depends on its length and is learnt, as in SAM Decoding (arXiv:2411.10666).
    """

    fixed_trees = False
    drafts = True

    def __init__(self, over: DraftPolicy) -> None:
        self.over = over
        self._trust: dict[str, NgramTrust] = {}

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.over.size

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        return self.over.max_depth

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"{self.over.description}, and n-grams of the text" if self.over.max_depth else "n-grams of the text"

    def fork(self) -> NgramPolicy:
        other = copy.copy(self)
        other.over = self.over.fork()
        return other

    def without_ngrams(self) -> DraftPolicy:
        return self.over

    def begin(self, sampling: Sampling) -> DraftState:
        state = self.over.begin(sampling)
        state.ngrams = NgramIndex(self._trust_of(sampling))
        return state

    def _trust_of(self, sampling: Sampling) -> NgramTrust:
        return self._trust.setdefault(sampling_kind(sampling)[0], NgramTrust())

    def next(
        self, sequences: Several[Sequence], matches: Several[Several[NgramMatch]] | None = None
    ) -> list[DraftPlan]:
        return self.over.next(
            sequences,
            [
                sequence.draft.ngrams.find(sequence.tokens, sequence.root) if sequence.draft.ngrams else []
                for sequence in sequences
            ],
        )

    def record(self, sequences: Several[Sequence], steps: Several[Step]) -> None:
        for sequence, step in zip(sequences, steps, strict=True):
            if sequence.draft.ngrams is not None:
                accepted = sequence.tokens[len(sequence.tokens) - len(step.path) + 1 :]
                sequence.draft.ngrams.learn([*accepted, sequence.root])
        self.over.record(sequences, steps)


def _prefixes(matches: Several[NgramMatch], counts: Several[int]) -> list[tuple[int, ...]]:
    return [match.tokens[:count] for match, count in zip(matches, counts, strict=True) if count]


def _node_chances(tree: Tree, accuracies: Accuracies) -> list[float]:
    """Returns the chance of each node but the root to be accepted; at most its parent's."""
    if accuracies:
        return node_values(tree, accuracies)[1:]
    chances = [1.0]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        chances.append(chances[parent] * UNCALIBRATED / (1 + rank))
    return chances[1:]


def _pruned(tree: Tree, chances: Several[float], size: int) -> Tree:
    """Returns the likeliest `size` nodes of a tree; a parent never goes before its children."""
    order = sorted(range(1, tree.size), key=lambda node: (-chances[node - 1], node))
    kept = [0, *sorted(order[: size - 1])]
    index = {node: i for i, node in enumerate(kept)}
    parents = tuple(index[tree.parents[node]] if node else -1 for node in kept)
    return Tree(parents, tuple(tree.ranks[node] for node in kept))
