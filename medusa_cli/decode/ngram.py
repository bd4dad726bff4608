"""N-gram lookup, which drafts the tokens that followed earlier occurrences of the last tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from medusa_cli.device import upload
from medusa_cli.tree import Draft, Tree

# Longer matches count as matches of this length.
MAX_LENGTH = 16
# Maximum number of earlier occurrences to compare.
MAX_POSITIONS = 8
# Maximum number of draft tokens per match.
MAX_TOKENS = 16
# Maximum number of matches per step.
MAX_BRANCHES = 3
# PAIR: the length of a match of two tokens. OTHER: stands for the length of every match except the
# longest.
PAIR = 2
OTHER = -1
# Prior probability that a matched token is right, by the minimum length of the match.
PRIOR_BY_LENGTH = {1: 0.3, PAIR: 0.5, 3: 0.6, 4: 0.7, 6: 0.8, 9: 0.9, OTHER: 0.15}
# Weight of a prior, in tokens.
PRIOR = 4.0
# Older evidence loses weight by this factor with each update.
DECAY = 0.97
MAX_CHANCE = 0.98
# The adaptive policy lowers an estimate by this many standard errors, because it would otherwise also
# draft when the estimate is high only by chance.
ERRORS = 0.5


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the common prefix of two texts."""
    pairs = zip(left, right, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@dataclass(eq=False)
class AcceptanceEstimate:
    """Estimates the ratio of accepted to expected draft tokens; older tokens lose weight with each update.

    weight: the number of expected draft tokens on which the ratio is based. shared: the estimate
    over all sequences with the same kind of sampling, which is updated, too.
    """

    ratio: float
    weight: float
    decay: float
    shared: AcceptanceEstimate | None = None

    def update(self, expected: float, accepted: float) -> None:
        estimate: AcceptanceEstimate | None = self
        while estimate is not None:
            known = estimate.decay * estimate.weight
            estimate.ratio = (known * estimate.ratio + accepted) / (known + expected)
            estimate.weight = known + expected
            estimate = estimate.shared

    @property
    def error(self) -> float:
        """Returns the standard error of the ratio, if the ratio is a probability."""
        return math.sqrt(max(0.0, self.ratio * (1 - self.ratio)) / self.weight)


@dataclass(frozen=True)
class NgramMatch:
    """Holds the tokens that follow a match, and the match's length.

    chance: the probability that a token is right if all tokens before it are. doubt: by how much
    `chance` may be too high.
    """

    tokens: tuple[int, ...]
    length: int
    chance: float
    doubt: float = 0.0


# Estimates of how often matched tokens are accepted, by match length.
NgramTrust = dict[int, AcceptanceEstimate]


def ngram_trust(shared: NgramTrust | None = None) -> NgramTrust:
    """Returns the trust at the beginning of a text: the prior or, given `shared`, the mean of prior and `shared`."""
    trust = {}
    for length, prior in PRIOR_BY_LENGTH.items():
        if shared is None:
            trust[length] = AcceptanceEstimate(prior, PRIOR, DECAY)
            continue
        known = shared[length]
        trust[length] = AcceptanceEstimate((known.ratio + prior) / 2, PRIOR, DECAY, known)
    return trust


class NgramIndex:
    """Indexes the tokens of one text, and finds matches for its end.

    The index updates the trust in its matches, both for this text and for all texts (`shared`).
    """

    def __init__(self, shared: NgramTrust) -> None:
        self.trust = ngram_trust(shared)
        self._matches: list[NgramMatch] = []  # of the current step
        self._after: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def find(self, tokens: Sequence[int], root: int) -> list[NgramMatch]:
        """Returns the matches for the end of the text (`tokens`, then `root`), longest match first.

        Each match holds the next MAX_TOKENS tokens. If the text has fewer tokens after the match, these are repeated.
        No two matches begin with the same token.
        """
        for position in range(self._indexed, len(tokens)):
            self._after.setdefault((tokens[position],), []).append(position + 1)
            if position:
                self._after.setdefault((tokens[position - 1], tokens[position]), []).append(
                    position + 1
                )
        self._indexed = max(self._indexed, len(tokens))
        text = [*tokens, root]
        pairs = self._after.get((tokens[-1], root), ())
        single = self._after.get((root,), ())
        starts = (*single[-MAX_POSITIONS:], *pairs[-MAX_POSITIONS:])
        lengths = {start: _match_length(text, start) for start in starts}
        matches: dict[int, NgramMatch] = {}
        for start in sorted(
            lengths, key=lambda position: (lengths[position], position), reverse=True
        ):
            if len(matches) < MAX_BRANCHES and text[start] not in matches:
                period = len(text) - start
                following = tuple(text[start + step % period] for step in range(MAX_TOKENS))
                matches[text[start]] = self._match(following, OTHER if matches else lengths[start])
        self._matches = list(matches.values())
        return self._matches

    def learn(self, accepted: Sequence[int]) -> None:
        """Compares the matches of this step, drafted or not, with the tokens that were accepted."""
        for match in self._matches:
            limit = min(len(match.tokens), len(accepted))
            right = shared_length(match.tokens, accepted)
            self.trust[match.length].update(right + (right < limit), right)
        self._matches = []

    def _match(self, tokens: tuple[int, ...], length: int) -> NgramMatch:
        known = max(shortest for shortest in self.trust if shortest <= length)
        trust = self.trust[known]
        return NgramMatch(tokens, known, min(trust.ratio, MAX_CHANCE), ERRORS * trust.error)


def _match_length(text: Sequence[int], start: int) -> int:
    """Returns the number of tokens before `start` that equal those at the end of the text."""
    length = 1
    while length < min(MAX_LENGTH, start) and text[start - 1 - length] == text[-1 - length]:
        length += 1
    return length


def add_paths(draft: Draft, paths: Sequence[Sequence[int]]) -> Draft:
    """Adds paths of tokens below the root to a draft.

    Tokens that are already in the draft are not added twice.
    """
    tokens = list(draft.ids)
    parents = list(draft.tree.parents)
    ranks = list(draft.tree.ranks)
    children: list[list[int]] = [list(nodes) for nodes in draft.tree.children]
    for path in paths:
        node = 0
        for token in path:
            child = next((child for child in children[node] if tokens[child] == token), None)
            if child is None:
                child = len(tokens)
                ranks.append(1 + max((ranks[other] for other in children[node]), default=-1))
                tokens.append(token)
                parents.append(node)
                children[node].append(child)
                children.append([])
            node = child
    looked_up = draft.looked_up + sum(map(len, paths))
    if len(tokens) == draft.tree.size:
        return replace(draft, looked_up=looked_up)
    added = upload(tokens[draft.tree.size :], draft.tokens.device)
    return Draft(torch.cat([draft.tokens, added]), Tree(tuple(parents), tuple(ranks)), looked_up)
