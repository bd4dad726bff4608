"""The console: results on stdout, the rest on stderr; no control characters, and a terminal left as it was."""

import io
import json
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from medusa_cli import console
from medusa_cli.console import Screen, visible
from medusa_cli.errors import LONGEST, TERMINATED

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rname\x08\x7f\u202egnp\udcff"
HARMLESS = "tab\there, Grüße, 世界 🙂 [bold]no markup[/bold] :smile:"
CONTROLS = [
    chr(code)
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0xDCFF)
    if chr(code) not in "\n\t"
]


@pytest.mark.parametrize("quiet", [False, True])
def test_results_on_stdout_the_rest_on_stderr(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    console.configure(quiet=quiet)
    for say in (console.result, console.info, console.warn, console.error):
        say("first\n  second" if say is console.error else "a text")
    info = "" if quiet else "a text\n"
    assert capsys.readouterr() == ("a text\n", f"{info}warning: a text\nerror: first second\n")


def test_json_is_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(json=True)
    console.result("a table")
    console.info("loading")
    console.emit_json({"tokens": 3, "text": "é\x1b"})
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"tokens": 3, "text": "é\x1b"}
    assert "\x1b" not in shown.out
    assert shown.err == "loading\n"


def test_text_is_no_markup_and_is_never_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    long = "[default: 2] /a/path " * 20
    console.info(long)
    console.result(long)
    shown = capsys.readouterr()
    assert shown.err.count("\n") == shown.out.count("\n") == 1
    assert "[default: 2]" in shown.out


def test_a_pipe_gets_results_as_they_are_and_no_progress(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.result("a\x1b[2J\r\tb")
    console.stream([("c\x1b[2J", "bold green")])
    with console.progress("training", total=10) as advance:
        advance(4)
    assert capsys.readouterr() == ("a\x1b[2J\r\tb\nc\x1b[2J", "")


def test_text_that_stdout_cannot_encode_is_no_error() -> None:
    code = "from medusa_cli import console; console.configure(); console.result('w\\udcff 🙂')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"w\\udcff \\U0001f642\n", done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_stays_json_in_every_encoding(encoding: str) -> None:
    code = "from medusa_cli import console; console.configure(json=True); console.emit_json('é 🙂')"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert json.loads(done.stdout.decode(encoding)) == "é 🙂", done.stderr


@pytest.mark.parametrize("say", [console.warn, console.error])
@pytest.mark.parametrize(
    "value", ["x" * 100_000, "\x1b" * LONGEST, "x\n" * 200], ids=["long", "controls", "lines"]
)
def test_a_message_keeps_its_ends(
    say: Callable[[str], None], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say(f"the value {value} is not valid; give a shorter one")
    text = capsys.readouterr().err
    assert len(text) <= LONGEST + len("\n")
    assert text.count("\n") == 1
    assert "the value " in text
    assert text.endswith("give a shorter one\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Makes both streams a terminal without colors, on which no escape sequence is the console's own."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    written = io.StringIO()
    screen = Screen(file=written, force_terminal=True, color_system=None, width=200, height=10)
    monkeypatch.setattr(console, "out", screen)
    monkeypatch.setattr(console, "err", screen)
    return written


def harmless(terminal: io.StringIO) -> str:
    """Returns the written text; fails if a control character was sent."""
    text = terminal.getvalue()
    assert not [control for control in CONTROLS if control in text], repr(text)
    return text


def test_control_characters_are_spelled_out() -> None:
    assert (
        visible(HOSTILE) == "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\x0dname\\x08\\x7f\\u202egnp\\udcff"
    )
    assert visible(HARMLESS + "\n") == HARMLESS + "\n"


@pytest.mark.parametrize("say", [console.info, console.warn, console.error, console.result])
def test_messages_and_results_are_escaped(
    say: Callable[[str], None], terminal: io.StringIO
) -> None:
    say(HOSTILE)
    say(HARMLESS.replace("\t", " "))
    assert "\\x1b]0;owned\\x07\\x1b[2J" in harmless(terminal)
    assert HARMLESS.replace("\t", " ") in harmless(terminal)


def test_streamed_text_is_escaped_and_keeps_its_tabs(terminal: io.StringIO) -> None:
    console.stream([("a\tb\x1b", ""), ("[2J\n", "")])
    console.stream([("c\x1b[2J", "bold green")])
    assert harmless(terminal) == "a\tb\\x1b[2J\nc\\x1b[2J"


@pytest.mark.parametrize("cell", [HOSTILE, Text(HOSTILE)], ids=["str", "Text"])
def test_tables_are_escaped(cell: str | Text, terminal: io.StringIO) -> None:
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(cell)
    table.add_row(HARMLESS)
    console.result(table)
    console.result(Panel(cell))
    assert "[bold]no markup[/bold] :smile:" in harmless(terminal)
    assert harmless(terminal).count(visible(HOSTILE)) == (5 if isinstance(cell, str) else 3)


def test_a_bar_shows_count_and_unit_and_is_escaped(terminal: io.StringIO) -> None:
    with console.progress("training \x1b]0;owned\x07", total=1000) as advance:
        advance(1000)
    text = terminal.getvalue()
    assert "\x1b]0;" not in text
    assert "\\x1b]0;owned\\x07" in text
    assert "1,000/1,000 tokens" in text


class Terminal:
    """A program on a pseudo-terminal of its own, and its output."""

    def __init__(self, code: str, **settings: str) -> None:
        self.master, slave = pty.openpty()
        environment = {
            **os.environ,
            "TERM": "xterm",
            "LINES": "24",
            "COLUMNS": "80",
            "NO_COLOR": "",
            **settings,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            close_fds=True,
        )
        os.close(slave)
        self.text = ""

    def until(self, part: str = "", seconds: float = 120) -> str:
        """Reads until a part was seen, or to the end; returns all output."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (part and part in self.text):
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # on Linux: the other side is closed
                    return self.text
        assert not part or part in self.text, self.text
        return self.text


START = "import logging, time, warnings\nfrom medusa_cli import console\nconsole.configure()\n"
FOOTER = (
    f"{START}with console.footer() as footer: footer('12 tokens'); "
    "console.stream([('ready\\n', '')]); time.sleep(99)"
)
BAR = f"{START}with console.progress('ready', total=2): time.sleep(99)"
LIBRARIES = f"""{START}
logging.getLogger("transformers").warning("the class %s", "\\x1b]0;owned\\x07")
warnings.warn("the class \\x1b]0;owned\\x07")
try:
    raise ValueError("\\x1b]0;owned\\x07")
except ValueError:
    console.trace()
"""


EVERYTHING = f"""{START}
console.warn("a warning")
console.stream([("drafted", "bold green")])
console.err.print("dimmed", style="dim")
with console.footer() as footer:
    footer("12 tokens")
with console.progress("training", total=2) as advance:
    advance(1)
console.result(console.grid("title", ("a", "b"), [("1", "2")]))
"""


def test_footer_is_left_alone_while_the_cursor_stands_behind_a_full_line(
    terminal: io.StringIO,
) -> None:
    """Terminals that save the cursor there come back without the pending line break: the next letter is lost."""
    drawn = []
    with console.footer() as footer:
        for piece in ("a" * 199, "b", "c", "\n" + "世" * 99, "d", "e", "界" * 99, "f"):
            console.stream([(piece, "")])
            before = len(terminal.getvalue())
            footer("12 tokens")
            drawn.append(len(terminal.getvalue()) > before)
    assert drawn == [True, False, True, True, True, False, True, True]


def test_progress_without_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    with console.bars() as show:
        for second in range(61):
            clock[0] = float(second)
            show("distilling", 70 * second, 7000, note=f"{second // 9} of 12 conversations")
    with console.progress("decoding", total=40, unit="answers") as advance:
        for _ in range(20):
            clock[0] += 1
            advance(1)
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert not shown.out
    assert len(lines) == 8
    assert all("distilling" in line for line in lines[:6])
    assert all(part in lines[0] for part in ("700/7,000", "70/s", "0:01:30"))
    assert all(part in lines[7] for part in ("decoding", "20/40 answers", "0:00:20"))
    console.configure(quiet=True)
    with console.bars() as show:
        clock[0] += 100
        show("training", 1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("settings", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=str)
def test_a_plain_terminal_gets_no_control_sequences(settings: dict[str, str]) -> None:
    assert "\x1b" in Terminal(EVERYTHING).until()
    text = Terminal(EVERYTHING, **settings).until()
    assert "\x1b" not in text
    assert "drafted" in text
    assert "title" in text


def test_messages_of_libraries_are_escaped_and_brief() -> None:
    text = Terminal(LIBRARIES).until()
    assert "\x1b]0;" not in text
    assert text.count("\\x1b]0;owned\\x07") >= 3
    console.configure()
    report = "the tensor x is missing\n" * 45 + "x" * 100_000
    logged = logging.getLogRecordFactory()(
        "x", logging.WARNING, "x.py", 1, report, (), None
    ).getMessage()
    for text in (logged, warnings.formatwarning(report, UserWarning, "x.py", 1)):
        assert "the tensor x is missing" in text
        assert len(text.splitlines()) == 5
        assert len(text) <= LONGEST + 1


@pytest.mark.parametrize(
    ("code", "restored"), [(FOOTER, "\x1b7\x1b[r"), (BAR, "\x1b[?25h")], ids=["footer", "bar"]
)
def test_sigterm_leaves_the_terminal_as_it_was(code: str, restored: str) -> None:
    seen = Terminal(code)
    before = seen.until("ready")
    seen.process.send_signal(signal.SIGTERM)
    after = seen.until()[len(before) :]
    assert seen.process.wait(30) == TERMINATED == 143
    assert restored in after
    assert "Traceback" not in after
