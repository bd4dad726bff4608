"""The text of an answer, decoded as its tokens arrive."""

from collections.abc import Collection, Sequence

from medusa_cli.model import Backbone

# Tokenizers decode bytes that are not a character to this character.
REPLACEMENT = "\ufffd"
# After this many tokens on one line, text decoding restarts from a later token.
MAX_LINE_TOKENS = 256
# Tokenizers with byte fallback decode a run of byte tokens as a whole. If one byte is wrong, they
# replace all bytes of the run. The text of a run of more tokens is shown before the run's end.
MAX_BYTE_RUN = 32


class TextStream:
    """Converts new token ids to the text that they add, in time that is linear in their number.

    Two things are held back until more tokens arrive: the bytes of an incomplete character, and text that the
    tokenizer's clean-up may still change. The returned texts together equal the text of all ids decoded at once, except
    for runs of more than MAX_BYTE_RUN byte tokens with wrong bytes. keep: special tokens that appear in the text.
    """

    def __init__(self, backbone: Backbone, keep: Collection[int] = ()) -> None:
        self._backbone = backbone
        self._vocabulary = backbone.vocabulary
        self._keep = keep
        self._ids: list[int] = []
        # Tokens before `_start` are not decoded again. Tokens from `_start` to `_line` are decoded again
        # with later tokens: Llama decoders strip a leading blank, which must not be the first blank of
        # a new line.
        self._start = self._line = 0
        self._run = 0  # the first token of a run of byte tokens that may continue
        self._shown = 0  # the number of characters returned since `_start`

    def add(self, ids: Sequence[int]) -> str:
        """Returns the text that these ids add."""
        new = ""
        for id in ids:
            self._ids.append(id)
            if self._vocabulary.byte_of(id) is None:
                self._run = len(self._ids)
            elif len(self._ids) - self._run >= MAX_BYTE_RUN:
                new += self._cut_run()
        return new + self._advance(self._run)

    def flush(self) -> str:
        """Returns the text that is still held back at the end of the answer."""
        return self._vocabulary.clean_up(self._decoded(len(self._ids))[self._shown :])

    def hides(self, id: int) -> bool:
        """Returns True for a special token that does not appear in the text."""
        return id in self._backbone.special_ids and id not in self._keep

    def _advance(self, end: int) -> str:
        """Returns the text that the tokens before `end` add."""
        if end == self._start:
            return ""
        text = self._decoded(end)
        settled = self._settled(text)
        new = self._vocabulary.clean_up(text[self._shown : settled])
        self._shown = max(self._shown, settled)
        if new.endswith("\n") or end - self._line >= MAX_LINE_TOKENS:
            # Decoding can restart safely at the end of a line. Otherwise the whole answer would be
            # decoded again in every step.
            self._start = self._line
            self._line = end
            self._shown = self._settled(self._decoded(end))
        return new

    def _cut_run(self) -> str:
        """Returns the text of a long run of byte tokens up to the last whole character, where decoding restarts."""
        run = bytes(self._vocabulary.byte_of(id) or 0 for id in self._ids[self._run :])
        end = len(self._ids)
        try:
            run.decode()
        except UnicodeDecodeError as reason:
            if reason.reason == "unexpected end of data":
                end = self._run + reason.start
        new = self._vocabulary.clean_up(self._decoded(end)[self._shown :])
        self._start = self._line = self._run = end
        self._shown = 0
        return new

    def _settled(self, text: str) -> int:
        """Returns how many of a decoded text's first characters no later token can change."""
        # Only the last bytes of a text may belong to an incomplete character.
        return self._vocabulary.settled(text.removesuffix(REPLACEMENT))

    def _decoded(self, end: int) -> str:
        """Returns the text of the tokens from `_start` to `end`, without the tokenizer's clean-up."""
        return self._backbone.decode(self._ids[self._start : end], self._keep, clean_up=False)
