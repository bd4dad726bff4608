"""What reaches a terminal: no control characters of other people's texts, and a terminal that is left as it was."""

import io
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from medusa_cli import console
from medusa_cli.console import Screen, visible
from medusa_cli.errors import INTERRUPTED, LONGEST, TERMINATED
from tests.helpers import save_model

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rname\x08\x7f\u202egnp\udcff"
HARMLESS = "tab\there, Grüße, 世界 🙂 [bold]no markup[/bold] :smile:"
CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0xDCFF) if chr(code) not in "\n\t"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Both streams as one terminal without colours, so that every escape sequence in it is somebody's text."""
    console.configure()
    written = io.StringIO()
    screen = Screen(file=written, force_terminal=True, color_system=None, width=200)
    monkeypatch.setattr(console, "out", screen)
    monkeypatch.setattr(console, "err", screen)
    yield written
    console.configure()


def shown(terminal: io.StringIO) -> str:
    """What was written; fails where a control character was sent."""
    text = terminal.getvalue()
    assert not [one for one in CONTROLS if one in text], repr(text)
    return text


def test_a_control_character_is_spelled_out() -> None:
    assert visible(HOSTILE) == "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\x0dname\\x08\\x7f\\u202egnp\\udcff"
    assert visible(HARMLESS + "\n") == HARMLESS + "\n"


@pytest.mark.parametrize("say", [console.info, console.warn, console.error, console.result])
def test_messages_and_results_are_made_visible(say, terminal: io.StringIO) -> None:
    say(HOSTILE)
    say(HARMLESS.replace("\t", " "))
    assert "\\x1b]0;owned\\x07\\x1b[2J" in shown(terminal)
    assert HARMLESS.replace("\t", " ") in shown(terminal)


def test_streamed_text_is_made_visible_and_keeps_its_tabs(terminal: io.StringIO) -> None:
    console.stream([("a\tb\x1b", ""), ("[2J\n", "")])
    console.stream([("c\x1b[2J", "bold green")])
    assert shown(terminal) == "a\tb\\x1b[2J\nc\\x1b[2J"


@pytest.mark.parametrize("cell", [HOSTILE, Text(HOSTILE)], ids=["str", "Text"])
def test_tables_are_made_visible(cell: str | Text, terminal: io.StringIO) -> None:
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(cell)
    table.add_row(HARMLESS)
    console.result(table)
    console.result(Panel(cell))
    assert "[bold]no markup[/bold] :smile:" in shown(terminal)
    assert shown(terminal).count(visible(HOSTILE)) == (5 if isinstance(cell, str) else 3)


def test_a_progress_bar_is_made_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    screen = Screen(file=written, force_terminal=True, width=200)
    monkeypatch.setattr(console, "err", screen)
    console.configure()
    with console.progress("training \x1b]0;owned\x07", total=2) as bar:
        bar.describe("question \x1b]0;owned\x07")
        bar.show({"loss\x1b]0;": "1\x1b]0;"})
        bar.advance()
    assert "\x1b]0;" not in written.getvalue() and "\\x1b]0;owned\\x07" in written.getvalue()


def test_a_pipe_gets_results_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure()
    console.result("a\x1b[2J\r\tb")
    console.stream([("c\x1b[2J", "bold green")])
    assert capsys.readouterr().out == "a\x1b[2J\r\tb\nc\x1b[2J"
    console.emit_json({"name": "\x1b[2J"})
    assert capsys.readouterr().out == '{\n "name": "\\u001b[2J"\n}\n'


def test_what_standard_output_cannot_encode_is_no_error() -> None:
    code = "from medusa_cli import console; console.configure(); console.result('w\\udcff 🙂')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert done.returncode == 0 and done.stdout == b"w\\udcff \\U0001f642\n", done.stderr


@pytest.mark.parametrize("say", [console.warn, console.error])
def test_no_message_is_longer_than_five_lines(say, capsys: pytest.CaptureFixture[str]) -> None:
    console.configure()
    for value in ("x" * 100_000, "\x1b" * LONGEST, "x\n" * 200):
        say(f"the value {value} cannot be; give a shorter one")
        said = capsys.readouterr().err
        assert len(said) <= LONGEST + len("\n") and said.count("\n") == 1
        assert "the value " in said and said.endswith(" cannot be; give a shorter one\n")


class Seen:
    """A program on a terminal of its own; what it wrote."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "LINES": "24", "COLUMNS": "80"}
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True
        )
        os.close(slave)
        self.text = ""

    def until(self, part: str = "", seconds: float = 120) -> str:
        """Read until a part was seen, or to the end; all that was written."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (part and part in self.text):
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # so Linux says that the other side is closed
                    return self.text
        assert not part or part in self.text, self.text
        return self.text


FOOTER = """
import time
from medusa_cli import console
console.configure()
with console.footer() as footer:
    footer.show("12 tokens")
    console.stream([("ready\\n", "")])
    time.sleep(120)
"""
BAR = """
import time
from medusa_cli import console
console.configure()
with console.progress("ready", total=2):
    time.sleep(120)
"""


LIBRARIES = """
import logging, warnings
from medusa_cli import console
console.configure()
logging.getLogger("transformers").warning("the class %s", "\x1b]0;owned\x07")
warnings.warn("the class \x1b]0;owned\x07")
try:
    raise ValueError("\x1b]0;owned\x07")
except ValueError:
    console.trace()
"""


def test_what_libraries_say_is_made_visible() -> None:
    said = Seen("-c", LIBRARIES).until()
    assert "\x1b]0;" not in said and said.count("\\x1b]0;owned\\x07") >= 3


def test_what_libraries_say_is_of_five_lines_at_most() -> None:
    console.configure()
    report = "the tensor x is missing\n" * 45 + "x" * 100_000
    logged = logging.getLogRecordFactory()("x", logging.WARNING, "x.py", 1, report, (), None).getMessage()
    for said in (logged, warnings.formatwarning(report, UserWarning, "x.py", 1)):
        assert "the tensor x is missing" in said and len(said.splitlines()) == 5 and len(said) <= LONGEST + 1


@pytest.mark.parametrize(("code", "restored"), [(FOOTER, "\x1b7\x1b[r"), (BAR, "\x1b[?25h")], ids=["footer", "bar"])
def test_sigterm_leaves_the_terminal_as_it_was(code: str, restored: str) -> None:
    seen = Seen("-c", code)
    before = seen.until("ready")
    seen.process.send_signal(signal.SIGTERM)
    after = seen.until()[len(before) :]
    assert seen.process.wait(30) == TERMINATED == 143
    assert restored in after and "Traceback" not in after


def test_sigterm_is_the_systems_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with console.terminated():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_ends_a_single_answer_with_130(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", positions=20_000)
    for path in tmp_path.glob("model/*config.json"):  # nothing but Ctrl-C shall end it
        path.write_text(re.sub(r'"eos_token(_id)?": [^,\n]+', r'"eos_token\1": null', path.read_text()))
    words = ["chat", "--model", model, "--baseline", "--dtype", "fp32", "--max-new-tokens", "19000", "--prompt", "w1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "medusa_cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # it answers
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED == 130, err.decode()
    assert err.decode().endswith("interrupted\n") and "(stopped)" in err.decode()
    assert out  # and what came so far was shown
