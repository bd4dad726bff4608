"""Printing of results, messages and progress, with control characters spelled out."""

import io
import json as jsonlib
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from medusa_cli.errors import TERMINATED, cut, in_flags
from medusa_cli.progress import ShowProgress

# The control characters of ASCII and Latin-1 except newline and tab; marks that change the writing
# direction and so can disguise a name; and lone surrogates, which file names may contain.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
_CONTROLS |= {*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)}
_VISIBLE = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
LINES = 5  # maximum number of lines of a library's message
LINE_S = 10.0  # minimum seconds between two progress lines


def visible(text: str) -> str:
    """Returns a text with its control characters spelled out, such as \\x1b."""
    return text if text.isprintable() else text.translate(_VISIBLE)


class Screen(Console):
    """Prints as rich's console does, but interprets strings neither as markup nor as terminal commands.

    plain: True if only text is written, as NO_COLOR or TERM=dumb requests. rich itself would still move the cursor.
    """

    def __init__(self, **options: Any) -> None:
        dumb = os.environ.get("TERM") in ("dumb", "unknown")
        self.plain = dumb or bool(os.environ.get("NO_COLOR"))
        own: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
        own["color_system"] = None if self.plain else "auto"
        super().__init__(**{**own, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)  # before rich measures the text

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


out, err = Screen(), Screen(stderr=True)
# Loggers whose hints do not help: the hints are about kernels that a CPU does not need, and about
# configs that are read correctly.
HINTS = ("bitsandbytes", "transformers.integrations.heterogeneity")
# column: the cursor's column after streamed text.
_mode = SimpleNamespace(quiet=False, json=False, column=0)


def configure(quiet: bool = False, json: bool = False) -> None:
    """Configures the output: quiet drops info and progress; json replaces results with one document (`emit_json`)."""
    _mode.quiet, _mode.json = quiet, json
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escapes characters that the encoding lacks, as stderr does.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Libraries quote a model's files in logs and warnings, so control characters are spelled out
    # there, too.
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = _format_warning
    for name in HINTS:
        logging.getLogger(name).setLevel(logging.ERROR)
    logger = logging.getLogger("medusa_cli")
    if not any(isinstance(handler, _LogHandler) for handler in logger.handlers):
        logger.addHandler(_LogHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _brief(text: str) -> str:
    """Returns the first lines of a library's message (it may list all tensors), with control characters spelled out."""
    lines = visible(text).splitlines()
    return cut("\n".join(lines if len(lines) <= LINES else [*lines[: LINES - 1], "..."]))


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return _brief(super().getMessage())


_formatwarning = warnings.formatwarning


def _format_warning(*words: Any, **rest: Any) -> str:
    return _brief(_formatwarning(*words, **rest)) + "\n"


class _LogHandler(logging.Handler):
    """Prints this package's log messages, with settings written as flags."""

    def emit(self, record: logging.LogRecord) -> None:
        (warn if record.levelno >= logging.WARNING else info)(in_flags(record.getMessage()))


def info(message: str) -> None:
    """Prints an informational message to stderr, unless quiet."""
    if not _mode.quiet:
        err.print(Text(cut(visible(message))), soft_wrap=True)


def warn(message: str) -> None:
    """Prints a warning to stderr, on one line."""
    _print_line("warning", message, "yellow")


def error(message: str) -> None:
    """Prints an error to stderr, on one line."""
    _print_line("error", message, "red")


def _print_line(kind: str, message: str, style: str) -> None:
    # The message is cut last, because spelling out control characters makes it longer.
    text = cut(visible(f"{kind}: {' '.join(message.split())}"))
    err.print(Text(text, style=style), soft_wrap=True)


def result(renderable: RenderableType) -> None:
    """Prints a text or any rich renderable to stdout; does nothing with --json."""
    if _mode.json:
        return
    if not isinstance(renderable, str):
        out.print(renderable)
    elif out.is_terminal:
        out.print(Text(visible(renderable)), soft_wrap=True)
    else:
        stream([(renderable + "\n", "")])


def emit_json(obj: Any) -> None:
    """Prints one JSON document to stdout, with JSON's own escapes if the encoding lacks characters."""
    escaped = "utf" not in (sys.stdout.encoding or "utf-8").lower()
    sys.stdout.write(jsonlib.dumps(obj, indent=1, ensure_ascii=escaped) + "\n")
    sys.stdout.flush()


def grid(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str] = (),
    caption: str = "",
) -> Group:
    """Returns a table whose columns are right-justified, except those in `left`.

    A table that is wider than the terminal is split into several tables, each of which begins with the first column.
    """
    lines = [[visible(cell) for cell in row] for row in rows]
    names = [max(map(len, name.split()), default=0) for name in columns]
    widths = [max([names[i], *(cell_len(line[i]) for line in lines)]) for i in range(len(columns))]
    parts = [[0]]
    for i in range(1, len(columns)):
        if len(parts[-1]) > 1 and 1 + sum(widths[j] + 2 for j in (*parts[-1], i)) > out.width:
            parts.append([0])
        parts[-1].append(i)
    tables = [Table(collapse_padding=True, pad_edge=False) for _ in parts]
    tables[0].title = title
    for table, part in zip(tables, parts, strict=True):
        for i in part:
            justify: JustifyMethod = "left" if columns[i] in left else "right"
            width = min(widths[i], out.width // 2)
            table.add_column(columns[i], justify=justify, width=width, overflow="fold")
        for line in lines:
            table.add_row(*(line[i] for i in part))
    return Group(*tables, *([Text(visible(caption), style="italic")] if caption else []))


def stream(pieces: Iterable[tuple[str, str]]) -> None:
    """Writes styled pieces of text to stdout immediately, without adding a line break."""
    pieces = list(pieces)
    plain = "".join(piece for piece, _ in pieces)
    _mode.column = column_after(visible(plain), _mode.column, out.width) if out.is_terminal else 0
    if not out.is_terminal:
        out.file.write(plain)
    elif not any(style for _, style in pieces):
        out.file.write(visible(plain))  # rich would turn tabs into spaces
    else:
        text = Text.assemble(*((visible(piece), style) for piece, style in pieces))
        out.print(text, end="", soft_wrap=True)
    out.file.flush()


def column_after(text: str, column: int, width: int) -> int:
    """Returns the cursor's column after a text is written at `column`; `width` if the line is full."""
    for letter in text:
        size = cell_len(letter)
        if letter == "\n":
            column = 0
        elif letter == "\t":
            column = min(column + 8 - column % 8, width - 1)
        else:
            column = size if column + size > width else column + size
    return column


def trace() -> None:
    """Writes the traceback of the current exception to stderr."""
    import traceback

    err.file.write(visible(traceback.format_exc()))


class _Rate(ProgressColumn):
    """Shows the units done, the total, and the units per second."""

    def render(self, task: Task) -> Text:
        done = f"{task.completed:,.0f}" + (f"/{task.total:,.0f}" if task.total is not None else "")
        speed = task.finished_speed or task.speed
        rate = ""
        if speed is not None:
            rate = f", {speed:,.0f}/s" if speed >= 10 else f", {speed:.2g}/s"
        return Text(f"{done} {task.fields['unit']}{rate}")


class _Lines:
    """Writes progress lines, at least LINE_S seconds apart, if no bar can be shown."""

    def __init__(self) -> None:
        self._due = time.monotonic() + LINE_S
        # For each name: the start time, and the units already done at that time.
        self._begun: dict[str, tuple[float, int]] = {}

    def show(
        self, name: str, done: int, total: int | None, unit: str = "tokens", note: str = ""
    ) -> None:
        now = time.monotonic()
        begun, before = self._begun.setdefault(name, (now, done))
        if now < self._due:
            return
        self._due = now + LINE_S
        text = f"{name} ({note})" if note else name
        text += f": {done:,}" + (f"/{total:,.0f} {unit}" if total is not None else f" {unit}")
        if done > before:
            rate = (done - before) / (now - begun)
            text += f", {rate:,.0f}/s" if rate >= 10 else f", {rate:.2g}/s"
            if total is not None:
                text += f", {timedelta(seconds=round((total - done) / rate))} left"
        info(text)


@contextmanager
def progress(
    description: str, total: int | None = None, unit: str = "tokens"
) -> Iterator[Callable[[int], None]]:
    """Shows one progress bar, and yields a function that adds to the units done."""
    with bars() as show:
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            show(description, done, total, unit)

        advance(0)
        yield advance


@contextmanager
def fetching(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows the progress of a download in MB; yields a function that takes the bytes done."""
    with bars() as show:
        yield lambda done: show(name, done // 10**6, total and total // 10**6, "MB")


@contextmanager
def bars() -> Iterator[ShowProgress]:
    """Yields a function that shows the progress of work in several parts, with one bar per name.

    If the terminal cannot show bars, the function writes lines. Its arguments are the name, the
    units done, the total (which may change), the unit, and a note to show next to the name.
    """
    if not err.is_terminal or err.plain:
        with terminated():
            yield _Lines().show
        return
    name_column = TextColumn("{task.description}", markup=False)
    columns = (name_column, BarColumn(), _Rate(), TimeRemainingColumn())
    with terminated(), Progress(*columns, console=err, disable=_mode.quiet) as shown:
        tasks: dict[str, TaskID] = {}

        def show(
            name: str, done: int, total: int | None, unit: str = "tokens", note: str = ""
        ) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(visible(name), total=total, unit=unit)
            text = visible(f"{name} ({note})" if note else name)
            shown.update(tasks[name], completed=done, total=total, description=text)

        yield show


@contextmanager
def terminated() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit, so that every `finally` runs and the terminal is restored."""

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


@contextmanager
def footer() -> Iterator[Callable[[str], None]]:
    """Yields a function that prints to the terminal's last row, below streamed text.

    The function does nothing with --quiet or --json, or if the terminal cannot show the row.
    """
    if not (err.is_terminal and out.is_terminal) or err.plain or _mode.quiet or _mode.json:
        yield lambda text: None
        return

    def write(codes: str) -> None:
        err.file.write(codes)
        err.file.flush()

    def show(text: str) -> None:
        if _mode.column == out.width:
            # After a full line, terminals wrap at the next character. Many terminals forget this
            # when the cursor is restored.
            return
        # Save the cursor, go to the last row, clear it, write dimmed text, restore the cursor.
        write(
            f"\x1b7\x1b[{err.height};1H\x1b[2K\x1b[2m{visible(text)[: err.width - 1]}\x1b[0m\x1b8"
        )

    _mode.column = 0
    with terminated():
        try:
            # Leave the last row, then make only the rows above it scroll. Setting this scroll
            # region moves the cursor home, so the cursor is saved and restored.
            write(f"\n\x1b[A\x1b7\x1b[1;{err.height - 1}r\x1b8")
            yield show
        finally:
            write(f"\x1b7\x1b[r\x1b[{err.height};1H\x1b[2K\x1b8")
