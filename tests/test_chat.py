"""`medusa chat`: one shot, a piped session, its commands, interruption, streaming of split characters."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import Result

from medusa_cli.api import Stream
from medusa_cli.decode import Piece
from medusa_cli.decode.stream import TextStream
from tests.helpers import medusa, save_model, save_run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_run(folder / "mine", save_model(folder / "model"))
    return folder


def chat(place: Path, *words: str, input: str | bytes | None = None) -> Result:
    common = ["--run", str(place / "mine"), "--dtype", "fp32", "--max-new-tokens", "15"]
    return medusa("chat", *common, *words, input=input)


def test_one_shot_prints_the_answer_alone_on_stdout(place: Path) -> None:
    drafted, plain = chat(place, "--prompt", "w1 w2"), chat(place, "--prompt", "w1 w2", "--baseline")
    assert drafted.exit_code == plain.exit_code == 0, drafted.stderr
    assert drafted.stdout == plain.stdout != ""
    assert "tokens a step" in drafted.stderr


def test_a_model_without_a_drafter_chats_by_lookups_or_says_what_to_do(place: Path) -> None:
    words = [
        "chat",
        "--model",
        str(place / "model"),
        "--dtype",
        "fp32",
        "--prompt",
        "w1 w2 w1 w2",
        "--max-new-tokens",
        "15",
    ]
    refused = medusa(*words)
    assert refused.exit_code == 1 and "no drafter ships" in refused.stderr and "--lookup" in refused.stderr
    shown, plain = medusa(*words, "--lookup"), medusa(*words, "--baseline")
    assert shown.exit_code == plain.exit_code == 0, shown.stderr
    assert shown.stdout == plain.stdout != "" and "n-grams" in shown.stderr
    neither = medusa(*words, "--lookup", "--baseline")
    assert neither.exit_code == 2 and "--baseline and --lookup exclude each other" in neither.stderr


def test_json_holds_answer_and_figures(place: Path) -> None:
    document = json.loads(chat(place, "--prompt", "w1 w2", "--json").stdout)
    assert document["answer"] and document["acceptance_rate"] >= 1 and document["tokens"] <= 15


def test_a_piped_session_answers_line_by_line_with_history(place: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    shown = chat(place, input=f"w1\nw2\n/save {saved}\n/stats\n/help\n/exit\nw3\n")
    assert shown.exit_code == 0, shown.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert "tokens/s" in shown.stdout and "/system TEXT" in shown.stdout
    assert messages[1]["content"] in shown.stdout


def test_system_and_clear_begin_anew(place: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    chat(place, input=f"w1\n/system w5 w6\nw2\n/save {saved}\n")
    messages = json.loads(saved.read_text())["messages"]
    assert messages[0] == {"role": "system", "content": "w5 w6"} and len(messages) == 3
    chat(place, input=f"w1\n/clear\n/save {saved}\n")
    assert json.loads(saved.read_text())["messages"] == []


def test_mistakes_cost_a_line_not_the_session(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = chat(place, input=f"/bogus\n/save\n/save {tmp_path}/file/x.json\n/save {tmp_path}\nw1\n")
    assert shown.exit_code == 1  # a script must know
    errors = [line for line in shown.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 4 and shown.stdout.strip()
    assert errors[3] == f"error: {tmp_path}: is a directory; check the path"


def test_bytes_that_are_no_utf8_cost_a_character_not_the_session(place: Path) -> None:
    shown = chat(place, input=b"w1 \xff\xfe w2\nw3\n")
    assert shown.exit_code == 0 and shown.stderr.count("tokens a step") == 2, shown.output


def test_ctrl_c_stops_the_answer_and_keeps_the_session(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Stream.step, []

    def interrupted(stream: Stream) -> list[Piece] | None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(stream)

    monkeypatch.setattr(Stream, "step", interrupted)
    saved = tmp_path / "talk.json"
    shown = chat(place, input=f"w1\nw2\n/save {saved}\n")
    assert shown.exit_code == 0 and "(stopped)" in shown.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert len(messages) == 4 and len(messages[1]["content"]) < len(messages[3]["content"])


def test_a_prompt_longer_than_the_context_is_told(place: Path) -> None:
    shown = chat(place, "--prompt", "w1 " * 600)
    assert shown.exit_code == 1 and "has a context of 512" in shown.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [(["--json"], "--json needs --prompt"), (["--prompt", " "], "--prompt is empty"), (["--top-k", "-1"], "--top-k")],
)
def test_usage_mistakes_exit_with_two(place: Path, words: list[str], part: str) -> None:
    shown = chat(place, *words)
    assert shown.exit_code == 2 and part in shown.stderr


def test_accepted_runs_are_coloured_on_request(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from medusa_cli import console

    wide = Console(force_terminal=True, color_system="standard", width=200, highlight=False)
    monkeypatch.setattr(console, "out", wide)
    steps = iter([[Piece("w2 ", False)], [Piece("w3 ", True), Piece("w4 ", True), Piece("w5", False)], None])
    monkeypatch.setattr(Stream, "step", lambda stream: next(steps))
    with wide.capture() as shown:
        chat(place, "--prompt", "w1 w2", "--show-accepted", "--quiet")
    coloured = re.findall("\x1b\\[1;32m(.*?)\x1b\\[0m", shown.get())
    assert "".join(coloured).split() == ["w3", "w4"]


class Bytes:
    """A backbone of which only decode is asked: ids are bytes."""

    def decode(self, ids) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_streamed_pieces_join_to_the_text_and_split_no_character(size: int) -> None:
    text = "Grüße, 世界!\nnext line 🙂 end\n\nlast 漢"
    data = list(text.encode())
    stream = TextStream(Bytes())  # type: ignore[arg-type]
    pieces = [stream.add(data[i : i + size]) for i in range(0, len(data), size)]
    assert "".join(pieces) + stream.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)
