"""Whether drafts pay: by what the steps of each way of decoding took."""

from threading import Lock

# Steps by which it is tried whether drafts pay, and steps until the other way is tried again, twice as many each time.
TRY, STAY = 6, 48
# What a step may draft. Alone, the drafter's guesses are left to those who ask for them.
BOTH, LOOKUP, NONE, HEADS = "both", "lookup", "none", "heads"


class Pace:
    """What to draft: what took least time a token, each way tried for a few steps, and now and then again."""

    def __init__(self, only=None):
        self.way, self.ways = only or BOTH, (only,) if only else (BOTH, LOOKUP, NONE)
        self.seconds = {}  # a token, by ways
        self._stay, self._turn, self._lock = STAY, 0, Lock()
        self._begin(TRY)

    @property
    def drafts(self):
        """Whether the drafter is asked."""
        return self.way in (BOTH, HEADS)

    @property
    def looks(self):
        """Whether what the text repeats is drafted."""
        return self.way in (BOTH, LOOKUP)

    def record(self, seconds, tokens):
        """Learn what a step took, of whichever call; its successor is of the way that pays."""
        with self._lock:
            self._learn(seconds, tokens)

    def _learn(self, seconds, tokens):
        self._left -= 1
        if len(self.ways) == 1 or self._left >= self._steps:  # the first step of a way pays for its beginning
            return
        self._spent, self._tokens = self._spent + seconds, self._tokens + tokens
        if self._left:
            return
        self.seconds[self.way] = self._spent / self._tokens
        untried = next((way for way in self.ways if way not in self.seconds), None)
        best = min(self.seconds, key=self.seconds.get)
        if untried is not None:
            self.way = untried
            self._begin(TRY)
        elif best == self.way and self._steps > TRY:  # it was had for long: the others are tried again in turn
            self._stay, self._turn = min(2 * self._stay, 16 * STAY), self._turn + 1
            others = [way for way in self.ways if way != best]
            self.way = others[self._turn % len(others)]
            self._begin(TRY)
        else:
            self.way = best
            self._begin(self._stay)

    def _begin(self, steps):
        self._steps, self._left, self._spent, self._tokens = steps, steps + 1, 0.0, 0
