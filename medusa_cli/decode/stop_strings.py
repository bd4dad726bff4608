"""Stop strings, all found in an answer's text by one automaton, in time that does not depend on their number."""

from collections import deque
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from medusa_cli.model import Backbone


class Automaton:
    """Finds many strings in a text, character by character (Aho and Corasick, 1975).

    A state stands for the longest end of the text that is the beginning of a string. depths: the
    length of this end, by state. matches: the length of the longest string with which the text ends, or 0.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.matches = [0]
        for text in texts:
            self._insert(text)
        self._link()

    def _insert(self, text: str) -> None:
        state = 0
        for letter in text:
            if letter not in self._next[state]:
                self._next[state][letter] = len(self._next)
                self._next.append({})
                self.depths.append(self.depths[state] + 1)
                self.matches.append(0)
            state = self._next[state][letter]
        self.matches[state] = len(text)

    def _link(self) -> None:
        """Links each state to the state of the longest proper end of its text. Shorter states are linked first."""
        self._shorter = [0] * len(self._next)
        todo = deque(self._next[0].values())
        while todo:
            state = todo.popleft()
            for letter, longer in self._next[state].items():
                shorter = self.step(self._shorter[state], letter)
                self._shorter[longer] = shorter
                self.matches[longer] = self.matches[longer] or self.matches[shorter]
                todo.append(longer)

    def step(self, state: int, letter: str) -> int:
        """Returns the state after one more character."""
        while letter not in self._next[state]:
            if not state:
                return 0
            state = self._shorter[state]
        return self._next[state][letter]

    def found_in(self, text: str) -> Iterator[str]:
        """Yields the strings that occur in a text; a string may be yielded several times."""
        state = 0
        for end, letter in enumerate(text, 1):
            state = self.step(state, letter)
            place = state
            while length := self.matches[place]:
                yield text[end - length : end]
                # Go to the state in which the next shorter string may end here.
                while self.depths[place] >= length:
                    place = self._shorter[place]


class StopStrings:
    """Holds the stop strings of a request, compiled once for all its answers. `Answer` holds back their beginnings.

    named: the special tokens in the stop strings.
    """

    def __init__(self, backbone: Backbone, texts: Sequence[str] = ()) -> None:
        self.automaton = Automaton([text for text in texts if text])
        self.named: frozenset[int] = frozenset()
        if any(texts):
            special, ids = _special_tokens(backbone)
            self.named = frozenset(ids[name] for text in texts for name in special.found_in(text))

    def __bool__(self) -> bool:
        return len(self.automaton.depths) > 1


# The automaton of a model's special tokens, and their ids by text.
_special: WeakKeyDictionary[Backbone, tuple[Automaton, dict[str, int]]] = WeakKeyDictionary()


def _special_tokens(backbone: Backbone) -> tuple[Automaton, dict[str, int]]:
    """Returns the automaton of the model's special tokens, and their ids by text."""
    if backbone not in _special:
        added = backbone.tokenizer.added_tokens_decoder.items()
        ids = {token.content: id for id, token in added if token.special and token.content}
        _special[backbone] = Automaton(list(ids)), ids
    return _special[backbone]
