"""What has come of one answer: its text up to a stop string, its tokens, why it ended, what it took."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.likelihood import Likelihood
from medusa_cli.decoding.text import TextStream
from medusa_cli.decoding.types import Stats, Step


@dataclass(frozen=True)
class Piece:
    """Text that one token added, and whether the token was an accepted draft."""

    text: str
    accepted: bool


class Reply:
    """Gathers an answer's steps. Text that may be the beginning of a stop string is held back until it is known.

    reason is None while more is to come, then "stop" or "length", or "cancelled" for an answer that was left.
    """

    def __init__(self, backbone: Backbone, stop_strings: Sequence[str] = ()) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.likelihoods: list[Likelihood] = []
        self.reason: str | None = None
        self.stats = Stats()
        self._stream = TextStream(backbone)
        self._stops = [text for text in stop_strings if text]
        self._held: list[Piece] = []

    def add(self, step: Step, reason: str | None) -> list[Piece]:
        """Take a step of a sequence that ended for this reason, or goes on (None); the text that can be shown."""
        self.stats.add(step)
        self.tokens += step.tokens
        self.likelihoods += step.likelihoods
        self._held += [Piece(self._stream.add([token]), i < step.accepted) for i, token in enumerate(step.tokens)]
        return self._show(reason)

    def leave(self) -> list[Piece]:
        """End the answer where it is, unless it has ended; what was held back."""
        return [] if self.reason else self._show("cancelled")

    def _show(self, reason: str | None) -> list[Piece]:
        if reason:
            self._held.append(Piece(self._stream.rest(), False))
        held = "".join(piece.text for piece in self._held)
        met = [place for place in (held.find(stop) for stop in self._stops) if place >= 0]
        if met:
            shown, _ = split(self._held, min(met))
            self._held, self.reason = [], "stop"
        else:
            ready = len(held) if reason else len(held) - max((begun(held, one) for one in self._stops), default=0)
            shown, self._held = split(self._held, ready)
            self.reason = reason
        self.text += "".join(piece.text for piece in shown)
        return shown


def begun(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


def split(pieces: Sequence[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces that hold the first `at` characters, and those that hold the rest."""
    first: list[Piece] = []
    rest: list[Piece] = []
    for piece in pieces:
        here = max(0, min(at, len(piece.text)))
        if piece.text[:here]:
            first.append(Piece(piece.text[:here], piece.accepted))
        if piece.text[here:]:
            rest.append(Piece(piece.text[here:], piece.accepted))
        at -= len(piece.text)
    return first, rest
