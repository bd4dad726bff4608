"""Drafts from the text itself: what followed the same words before is guessed again, and no drafter is asked for it.

Prompt lookup; how far a repetition is trusted goes by how long it is, as where a suffix automaton drafts beside heads
(SAM Decoding, arXiv:2411.10666), and is learnt of each text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from medusa_cli.decoding.luck import Luck, kind_of
from medusa_cli.decoding.pace import Pace
from medusa_cli.decoding.sampling import Sampling
from medusa_cli.drafters.base import Draft
from medusa_cli.tree import Growth, Tree
from medusa_cli.tree.search import Accuracies, node_values

# Of a repetition longer than this the length says no more; of the places where two tokens stood, so many are compared.
LONGEST, PLACES = 16, 8
# Tokens that are guessed again at most.
MOST = 16
# By the length of the repetition, from so many tokens on: the share of tokens that come true where nothing is known.
KNOWN = {2: 0.4, 3: 0.5, 4: 0.6, 6: 0.7, 9: 0.8}
# How many tokens such a share counts for, and what is left of what was seen before a step.
PRIOR, MEMORY = 4.0, 0.97
# Below this chance a token is not worth a row of any tree.
LEAST = 0.05
# What a node is taken to be worth where its head was not measured, by level.
UNMEASURED = 0.3


class Past:
    """One text: where each pair of its tokens stood, and how often what was looked up came true in it."""

    def __init__(self, trust: Mapping[int, Luck]) -> None:
        self._trust = dict(trust)
        self._after: dict[tuple[int, int], list[int]] = {}
        self._known = 1
        self._class = min(KNOWN)  # of the repetition that was found last
        self._told: tuple[int, ...] = ()  # the tokens of it that were drafted

    def find(self, tokens: Sequence[int], root: int) -> tuple[int, ...]:
        """What stood after the longest repetition of the text's end, tokens and then the root: MOST tokens, or none.

        Where the repetition reaches the end, what was looked up goes on in a circle.
        """
        for place in range(self._known, len(tokens)):
            self._after.setdefault((tokens[place - 1], tokens[place]), []).append(place + 1)
        self._known = max(self._known, len(tokens))
        places = self._after.get((tokens[-1], root))
        if not places:
            return ()
        text = [*tokens, root]
        length, place = max((_alike(text, place), place) for place in places[-PLACES:])
        self._class = max(least for least in KNOWN if least <= length)
        around = len(text) - place
        return tuple(text[place + step % around] for step in range(MOST))

    @property
    def share(self) -> float:
        """The chance of each token of what was found last to come true, if those before it do."""
        return min(self._trust[self._class].share, 0.98)

    def told(self, tokens: tuple[int, ...]) -> None:
        """So much of what was found is drafted now."""
        self._told = tokens

    def learn(self, settled: Sequence[int]) -> tuple[int, int, int]:
        """The tokens that a step settled: how many were those drafted, of how many that were judged, and the class."""
        came = 0
        while came < min(len(self._told), len(settled)) and self._told[came] == settled[came]:
            came += 1
        judged = came + (came < len(self._told))
        self._trust[self._class].learn(judged, came, MEMORY)
        self._told = ()
        return came, judged, self._class


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

    @property
    def max_depth(self) -> int:
        return self.over.max_depth

    def begin(self, sampling: Sampling) -> Past:
        """A text's own past, trusted as texts of its kind were, and half as what is known beforehand."""
        trust = self._of(kind_of(sampling)[0])
        return Past({least: Luck(PRIOR, PRIOR * (one.share + KNOWN[least]) / 2) for least, one in trust.items()})

    def beside(
        self, shape: Tree | Growth, past: Past, tokens: Sequence[int], root: int
    ) -> tuple[Tree | Growth, tuple[int, ...]]:
        """What the drafter is to draft over in this step, and the tokens that are drafted without it."""
        found = past.find(tokens, root)
        if not found:
            return shape, ()
        if isinstance(self.over, Pace):
            shape, count = self.over.beside(past.share, MOST)
        elif isinstance(shape, Growth):
            count = sum(past.share**level >= max(2 * LEAST, shape.least) for level in range(1, MOST + 1))
            count = min(count, shape.budget // 2)
            shape = replace(shape, budget=shape.budget - count) if count else shape
        else:
            shape, count = self._fewer(shape, past.share)
        past.told(found[:count])
        return shape, found[:count]

    def learn(self, past: Past, sampling: Sampling, settled: Sequence[int]) -> None:
        """Learn from what a step settled after its root, of a text for which something was looked up."""
        came, judged, least = past.learn(settled)
        self._of(kind_of(sampling)[0])[least].learn(judged, came, MEMORY)

    def _of(self, kind: str) -> dict[int, Luck]:
        """How often what is looked up comes true in texts of a kind of sampling."""
        if kind not in self._trust:
            self._trust[kind] = {least: Luck(PRIOR, PRIOR * share) for least, share in KNOWN.items()}
        return self._trust[kind]

    def _fewer(self, tree: Tree, share: float) -> tuple[Tree, int]:
        """The tree without its least likely nodes, and how many likelier tokens take their places."""
        ranked, count = sorted(self._worths, reverse=True), 0
        while count < min(MOST, len(ranked)) and share ** (count + 1) > max(ranked[-1 - count], LEAST):
            count += 1
        if count not in self._pruned:
            self._pruned[count] = _pruned(tree, self._worths, tree.size - count)
        return self._pruned[count], count


def graft(draft: Draft, tokens: Sequence[int]) -> Draft:
    """A draft with tokens as a path from its root; those that it has there already are not drafted twice."""
    if not tokens:
        return draft
    drafted, tree, node = draft.tokens.tolist(), draft.tree, 0
    parents, ranks, fresh = list(tree.parents), list(tree.ranks), []
    for token in tokens:
        below = tree.children[node] if node < tree.size else ()
        found = next((child for child in below if drafted[child] == token), None)
        if found is None:
            found = len(parents)
            parents.append(node)
            ranks.append(1 + max((ranks[child] for child in below), default=-1))
            fresh.append(token)
        node = found
    if not fresh:
        return replace(draft, looked_up=len(tokens))
    every = torch.cat([draft.tokens, draft.tokens.new_tensor(fresh)])
    return Draft(every, Tree(tuple(parents), tuple(ranks)), len(tokens))


def _alike(text: Sequence[int], place: int) -> int:
    """How many tokens before a place are those at the text's end."""
    length = 2
    while length < min(LONGEST, place) and text[place - 1 - length] == text[-1 - length]:
        length += 1
    return length


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
