"""Results on stdout, everything else on stderr, one document under --json."""

import json

import pytest
from rich.console import Console
from rich.table import Table

from medusa_cli import console
from medusa_cli.console import show_bar


def test_results_on_stdout_the_rest_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console.result("42 tokens")
    console.info("loading")
    console.warn("slow")
    console.error("broken")
    shown = capsys.readouterr()
    assert shown.out == "42 tokens\n"
    assert shown.err == "loading\nwarning: slow\nerror: broken\n"


def test_quiet_keeps_results_warnings_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(quiet=True)
    console.info("loading")
    console.warn("slow")
    console.result("done")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("done\n", "warning: slow\n")


def test_json_is_the_only_thing_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(json=True)
    console.result("a table")
    console.info("loading")
    console.emit_json({"tokens": 3, "text": "é"})
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"tokens": 3, "text": "é"}
    assert shown.err == "loading\n"


def test_text_is_no_markup_and_is_never_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    long = "[default: 2] /a/path " * 20
    console.info(long)
    console.result(long)
    shown = capsys.readouterr()
    assert shown.err.count("\n") == shown.out.count("\n") == 1
    assert "[default: 2]" in shown.out


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.error("first\n  second\n")
    assert capsys.readouterr().err == "error: first second\n"


def test_tables_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("head", "accuracy")
    table.add_row("1", "0.40")
    console.result(table)
    assert "0.40" in capsys.readouterr().out


def test_progress_is_silent_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("training", total=10) as bar:
        bar.advance(4)
        bar.describe("still training")
    assert capsys.readouterr() == ("", "")


def test_the_bar_shows_count_and_unit() -> None:
    terminal = Console(force_terminal=True, width=100, record=True, quiet=False)
    with show_bar(terminal, "training [1/2]", 1000, "tokens") as bar:
        bar.advance(1000)
        bar.describe("done [2/2]")
    text = terminal.export_text()
    assert "1,000/1,000 tokens" in text and "done [2/2]" in text


def test_the_footer_holds_the_last_row_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=20, height=10)
    monkeypatch.setattr(console, "err", terminal)
    monkeypatch.setattr(console, "out", terminal)
    console.configure()
    with console.footer() as footer:
        footer.show("x" * 50)
    text = written.getvalue()
    assert "\x1b[1;9r" in text and "\x1b[10;1H" in text and "x" * 19 in text and "x" * 20 not in text
    assert text.rindex("\x1b[r") > text.rindex("x")
    console.configure(quiet=True)
    before = len(text)
    with console.footer() as footer:
        footer.show("hidden")
    assert len(written.getvalue()) == before
