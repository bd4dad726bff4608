"""Decides by measured times if steps draft, and finds n-gram matches in the text so far."""

# Steps of a trial, and steps until the other way is tried again: the interval doubles up to the longest.
TRY, RETRY, LONGEST_RETRY = 6, 48, 768
# Tokens of an n-gram match: at first, and at most.
MATCH, LONGEST_MATCH = 4, 10


class AdaptivePolicy:
    """Drafts while that takes less time a token than plain steps; now and then the other way is tried again."""

    def __init__(self):
        self.drafts, self.seconds, self.retry = True, {}, RETRY  # seconds a token, with drafts and without
        self._start(TRY)

    def record(self, drafts, seconds, tokens):
        """Learns what a step took; several answers of one model may record to one policy."""
        if drafts != self.drafts:
            return
        self._left -= 1
        if self._left < self._steps:  # the first step of a way is slower
            self._spent, self._tokens = self._spent + seconds, self._tokens + tokens
        if self._left > 0:
            return
        self.seconds[drafts] = self._spent / self._tokens
        if self._steps > TRY:
            self.retry = min(2 * self.retry, LONGEST_RETRY)
        if self._steps > TRY or len(self.seconds) == 1:
            self.drafts = not drafts
            self._start(TRY)
        else:
            self.drafts = min(self.seconds, key=self.seconds.get)
            self._start(self.retry)

    def _start(self, steps):
        self._steps, self._left, self._spent, self._tokens = steps, steps + 1, 0.0, 0


class NgramIndex:
    """A text, and where each pair of its tokens stood last; the number of tokens to draft follows what was accepted."""

    def __init__(self, tokens):
        self.text, self._after, self._match, self._count = [], {}, [], MATCH
        self.extend(tokens, None)

    def find(self, root):
        """Returns the tokens that followed the pair of the last token and the root."""
        end = self._after.get((self.text[-1], root))
        text = [*self.text, root]
        # A match that reaches the end goes round.
        self._match = [] if end is None else [text[end + step % (len(text) - end)] for step in range(self._count)]
        return self._match

    def extend(self, accepted, root):
        """Adds accepted tokens, the old root first; the next match is one longer than what was accepted of this one."""
        if self._match:
            fresh = [*accepted[1:], root]
            right = next((i for i, token in enumerate(self._match) if fresh[i : i + 1] != [token]), len(self._match))
            self._count = min(right + 1 + (right == len(self._match)), LONGEST_MATCH)
        for token in accepted:
            if self.text:
                self._after[self.text[-1], token] = len(self.text) + 1
            self.text.append(token)
        self._match = []
