"""The only module that prints: results on stdout, what is said on the way on stderr, JSON under --json."""

import json as jsonlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.text import Text

# Neither guesses at colours for numbers and paths; soft_wrap in print keeps one message one line in a pipe.
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@dataclass
class _Mode:
    quiet: bool = False
    json: bool = False


_mode = _Mode()


def configure(quiet: bool = False, json: bool = False) -> None:
    """Set what is shown: quiet drops info and progress, json replaces results by `emit_json`'s document."""
    _mode.quiet, _mode.json = quiet, json
    logger = logging.getLogger("medusa_cli")
    if not any(isinstance(one, _Spoken) for one in logger.handlers):
        logger.addHandler(_Spoken())
        logger.setLevel(logging.INFO)
        logger.propagate = False


class _Spoken(logging.Handler):
    """What the core has to say, said as the commands say it."""

    def emit(self, record: logging.LogRecord) -> None:
        (warn if record.levelno >= logging.WARNING else info)(record.getMessage())


def info(message: str) -> None:
    """Say on stderr what is going on; silent when quiet."""
    if not _mode.quiet:
        err.print(Text(message), soft_wrap=True)


def warn(message: str) -> None:
    """Say on stderr, in yellow, what may surprise."""
    err.print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)


def error(message: str) -> None:
    """Say on stderr, in red and in one line, what went wrong."""
    err.print(Text(f"error: {' '.join(message.split())}", style="red"), soft_wrap=True)


def result(renderable: RenderableType) -> None:
    """Print a result, plain text or any rich renderable, on stdout; nothing under --json."""
    if _mode.json:
        return
    if isinstance(renderable, str):
        out.print(Text(renderable), soft_wrap=True)
    else:
        out.print(renderable)


def emit_json(obj: Any) -> None:
    """Write one JSON document on stdout."""
    sys.stdout.write(jsonlib.dumps(obj, indent=1, ensure_ascii=False) + "\n")
    sys.stdout.flush()


class Bar(Protocol):
    """What `progress` yields."""

    def advance(self, count: float = 1) -> None:
        """Count that many more units as done."""

    def describe(self, text: str) -> None:
        """Replace the text before the bar."""

    def show(self, cells: Mapping[str, str]) -> None:
        """Replace the table above the bar: column names and the cells of its one row."""


class _Silent:
    def advance(self, count: float = 1) -> None:
        """Nothing to show."""

    def describe(self, text: str) -> None:
        """Nothing to show."""

    def show(self, cells: Mapping[str, str]) -> None:
        """Nothing to show."""


@contextmanager
def progress(description: str, total: float | None = None, unit: str = "tokens") -> Iterator[Bar]:
    """A bar on stderr: count, units a second, time left; silent when quiet or where stderr is no terminal."""
    if _mode.quiet or not err.is_terminal:
        yield _Silent()
        return
    from medusa_cli.progress import show_bar

    with show_bar(err, description, total, unit) as bar:
        yield bar


class Footer:
    """One line at the bottom of the terminal that stays while text streams above it."""

    def __init__(self, live: bool) -> None:
        self._live = live

    def show(self, text: str) -> None:
        """Replace the footer's text."""
        if self._live:
            rows, columns = err.height, err.width
            # Save the cursor, go to the last row, clear it, write dimmed, and come back.
            err.file.write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{text[: columns - 1]}\x1b[0m\x1b8")
            err.file.flush()


@contextmanager
def footer() -> Iterator[Footer]:
    """Hold the terminal's last row for a Footer; does nothing when quiet, under --json, or without a terminal."""
    live = err.is_terminal and out.is_terminal and not _mode.quiet and not _mode.json
    if live:
        # Leave the last row, then let everything above it scroll alone (setting the region moves the cursor home).
        err.file.write(f"\n\x1b[A\x1b7\x1b[1;{err.height - 1}r\x1b8")
        err.file.flush()
    try:
        yield Footer(live)
    finally:
        if live:
            err.file.write(f"\x1b7\x1b[r\x1b[{err.height};1H\x1b[2K\x1b8")
            err.file.flush()
