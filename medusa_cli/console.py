"""A terminal as other people's texts may use it: their control characters are shown, not sent."""

import io
import json as jsonlib
import logging
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from medusa_cli.errors import TERMINATED, cut, in_flags

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

    with terminated(), show_bar(err, description, total, unit) as bar:
        yield bar


@contextmanager
def bars() -> Iterator[Callable[..., None]]:
    """Yields a function that shows the progress of work in several parts, with a bar for each name.

    It takes the name, the units done, their number, the unit, and a note to show beside the name.
    """
    with ExitStack() as stack:
        opened: dict[str, Bar] = {}
        seen: Counter[str] = Counter()

        def show(name: str, done: int, total: int, unit: str = "tokens", note: str = "") -> None:
            if name not in opened:
                stack.close()
                opened[name] = stack.enter_context(progress(name, total, unit))
            opened[name].advance(done - seen[name])
            seen[name] = done
            if note:
                opened[name].describe(f"{name} ({note})")

        yield show


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


class _Rate(ProgressColumn):
    """Done of total, and units a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        done = f"{task.completed:,.0f}" + (f"/{task.total:,.0f}" if task.total is not None else "")
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text(f"{done} {self._unit}")
        shown = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        return Text(f"{done} {self._unit}, {shown}/s")


class _Shown(Progress):
    """Bars below a table of one row, once there is one."""

    cells: Mapping[str, str] = MappingProxyType({})

    def get_renderables(self) -> Iterator[RenderableType]:
        if self.cells:
            table = Table(*self.cells, box=None, pad_edge=False, header_style="dim")
            table.add_row(*self.cells.values())
            yield table
        yield from super().get_renderables()


class _Bar:
    def __init__(self, shown: _Shown, task: TaskID) -> None:
        self._shown, self._task = shown, task

    def advance(self, count: float = 1) -> None:
        """Count that many more units as done."""
        self._shown.advance(self._task, count)

    def describe(self, text: str) -> None:
        """Replace the text before the bar."""
        self._shown.update(self._task, description=visible(text))

    def show(self, cells: Mapping[str, str]) -> None:
        """Replace the table above the bar: column names and the cells of its row."""
        self._shown.cells = cells


@contextmanager
def show_bar(console: Console, description: str, total: float | None, unit: str) -> Iterator[_Bar]:
    """A live bar on the console until the block ends."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        _Rate(unit),
        TimeRemainingColumn(),
    )
    with _Shown(*columns, console=console) as shown:
        yield _Bar(shown, shown.add_task(visible(description), total=total))
