"""Draft policies, which choose the tree and n-gram matches that each sequence drafts in its next step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from medusa_cli.decode.answer import Step
from medusa_cli.decode.ngram import (
    MAX_TOKENS,
    NgramIndex,
    NgramMatch,
    NgramTrust,
    add_paths,
    ngram_trust,
)
from medusa_cli.decode.sampling_options import Sampling, sampling_kind
from medusa_cli.decode.sequence import DraftState, Sequence
from medusa_cli.engine import Engine
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.search import Accuracies, node_values

ROOT = Tree.root_only()
# The maximum number of a grammar's forced tokens in one pass, as memory grows with the number of
# rows.
MAX_FORCED = 64
# A node with a lower probability of acceptance is not worth a row in any tree.
MIN_CHANCE = 0.05
# The probability that a head's first guess is right, assumed if there is no calibration.
UNCALIBRATED = 0.3


# What one sequence drafts: a tree for the drafter, and token paths from n-gram matches. The paths
# start below the root.
Proposal = tuple[Tree | DynamicTree, list[tuple[int, ...]]]


class DraftPolicy(ABC):
    """Chooses what each sequence drafts. Several sequences share one policy.

    Each sequence has its own DraftState. ngrams: also draft n-gram matches from the text (prompt
    lookup). The trust in a match is learned per match length, as in SAM Decoding (arXiv:2411.10666).
    If a grammar forces the next tokens, only the forced tokens are drafted.
    """

    max_depth: int
    size: int
    trees: str  # a readable description of the trees

    def __init__(self, ngrams: bool = False) -> None:
        self.ngrams = ngrams
        self._trust: dict[str, NgramTrust] = {}  # by kind of sampling

    @property
    def description(self) -> str:
        if not self.ngrams:
            return self.trees
        matched = "n-grams of the text"
        return f"{self.trees}, and {matched}" if self.max_depth else matched

    def begin(self, sampling: Sampling) -> DraftState:
        """Returns the state of a new sequence."""
        if not self.ngrams:
            return DraftState()
        kind, _ = sampling_kind(sampling)
        shared = self._trust.setdefault(kind, ngram_trust())
        return DraftState(ngrams=NgramIndex(shared))

    def next(self, sequences: list[Sequence]) -> list[Proposal]:
        """Returns the next proposal of each sequence.

        Sequences that draft nothing get the root without matches.
        """
        speculative = [sequence for sequence in sequences if sequence.draft.speculative]
        if len(speculative) == len(sequences):
            return self._next(sequences)
        drafts = iter(self._next(speculative) if speculative else ())
        return [
            next(drafts) if sequence.draft.speculative else (ROOT, []) for sequence in sequences
        ]

    def _next(self, sequences: list[Sequence]) -> list[Proposal]:
        matches = [_matches_of(sequence) for sequence in sequences]
        proposals = self.propose(sequences, matches)
        # Plain decoding drafts nothing, not even forced tokens.
        if not (self.max_depth or self.ngrams):
            return proposals
        for i, sequence in enumerate(sequences):
            processors = sequence.sampler.processors
            forced = None if processors is None else processors.forced()
            if forced:
                # The rest of the forced tokens follows in the next step.
                count = min(MAX_FORCED, sequences[i].stop.left)
                proposals[i] = ROOT, [tuple(forced[:count])]
        return proposals

    def reads_states(self, batch: int) -> bool:
        """Returns True if the drafter may draft for a batch of this size, so that it needs the states of steps."""
        return self.max_depth > 0

    @abstractmethod
    def propose(self, sequences: list[Sequence], matches: list[list[NgramMatch]]) -> list[Proposal]:
        """Returns each sequence's tree, and the paths of matched tokens to add to it."""

    def record(self, sequences: list[Sequence], steps: list[Step]) -> None:
        """Learns from the step that each sequence has just taken."""
        for sequence, step in zip(sequences, steps, strict=True):
            if sequence.draft.ngrams is not None:
                sequence.draft.ngrams.learn(step.tokens)

    def fork(self) -> DraftPolicy:
        """Returns the policy for another decoder, by default this policy itself."""
        return self


class StaticTreePolicy(DraftPolicy):
    """Drafts one static tree in every step; n-gram matches replace its least likely nodes."""

    def __init__(self, tree: Tree, accuracies: Accuracies = (), ngrams: bool = False) -> None:
        super().__init__(ngrams)
        self.tree = tree
        self.size = tree.size
        self.max_depth = tree.max_depth
        self.trees = f"tree of {tree.size} nodes"
        assumed = [[UNCALIBRATED / (1 + rank) for rank in range(width)] for width in tree.widths]
        self._chances = node_values(tree, accuracies or assumed)
        self._likeliest: dict[int, Tree] = {}  # by the number of replaced nodes

    def propose(self, sequences: list[Sequence], matches: list[list[NgramMatch]]) -> list[Proposal]:
        return [self._replace_nodes(found) if found else (self.tree, []) for found in matches]

    def _replace_nodes(self, matches: list[NgramMatch]) -> Proposal:
        """Replaces the least likely nodes of the tree with matched tokens that are more likely."""
        ascending = sorted(self._chances[1:])
        counts = [0] * len(matches)
        taken = 0
        while taken < len(ascending):
            chance, best = max(
                (match.chance ** (counts[i] + 1), i) for i, match in enumerate(matches)
            )
            if chance <= max(ascending[taken], MIN_CHANCE) or counts[best] == MAX_TOKENS:
                break
            counts[best] += 1
            taken += 1
        if taken not in self._likeliest:
            # A parent is at least as likely as its children, so this order puts parents first.
            order = sorted(range(1, self.size), key=lambda node: (-self._chances[node], node))
            nodes = [0, *sorted(order[: self.size - taken - 1])]
            self._likeliest[taken] = Tree.select(self.tree.parents, self.tree.ranks, nodes)
        return self._likeliest[taken], _prefixes(matches, counts)


class DynamicTreePolicy(DraftPolicy):
    """Lets the drafter grow a tree of its most likely guesses in every step.

    N-gram matches take at most half of the budget.
    """

    def __init__(self, tree: DynamicTree, ngrams: bool = False) -> None:
        super().__init__(ngrams)
        self.tree = tree
        self.size = tree.budget
        self.max_depth = tree.max_depth
        self.trees = f"dynamic trees of at most {tree.budget} nodes"

    def propose(self, sequences: list[Sequence], matches: list[list[NgramMatch]]) -> list[Proposal]:
        return [self._share_budget(found) if found else (self.tree, []) for found in matches]

    def _share_budget(self, matches: list[NgramMatch]) -> Proposal:
        threshold = 2 * MIN_CHANCE
        left = self.tree.budget // 2
        counts = []
        for match in matches:
            tokens = sum(match.chance**level >= threshold for level in range(1, MAX_TOKENS + 1))
            counts.append(min(left, tokens))
            left -= counts[-1]
        return replace(self.tree, budget=self.tree.budget - sum(counts)), _prefixes(matches, counts)


def _matches_of(sequence: Sequence) -> list[NgramMatch]:
    index = sequence.draft.ngrams
    return [] if index is None else index.find(sequence.tokens, sequence.root)


def _prefixes(matches: list[NgramMatch], counts: list[int]) -> list[tuple[int, ...]]:
    return [match.tokens[:count] for match, count in zip(matches, counts, strict=True) if count]


def complete(
    engine: Engine, sequences: list[Sequence], proposals: list[Proposal], drafts: list[Draft]
) -> list[Draft]:
    """Adds n-gram paths to each draft, and truncates the draft to the number of nodes that a pass supports."""
    completed = []
    for sequence, (_, paths), draft in zip(sequences, proposals, drafts, strict=True):
        if paths:
            draft = add_paths(draft, paths)
        nodes = engine.tree_rows(len(sequence.tokens))
        completed.append(draft.first(nodes) if draft.tree.size > nodes else draft)
    return completed


def policy_of(tree: Tree | DynamicTree) -> DraftPolicy:
    """Returns the policy that drafts this tree."""
    return StaticTreePolicy(tree) if isinstance(tree, Tree) else DynamicTreePolicy(tree)
