"""The only module that prints: results on stdout, what is said on the way on stderr, JSON under --json.

Texts of models, files and names reach a terminal with their control characters made visible; a pipe gets them as
they are, on stdout, where they are results.
"""

import io
import json as jsonlib
import logging
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from medusa_cli.errors import TERMINATED, cut, in_flags
from medusa_cli.screen import Screen, guard_libraries, visible

# soft_wrap in print keeps one message one line in a pipe.
out = Screen()
err = Screen(stderr=True)


@dataclass
class _Mode:
    quiet: bool = False
    json: bool = False


_mode = _Mode()


def configure(quiet: bool = False, json: bool = False) -> None:
    """Set what is shown: quiet drops info and progress, json replaces results by `emit_json`'s document."""
    _mode.quiet, _mode.json = quiet, json
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what its encoding has no letter for, as stderr does
    guard_libraries()
    logger = logging.getLogger("medusa_cli")
    if not any(isinstance(one, _Spoken) for one in logger.handlers):
        logger.addHandler(_Spoken())
        logger.setLevel(logging.INFO)
        logger.propagate = False


class _Spoken(logging.Handler):
    """What the core has to say, said as the commands say it."""

    def emit(self, record: logging.LogRecord) -> None:
        (warn if record.levelno >= logging.WARNING else info)(in_flags(record.getMessage()))


def info(message: str) -> None:
    """Say on stderr what is going on; silent when quiet."""
    if not _mode.quiet:
        err.print(Text(cut(visible(message))), soft_wrap=True)


def warn(message: str) -> None:
    """Say on stderr, in yellow and in one line, what may surprise."""
    err.print(Text(_line("warning", message), style="yellow"), soft_wrap=True)


def error(message: str) -> None:
    """Say on stderr, in red and in one line, what went wrong."""
    err.print(Text(_line("error", message), style="red"), soft_wrap=True)


def _line(kind: str, message: str) -> str:
    """A message in one line, cut once its control characters are spelled out, which makes it longer."""
    return cut(visible(f"{kind}: {' '.join(message.split())}"))


def result(renderable: RenderableType) -> None:
    """Print a result, plain text or any rich renderable, on stdout; nothing under --json."""
    if _mode.json:
        return
    if not isinstance(renderable, str):
        out.print(renderable)
    elif out.is_terminal:
        out.print(Text(visible(renderable)), soft_wrap=True)
    else:
        stream([(renderable + "\n", "")])


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """A table of cells, its columns set right but those that are named in `left`."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def stream(pieces: Iterable[tuple[str, str]]) -> None:
    """Write pieces of a text with a style each ("" for none) on stdout at once; a line ends only where they say."""
    pieces = list(pieces)
    plain = "".join(piece for piece, _ in pieces)
    if not out.is_terminal:
        out.file.write(plain)
    elif not any(style for _, style in pieces):
        out.file.write(visible(plain))  # not by rich, which would make blanks of tabs
    else:
        out.print(Text.assemble(*((visible(piece), style) for piece, style in pieces)), end="", soft_wrap=True)
    out.file.flush()


def trace() -> None:
    """Write the traceback of the exception that is being handled on stderr."""
    import traceback

    err.file.write(visible(traceback.format_exc()))


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

    with terminated(), show_bar(err, description, total, unit) as bar:
        yield bar


@contextmanager
def terminated() -> Iterator[None]:
    """Let SIGTERM end the program through every `finally`, which puts the terminal right, with the shell's code."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Footer:
    """One line at the bottom of the terminal that stays while text streams above it."""

    def __init__(self, live: bool) -> None:
        self._live = live

    def show(self, text: str) -> None:
        """Replace the footer's text."""
        if self._live:
            rows, columns = err.height, err.width
            # Save the cursor, go to the last row, clear it, write dimmed, and come back.
            err.file.write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{visible(text)[: columns - 1]}\x1b[0m\x1b8")
            err.file.flush()


@contextmanager
def footer() -> Iterator[Footer]:
    """Hold the terminal's last row for a Footer; does nothing when quiet, under --json, or without a terminal."""
    if not (err.is_terminal and out.is_terminal) or _mode.quiet or _mode.json:
        yield Footer(live=False)
        return
    with terminated():
        try:
            # Leave the last row, then let everything above it scroll alone (setting the region moves the cursor home).
            err.file.write(f"\n\x1b[A\x1b7\x1b[1;{err.height - 1}r\x1b8")
            err.file.flush()
            yield Footer(live=True)
        finally:
            err.file.write(f"\x1b7\x1b[r\x1b[{err.height};1H\x1b[2K\x1b8")
            err.file.flush()
