"""A terminal as other people's texts may use it: their control characters are shown, not sent."""

import logging
import warnings
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from medusa_cli.errors import cut

# The controls of ASCII and of Latin-1, but newline and tab; what turns the direction of writing, and so disguises a
# name; halves of characters, as names that are no UTF-8 have them.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
_CONTROLS |= {*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)}
_VISIBLE = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}


def visible(text: str) -> str:
    """The text with its control characters spelled out, as \\x1b: a terminal would obey them."""
    return text if text.isprintable() else text.translate(_VISIBLE)


class Screen(Console):
    """A rich console on which strings are neither markup nor commands to the terminal; it guesses at no colours."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """The string as rich's text, made visible before it is measured."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The renderable's segments, what they say made visible; rich's own controls are apart from that."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


_formatwarning = warnings.formatwarning
LINES = 5


def _brief(text: str) -> str:
    """What a library says, made visible: of more than a few lines, such as a table of all tensors, the first."""
    lines = visible(text).splitlines()
    return cut("\n".join(lines if len(lines) <= LINES else [*lines[: LINES - 1], "..."]))


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return _brief(super().getMessage())


def _warning(*words: Any, **rest: Any) -> str:
    return _brief(_formatwarning(*words, **rest)) + "\n"


def guard_libraries() -> None:
    """Make visible and brief what libraries log and warn of from now on: some quote the files of a model."""
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = _warning
