"""A text's own past: what followed the same words before, and how much of that came true."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from medusa_cli.decoding.luck import Luck

# Of a repetition longer than this the length says no more; of the places where its end stood, so many are compared.
LONGEST, PLACES = 16, 8
# Tokens that are guessed again at most, and by how many ways a text may go on again.
MOST, WAYS = 16, 3
# By the length of the repetition, from so many tokens on: the share of tokens that come true where nothing is known.
# ANOTHER is the kind of every way but the first.
PAIR, ANOTHER = 2, -1
KNOWN = {1: 0.3, PAIR: 0.5, 3: 0.6, 4: 0.7, 6: 0.8, 9: 0.9, ANOTHER: 0.15}
# How many tokens such a share counts for, and what is left of what was seen before a step.
PRIOR, MEMORY = 4.0, 0.97


@dataclass(frozen=True)
class Echo:
    """What stood after a repetition of the text's end, and the kind of such repetitions."""

    tokens: tuple[int, ...]
    kind: int


class Past:
    """One text: where its tokens stood, and how often what was looked up came true in it."""

    def __init__(self, trust: Mapping[int, Luck]) -> None:
        self._trust = dict(trust)
        self._after: dict[tuple[int, ...], list[int]] = {}
        self._known = 0
        self._found: list[Echo] = []  # in the step under way

    def find(self, tokens: Sequence[int], root: int) -> list[Echo]:
        """What stood after the longest repetitions of the text's end, tokens and then the root: the longest first.

        Each is of MOST tokens, and begins with another one. Where a repetition reaches the end, what is looked up goes
        on in a circle.
        """
        for place in range(self._known, len(tokens)):
            self._after.setdefault((tokens[place],), []).append(place + 1)
            if place:
                self._after.setdefault((tokens[place - 1], tokens[place]), []).append(place + 1)
        self._known = max(self._known, len(tokens))
        text = [*tokens, root]
        pairs, single = self._after.get((tokens[-1], root), ()), self._after.get((root,), ())
        found = {place: _alike(text, place) for place in (*single[-PLACES:], *pairs[-PLACES:])}
        echoes: dict[int, Echo] = {}
        for place in sorted(found, key=lambda one: (found[one], one), reverse=True):
            if len(echoes) < WAYS and text[place] not in echoes:
                around = len(text) - place
                kind = max(least for least in KNOWN if least <= found[place]) if not echoes else ANOTHER
                echoes[text[place]] = Echo(tuple(text[place + step % around] for step in range(MOST)), kind)
        self._found = list(echoes.values())
        return self._found

    def share(self, echo: Echo) -> float:
        """The chance of each of its tokens to come true, if those before it do."""
        return min(self._trust[echo.kind].share, 0.98)

    def learn(self, settled: Sequence[int]) -> list[tuple[int, int, int]]:
        """By the tokens that a step settled: each found echo's kind, how many were judged, how many came true.

        Those that were not drafted are judged, too: what has failed for long may come true again.
        """
        judged = []
        for echo in self._found:
            came, most = 0, min(len(echo.tokens), len(settled))
            while came < most and echo.tokens[came] == settled[came]:
                came += 1
            self._trust[echo.kind].learn(came + (came < most), came, MEMORY)
            judged.append((echo.kind, came + (came < most), came))
        self._found = []
        return judged


def _alike(text: Sequence[int], place: int) -> int:
    """How many tokens before a place are those at the text's end."""
    length = 1
    while length < min(LONGEST, place) and text[place - 1 - length] == text[-1 - length]:
        length += 1
    return length
