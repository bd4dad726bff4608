"""Token ids as text while they come, never showing half a character."""

from collections.abc import Sequence

from medusa_cli.backbone import Backbone

HALF = "\ufffd"
# Tokens without a line's end after which a text is decoded from a later place on.
LONG = 256


class TextStream:
    """Turns new token ids into the text they add; bytes of an unfinished character wait for the rest.

    What it gives is, put together, the text of all ids decoded at once.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._decode = backbone.decode
        self._ids: list[int] = []
        # Tokens before `_start` are settled. Those up to `_line` are decoded again with what follows them: decoders of
        # the Llama kind strip a blank from the beginning of whatever they decode, which must not be a line's own.
        self._start = self._line = 0
        self._shown = 0  # characters of the text since `_start`

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids add to what was shown."""
        self._ids += ids
        text = self._decode(self._ids[self._start :])
        if text.endswith(HALF):
            return ""
        fresh, self._shown = text[self._shown :], len(text)
        if fresh.endswith("\n") or len(self._ids) - self._line >= LONG:
            # A line's end is a safe place to begin anew, so that long answers are not decoded over and over; where no
            # line ends for long, any whole character is, as what was decoded before it is decoded with it.
            self._start, self._line = self._line, len(self._ids)
            self._shown = len(self._decode(self._ids[self._start :]))
        return fresh

    def rest(self) -> str:
        """What still waits when the answer is over."""
        return self._decode(self._ids[self._start :])[self._shown :]
