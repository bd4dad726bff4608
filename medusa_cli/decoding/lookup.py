"""Drafts from the text itself: what followed the same words before is guessed again, and no drafter is asked for it.

Prompt lookup; how far a repetition is trusted goes by how long it is, as where a suffix automaton drafts beside heads
(SAM Decoding, arXiv:2411.10666), and is learnt of each text.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch

from medusa_cli.decoding.luck import Luck, kind_of
from medusa_cli.decoding.pace import Pace
from medusa_cli.decoding.past import KNOWN, MEMORY, MOST, PAIR, PRIOR, Echo, Past
from medusa_cli.decoding.sampling import Sampling
from medusa_cli.drafters.base import Draft
from medusa_cli.tree import Growth, Tree
from medusa_cli.tree.search import Accuracies, node_values

# Below this chance a token is not worth a row of any tree.
LEAST = 0.05
# What a head that was not measured is taken to settle, by level: a start, no more.
UNMEASURED = 0.3
# A text under way: its past, its tokens and its root. What is asked of a drafter for it, and the paths beside that.
Text = tuple[Past, Sequence[int], int]
Asked = tuple[Tree | Growth, list[tuple[int, ...]]]


class Lookup:
    """A shape to draft over, and beside its nodes, or in their place, what texts say again, as far as that pays.

    A Pace weighs both by what steps cost. A tree, or a growth, keeps its number of nodes: its least likely ones give
    way to likelier tokens. accuracies: what the heads' guesses are worth, for that.
    """

    def __init__(self, over: "Tree | Growth | Pace", accuracies: Accuracies = ()) -> None:
        self.over = over
        self._trust: dict[str, dict[int, Luck]] = {}
        self._pruned: dict[int, Tree] = {}
        self._worths = _worths(over, accuracies) if isinstance(over, Tree) else []

    @property
    def size(self) -> int:
        return self.over.size

    def fork(self) -> "Lookup":
        """This one for other texts under way: what is trusted of kinds of texts is of both."""
        other = copy.copy(self)
        other.over = self.over.fork() if isinstance(self.over, Pace) else self.over
        return other

    def begin(self, sampling: Sampling) -> Past:
        """A text's own past, trusted as texts of its kind were, and half as what is known beforehand."""
        trust = self._of(kind_of(sampling)[0])
        return Past({kind: Luck(PRIOR, PRIOR * (one.share + KNOWN[kind]) / 2) for kind, one in trust.items()})

    def beside(self, shape: Tree | Growth, texts: Sequence[Text]) -> list[Asked]:
        """For each text what its drafter is to draft over in this step, and the paths that are drafted without it."""
        found = [past.find(tokens, root) for past, tokens, root in texts]
        if isinstance(self.over, Pace):
            return self._paced(self.over, shape, texts, found)
        return [self._in_place(shape, past, echoes) for (past, _, _), echoes in zip(texts, found, strict=True)]

    def _paced(
        self, pace: Pace, shape: Tree | Growth, texts: Sequence[Text], found: Sequence[Sequence[Echo]]
    ) -> list[Asked]:
        """What the pace makes of each text's longest echo."""
        # What followed a single token comes true where the heads know it, too.
        shares = [
            past.share(echoes[0]) if echoes and echoes[0].kind >= PAIR else 0.0
            for (past, _, _), echoes in zip(texts, found, strict=True)
        ]
        if not any(shares):
            return [(shape, []) for _ in texts]
        return [
            (tree, [echoes[0].tokens[:count]] if count else [])
            for (tree, count), echoes in zip(pace.beside(shares, MOST), found, strict=True)
        ]

    def _in_place(self, shape: Tree | Growth, past: Past, echoes: Sequence[Echo]) -> Asked:
        """A tree, or a growth, with its least likely nodes given up for likelier tokens of each echo."""
        if not echoes:
            return shape, []
        shares = [past.share(echo) for echo in echoes]
        smaller, counts = _smaller(shape, shares) if isinstance(shape, Growth) else self._fewer(shape, shares)
        return smaller, [echo.tokens[:count] for echo, count in zip(echoes, counts, strict=True) if count]

    def learn(self, past: Past, sampling: Sampling, settled: Sequence[int]) -> None:
        """Learn from what a step settled after its root, whether what was found in the text was drafted or not."""
        every = self._of(kind_of(sampling)[0])
        for kind, judged, came in past.learn(settled):
            every[kind].learn(judged, came, MEMORY)

    def _of(self, kind: str) -> dict[int, Luck]:
        """How often what is looked up comes true in texts of a kind of sampling."""
        if kind not in self._trust:
            self._trust[kind] = {one: Luck(PRIOR, PRIOR * share) for one, share in KNOWN.items()}
        return self._trust[kind]

    def _fewer(self, tree: Tree, shares: Sequence[float]) -> tuple[Tree, list[int]]:
        """The tree without its least likely nodes, and how many likelier tokens of each way take their places."""
        ranked, counts, taken = sorted(self._worths), [0] * len(shares), 0
        while taken < len(ranked):
            worth, best = max((share ** (counts[one] + 1), one) for one, share in enumerate(shares))
            if worth <= max(ranked[taken], LEAST) or counts[best] == MOST:
                break
            counts[best] += 1
            taken += 1
        if taken not in self._pruned:
            self._pruned[taken] = _pruned(tree, self._worths, tree.size - taken)
        return self._pruned[taken], counts


def _smaller(growth: Growth, shares: Sequence[float]) -> tuple[Growth, list[int]]:
    """The growth with room for likely tokens of each way, at most half of its nodes, and how many those are."""
    least, left, counts = max(2 * LEAST, growth.least), growth.budget // 2, []
    for share in shares:
        counts.append(min(left, sum(share**level >= least for level in range(1, MOST + 1))))
        left -= counts[-1]
    return replace(growth, budget=growth.budget - sum(counts)), counts


def graft(draft: Draft, paths: Sequence[Sequence[int]]) -> Draft:
    """A draft with more paths of tokens from its root; what it has there already is not drafted twice."""
    for path in paths:
        draft = _grafted(draft, path)
    return draft


def _grafted(draft: Draft, path: Sequence[int]) -> Draft:
    drafted, tree, node = draft.tokens.tolist(), draft.tree, 0
    parents, ranks, fresh = list(tree.parents), list(tree.ranks), []
    for token in path:
        below = tree.children[node] if node < tree.size else ()
        found = next((child for child in below if drafted[child] == token), None)
        if found is None:
            found = len(parents)
            parents.append(node)
            ranks.append(1 + max((ranks[child] for child in below), default=-1))
            fresh.append(token)
        node = found
    looked_up = draft.looked_up + len(path)
    if not fresh:
        return replace(draft, looked_up=looked_up)
    every = torch.cat([draft.tokens, draft.tokens.new_tensor(fresh)])
    return Draft(every, Tree(tuple(parents), tuple(ranks)), looked_up)


def _worths(tree: Tree, accuracies: Accuracies) -> list[float]:
    """The chance of each node but the root to be accepted, by what was measured of the heads; at most its parent's."""
    if accuracies:
        return node_values(tree, accuracies)[1:]
    worths = [1.0]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        worths.append(worths[parent] * UNMEASURED / (1 + rank))
    return worths[1:]


def _pruned(tree: Tree, worths: Sequence[float], size: int) -> Tree:
    """The likeliest part of a tree, of so many nodes; a node never goes before those below it."""
    order = sorted(range(1, tree.size), key=lambda node: (-worths[node - 1], node))
    kept = [0, *sorted(order[: size - 1])]
    number = {node: place for place, node in enumerate(kept)}
    parents = tuple(number[tree.parents[node]] if node else -1 for node in kept)
    return Tree(parents, tuple(tree.ranks[node] for node in kept))
