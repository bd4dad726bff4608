"""What a text repeats: where its pairs of tokens stood before, and how much of what followed came true again."""

# Tokens of a repetition that are guessed again at most, the least chance that is worth a row, how long a repetition
# tells more than a shorter one, and what is left of what was seen before a step.
MOST, LEAST, LONGEST, MEMORY = 10, 0.08, 8, 0.95


class Past:
    """A text, where its pairs of tokens stood, and what share of what followed came true, by how long it repeated."""

    def __init__(self, tokens):
        self.tokens, self._after, self._known = tokens, {}, 1
        self._shares = [0.5 + 0.4 * length / LONGEST for length in range(LONGEST + 1)]
        self._found, self._length = [], 0

    def find(self, root):
        """What followed the longest repetition of the text's end, the root last: the tokens that are likely enough."""
        text = [*self.tokens, root]
        for place in range(self._known, len(self.tokens)):
            self._after.setdefault((text[place - 1], text[place]), []).append(place + 1)
        self._known = max(self._known, len(self.tokens))
        places = self._after.get((text[-2], root), ())[-LONGEST:]
        if not places:
            self._found = []
            return []
        self._length, place = max((self._alike(text, place), place) for place in places)
        share, count = self._shares[self._length], 0
        while count < MOST and share ** (count + 1) >= LEAST:
            count += 1
        around = len(text) - place  # what reaches the end goes on in a circle
        self._found = [text[place + step % around] for step in range(MOST)]
        return self._found[:count]

    def learn(self, settled, root):
        """Take the tokens that stand now, the old root first, and see what came true of what was found.

        What was found and not told is judged, too: what has failed for long may come true again.
        """
        self.tokens += settled
        came, fresh = 0, [*settled[1:], root]
        most = min(len(self._found), len(fresh))
        while came < most and self._found[came] == fresh[came]:
            came += 1
        for right in [True] * came + [False] * (came < most):
            self._shares[self._length] += (1 - MEMORY) * (right - self._shares[self._length])
        self._found = []

    def _alike(self, text, place):
        length = 2
        while length < min(LONGEST, place) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        return length
