"""N-gram lookup, which drafts the tokens that followed earlier occurrences of the last tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from medusa_cli.device import upload
from medusa_cli.tree import Draft, Tree

# Longer matches count as matches of this length.
MAX_LENGTH = 16
# Maximum number of occurrences to compare.
MAX_POSITIONS = 8
# Maximum number of draft tokens per match.
MAX_TOKENS = 16
# Maximum number of matches per step.
MAX_BRANCHES = 3
# PAIR: the length of a match of two tokens. OTHER: used instead of the length for all matches
# except the longest.
PAIR = 2
OTHER = -1
# Prior probability that a matched token is right, by the minimum length of the match.
PRIOR_BY_LENGTH = {1: 0.3, PAIR: 0.5, 3: 0.6, 4: 0.7, 6: 0.8, 9: 0.9, OTHER: 0.15}
CORPUS_PRIOR_BY_LENGTH = {PAIR: 0.3, 4: 0.4, 8: 0.5, 16: 0.7}
# Weight of a prior, in tokens.
PRIOR = 4.0
# Decay of older steps.
DECAY = 0.97
MAX_CHANCE = 0.98
# Maximum number of occurrences in a corpus to compare.
CORPUS_POSITIONS = 32
# The token that separates the texts of a corpus.
GAP = -1


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the common prefix of two texts."""
    pairs = zip(left, right, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@dataclass(eq=False)
class AcceptanceEstimate:
    """Estimates the ratio of accepted to expected draft tokens; the weight of older ones decays with each update.

    weight: the number of expected draft tokens on which the ratio is based. shared: the estimate
    over all sequences of a kind, which is updated, too.
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


@dataclass(frozen=True)
class NgramMatch:
    """Holds the tokens that follow a match, its length, and the probability of each token."""

    tokens: tuple[int, ...]
    length: int
    chance: float


# Estimates of how often matched tokens are accepted, by match length.
NgramTrust = dict[int, AcceptanceEstimate]


def ngram_trust(
    shared: NgramTrust | None = None, priors: Mapping[int, float] = PRIOR_BY_LENGTH
) -> NgramTrust:
    """Returns the prior trust, or, given `shared`, the mean of the prior and `shared`."""
    if shared is None:
        return {length: AcceptanceEstimate(prior, PRIOR, DECAY) for length, prior in priors.items()}
    trust = {}
    for length, prior in priors.items():
        known = shared[length]
        trust[length] = AcceptanceEstimate((known.ratio + prior) / 2, PRIOR, DECAY, known)
    return trust


class NgramSource(ABC):
    """Finds matches for one text.

    It updates the trust in its matches, both for this text and for all texts (`shared`).
    """

    priors: ClassVar[Mapping[int, float]] = PRIOR_BY_LENGTH

    def __init__(self, shared: NgramTrust) -> None:
        self.trust = ngram_trust(shared, self.priors)
        self._matches: list[NgramMatch] = []  # of the current step

    @abstractmethod
    def find(self, tokens: Sequence[int], root: int) -> list[NgramMatch]:
        """Returns matches for the end of the text (`tokens`, then `root`), longest first.

        No two matches begin with the same token.
        """

    def learn(self, accepted: Sequence[int]) -> None:
        """Compares the matches of this step, drafted or not, with the tokens that were accepted."""
        for match in self._matches:
            limit = min(len(match.tokens), len(accepted))
            right = shared_length(match.tokens, accepted)
            self.trust[match.length].update(right + (right < limit), right)
        self._matches = []

    def _match(self, tokens: tuple[int, ...], length: int) -> NgramMatch:
        known = max(shortest for shortest in self.trust if shortest <= length)
        return NgramMatch(tokens, known, min(self.trust[known].ratio, MAX_CHANCE))


class NgramIndex(NgramSource):
    """Indexes the tokens of the text itself."""

    def __init__(self, shared: NgramTrust) -> None:
        super().__init__(shared)
        self._after: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def find(self, tokens: Sequence[int], root: int) -> list[NgramMatch]:
        """Returns matches of MAX_TOKENS tokens.

        If fewer tokens follow a match in the text, these tokens are repeated.
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


def _match_length(text: Sequence[int], start: int) -> int:
    """Returns the number of tokens before `start` that equal those at the end of the text."""
    length = 1
    while length < min(MAX_LENGTH, start) and text[start - 1 - length] == text[-1 - length]:
        length += 1
    return length


class Corpus:
    """Indexes earlier texts: all positions are sorted by the tokens before them, read backwards.

    tokens int32 [T]: the texts, separated by gaps. positions int32 [T]: the sorted positions. The
    longest match for the end of a text is next to the place where that end would be inserted.
    Finding it takes some 20 comparisons in ten million tokens.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]

    def __init__(self, texts: Iterable[Sequence[int]] = ()) -> None:
        self.index(texts)

    def index(self, texts: Iterable[Sequence[int]]) -> None:
        """Indexes these texts and drops the previous ones.

        It takes some 0.4 s and 60 MB per million tokens.
        """
        border = np.full(max(MAX_LENGTH, MAX_TOKENS), GAP, np.int32)
        parts = [part for text in texts for part in (np.asarray(text, np.int32), border[:1])]
        self.tokens = np.concatenate([border, *parts, border])
        rank = np.zeros(len(self.tokens), np.int64)
        length = 1  # `rank` orders positions by this many tokens before them
        rank[1:] = self.tokens[:-1] - GAP
        while length < MAX_LENGTH:
            pairs = rank * (int(rank.max()) + 1)
            pairs[length:] += rank[:-length]
            rank = np.unique(pairs, return_inverse=True)[1]
            length = 2 * length
        self.positions = np.argsort(rank, kind="stable").astype(np.int32)

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return int((self.tokens != GAP).sum())

    def find(self, end: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Returns the length of the longest match for the end of a text, and its most frequent continuation.

        If many positions match, only CORPUS_POSITIONS neighbors are compared.
        """
        # Lists are used because numpy calls are slow after a pass has overwritten the CPU caches.
        wanted = list(end[: -MAX_LENGTH - 1 : -1])
        tokens = self.tokens.data
        positions = self.positions.data

        def before(position: int) -> list[int]:
            return tokens[position - MAX_LENGTH : position].tolist()[::-1]

        at = bisect_left(positions, wanted, key=before)
        near = positions[max(at - CORPUS_POSITIONS // 2, 0) : at + CORPUS_POSITIONS // 2].tolist()
        closest = [before(position) for position in positions[max(at - 1, 0) : at + 1]]
        length = max((shared_length(wanted, other) for other in closest), default=0)
        if not length:
            return 0, ()
        alike = [position for position in near if before(position)[:length] == wanted[:length]]
        rows = [tokens[position : position + MAX_TOKENS].tolist() for position in alike]
        level = 0
        while len(rows) > 1 and level < MAX_TOKENS:
            [(token, _)] = Counter(row[level] for row in rows).most_common(1)
            rows = [row for row in rows if row[level] == token]
            level = level + 1
        following = rows[0][: rows[0].index(GAP)] if GAP in rows[0] else rows[0]
        return length, tuple(following)


class CorpusMatches(NgramSource):
    """Finds the longest match for the end of the text in a corpus.

    Matches with a probability below `min_chance` are not drafted; they only update the trust.
    """

    priors = CORPUS_PRIOR_BY_LENGTH

    def __init__(self, corpus: Corpus, shared: NgramTrust, min_chance: float = 0.0) -> None:
        super().__init__(shared)
        self._corpus = corpus
        self._min_chance = min_chance

    def find(self, tokens: Sequence[int], root: int) -> list[NgramMatch]:
        length, following = self._corpus.find([*tokens[1 - MAX_LENGTH :], root])
        self._matches = [self._match(following, length)] if length >= PAIR and following else []
        return [match for match in self._matches if match.chance >= self._min_chance]


def likeliest(matches: Iterable[NgramMatch]) -> list[NgramMatch]:
    """Returns at most MAX_BRANCHES matches with different first tokens, most likely first.

    Single-token matches come last.
    """
    first: dict[int, NgramMatch] = {}
    for match in sorted(
        matches, key=lambda match: (match.length >= PAIR, match.chance), reverse=True
    ):
        first.setdefault(match.tokens[0], match)
    return list(first.values())[:MAX_BRANCHES]


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
