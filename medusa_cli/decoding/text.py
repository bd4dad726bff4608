"""Token ids as text while they come, never showing half a character."""

from collections.abc import Sequence

from medusa_cli.backbone import Backbone

HALF = "\ufffd"


class TextStream:
    """Turns new token ids into the text they add; bytes of an unfinished character wait for the rest."""

    def __init__(self, backbone: Backbone) -> None:
        self._decode = backbone.decode
        self._ids: list[int] = []
        self._start = 0  # tokens before this are settled: the text since then is decoded anew
        self._shown = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids add to what was shown."""
        self._ids += ids
        text = self._decode(self._ids[self._start :])
        if text.endswith(HALF):
            return ""
        fresh = text[self._shown :]
        if text.endswith("\n"):
            # A line's end is a safe place to begin anew, so that long answers are not decoded over and over.
            self._start, self._shown = len(self._ids), 0
        else:
            self._shown = len(text)
        return fresh

    def rest(self) -> str:
        """What still waits when the answer is over."""
        return self._decode(self._ids[self._start :])[self._shown :]
