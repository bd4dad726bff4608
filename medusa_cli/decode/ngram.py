"""N-gram lookup: what followed earlier occurrences of the text's last tokens is drafted again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from medusa_cli.decode.accept import AcceptanceEstimate
from medusa_cli.tree import Draft, Tree

# Longest match that is told from longer ones, occurrences that are compared, tokens of a match, and matches a step.
MAX_LENGTH, MAX_POSITIONS, MAX_TOKENS, MAX_BRANCHES = 16, 8, 16, 3
# Prior chance of a matched token by the least length of the match. OTHER is every match but the longest.
PAIR, OTHER = 2, -1
PRIOR_BY_LENGTH = {1: 0.3, PAIR: 0.5, 3: 0.6, 4: 0.7, 6: 0.8, 9: 0.9, OTHER: 0.15}
# Tokens that a prior weighs, and decay of older steps.
PRIOR, DECAY = 4.0, 0.97
MAX_CHANCE = 0.98


@dataclass(frozen=True)
class NgramMatch:
    """Holds the tokens after an earlier occurrence, the class of its length, and the chance of each next token."""

    tokens: tuple[int, ...]
    length: int
    chance: float


# Estimates of how often matched tokens are accepted, by length of the match.
NgramTrust = dict[int, AcceptanceEstimate]


def ngram_trust(shared: NgramTrust | None = None) -> NgramTrust:
    """Returns the prior trust, or that of a text among others: half way from the prior to what they taught."""
    return {
        length: AcceptanceEstimate(PRIOR, PRIOR * prior, DECAY)
        if shared is None
        else AcceptanceEstimate(PRIOR, PRIOR * (shared[length].ratio + prior) / 2, DECAY, shared[length])
        for length, prior in PRIOR_BY_LENGTH.items()
    }


class NgramIndex:
    """Indexes the tokens of one text; learns how far its matches can be trusted, and teaches it to `shared`."""

    def __init__(self, shared: NgramTrust) -> None:
        self.trust = ngram_trust(shared)
        self._after: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0
        self._matches: list[NgramMatch] = []  # of the step under way

    def find(self, tokens: Sequence[int], root: int) -> list[NgramMatch]:
        """Returns matches for the end of the text (`tokens`, then `root`), the longest first.

        Each has MAX_TOKENS tokens and begins with another token. A match that overlaps the end of the text is continued
        periodically.
        """
        for position in range(self._indexed, len(tokens)):
            self._after.setdefault((tokens[position],), []).append(position + 1)
            if position:
                self._after.setdefault((tokens[position - 1], tokens[position]), []).append(position + 1)
        self._indexed = max(self._indexed, len(tokens))
        text = [*tokens, root]
        pairs, single = self._after.get((tokens[-1], root), ()), self._after.get((root,), ())
        lengths = {start: _match_length(text, start) for start in (*single[-MAX_POSITIONS:], *pairs[-MAX_POSITIONS:])}
        matches: dict[int, NgramMatch] = {}
        for start in sorted(lengths, key=lambda position: (lengths[position], position), reverse=True):
            if len(matches) < MAX_BRANCHES and text[start] not in matches:
                period = len(text) - start
                length = OTHER if matches else max(known for known in PRIOR_BY_LENGTH if known <= lengths[start])
                following = tuple(text[start + step % period] for step in range(MAX_TOKENS))
                matches[text[start]] = NgramMatch(following, length, min(self.trust[length].ratio, MAX_CHANCE))
        self._matches = list(matches.values())
        return self._matches

    def learn(self, accepted: Sequence[int]) -> None:
        """Compares the matches of this step, drafted or not, with the tokens that were accepted."""
        for match in self._matches:
            right, limit = 0, min(len(match.tokens), len(accepted))
            while right < limit and match.tokens[right] == accepted[right]:
                right += 1
            self.trust[match.length].update(right + (right < limit), right)
        self._matches = []


def _match_length(text: Sequence[int], start: int) -> int:
    """Returns how many tokens before `start` equal those at the end of the text."""
    length = 1
    while length < min(MAX_LENGTH, start) and text[start - 1 - length] == text[-1 - length]:
        length += 1
    return length


def add_paths(draft: Draft, paths: Sequence[Sequence[int]]) -> Draft:
    """Adds paths of tokens from the root to a draft; tokens that the draft has already are not added twice."""
    if not paths:
        return draft
    tokens, parents, ranks = draft.tokens.tolist(), list(draft.tree.parents), list(draft.tree.ranks)
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
    added = draft.tokens.new_tensor(tokens[draft.tree.size :])
    return Draft(torch.cat([draft.tokens, added]), Tree(tuple(parents), tuple(ranks)), looked_up)
