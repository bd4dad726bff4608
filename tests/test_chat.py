"""`medusa chat`: one prompt, a piped conversation and its commands, interruption, the end of the context."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result, _NamedTextIOWrapper

from medusa_cli import console
from medusa_cli.api import Medusa, Stream
from medusa_cli.console import Screen
from medusa_cli.decode import Piece
from medusa_cli.decode.text_stream import TextStream
from medusa_cli.errors import INTERRUPTED
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model.chat_template import fit
from medusa_cli.model.vocabulary import Vocabulary
from medusa_cli.runs.resolve import choose
from medusa_cli.runs.run import Run
from tests import forked
from tests.helpers import medusa, save_model, save_run

QUESTION = {"role": "user", "content": "q"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_run(folder / "mine", save_model(folder / "model"))
    save_model(folder / "short", positions=64)
    return folder


def chat(place: Path, *words: str, **how: Any) -> Result:
    common = ["--run", place / "mine", "--dtype", "fp32", "--max-new-tokens", "15"]
    return medusa("chat", *common, *words, **how)


def short(place: Path, *words: str, **how: Any) -> Result:
    """Chats with a model whose context has 64 tokens."""
    common = ["--model", place / "short", "--baseline", "--dtype", "fp32", "--max-new-tokens", "8"]
    return medusa("chat", *common, *words, **how)


@pytest.mark.slow
def test_one_prompt_prints_the_answer_alone_on_stdout(place: Path) -> None:
    drafted, plain = (
        chat(place, "--prompt", "w1 w2"),
        chat(place, "--prompt", "w1 w2", "--baseline"),
    )
    assert drafted.stdout == plain.stdout != ""
    assert "tokens per step" in drafted.stderr
    document = json.loads(chat(place, "--prompt", "w1 w2", "--json").stdout)
    assert document["answer"] + "\n" == plain.stdout
    assert document["acceptance_length"] >= 1
    assert document["tokens"] <= 15


def test_cuts_and_stop_strings_change_the_answer_alike_with_and_without_drafts(place: Path) -> None:
    sampled = ["--prompt", "w1 w2", "--temperature", "1.5", "--random-seed", "3"]
    free = chat(place, *sampled).stdout
    for words in (["--top-p", "0.1"], ["--top-k", "1"], ["--stop", free.split()[3]]):
        drafted, plain = (
            chat(place, *sampled, *words, *more).stdout for more in ([], ["--baseline"])
        )
        assert drafted == plain != free
    assert plain.split() == free.split()[:3]
    stops = ["--stop", free.split()[3], "--stop", free.split()[2]]
    assert chat(place, *sampled, *stops).stdout.split() == free.split()[:2]


def test_raw_continues_each_text_as_it_is(place: Path) -> None:
    words = [
        "chat",
        "--model",
        place / "model",
        "--dtype",
        "fp32",
        "--baseline",
        "--max-new-tokens",
        "9",
        "--quiet",
    ]
    loaded = Medusa.from_pretrained(place / "model", drafter=None, dtype="fp32")
    expected = [loaded.generate(text, raw=True, max_new_tokens=9).text for text in ("w1 w2", "w7")]
    assert medusa(*words, "--raw", input="w1 w2\nw7\n").stdout.splitlines() == expected
    assert (
        "--system"
        in medusa(*words, "--raw", "--system", "w1", "--prompt", "w2", exit_code=2).stderr
    )


def test_the_greeting_names_a_template_that_comes_with_a_drafter(
    place: Path, tmp_path: Path
) -> None:
    run = Run.open(f"{place / 'mine'}/")
    folder = tmp_path / "theirs"
    words = ("export", "--to", "drafter", "--run", f"{run.path}/", "--model", place / "model")
    medusa(*words, "--output", folder)
    words = ("chat", "--model", place / "model", "--dtype", "fp32", "--prompt", "w1")
    words = (*words, "--max-new-tokens", "2", "--drafter", folder)
    assert "chat template of" not in " ".join(medusa(*words).stderr.split())
    file = folder / "chat_template.jinja"
    file.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    chosen = choose(ModelSource.of(str(place / "model")), None, str(folder), None)
    assert chosen.template_file == file
    assert chosen.template == file.read_text()
    assert "chat template of" in " ".join(medusa(*words).stderr.split())
    own = medusa(*words, "--chat-template", file).stderr
    assert "chat template of" not in " ".join(own.split())


def test_a_template_takes_the_place_of_the_models(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    words = ["chat", "--dtype", "fp32", "--max-new-tokens", "9", "--quiet", "--prompt", "w1 w2"]
    raw = medusa(*words, "--model", place / "model", "--baseline", "--raw").stdout
    for more in (
        ["--model", place / "model", "--baseline"],
        ["--run", f"{place / 'mine'}/", "--model", place / "model"],
    ):
        assert medusa(*words, *more, "--chat-template", file).stdout == raw
    assert (
        "--chat-template"
        in medusa(*words, "--chat-template", tmp_path / "none", exit_code=1).stderr
    )


def test_a_model_without_a_drafter_drafts_n_grams(place: Path) -> None:
    words = [
        "chat",
        "--model",
        place / "model",
        "--dtype",
        "fp32",
        "--prompt",
        "w1 w2 w1 w2",
        "--max-new-tokens",
        "15",
    ]
    without = medusa(*words)
    assert "n-grams" in without.stderr
    assert "medusa tune" in without.stderr
    assert "no drafter" in medusa(*words, "--no-lookup", exit_code=1).stderr
    assert "no drafter" in medusa(*words, "--tree", "static", exit_code=1).stderr
    drafted, plain = medusa(*words, "--lookup"), medusa(*words, "--baseline")
    assert drafted.stdout == without.stdout == plain.stdout != ""
    assert "n-grams" in drafted.stderr
    refused = medusa(*words, "--lookup", "--baseline", exit_code=2).stderr
    assert "--lookup" in refused
    assert "--baseline" in refused


def test_piped_lines_are_answered_with_history(place: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    shown = chat(place, input=f"w1\nw2\n/save {saved}\n/stats\n/help\n/exit\nw3\n")
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert "tokens/s" in shown.stdout
    assert "/system TEXT" in shown.stdout
    assert messages[1]["content"] in shown.stdout


def test_a_conversation_goes_on_in_its_file_without_running_its_tokens_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    lines = [" ".join(f"w{(7 * n + turn) % 50}" for n in range(130)) for turn in range(3)]
    file = tmp_path / "talk.json"
    reused = list[int]()
    inner = Stream.__init__

    def record(self: Any, *args: Any) -> None:
        inner(self, *args)
        reused.append(self.reused)

    monkeypatch.setattr(Stream, "__init__", record)
    for line in lines:
        chat(place, "--continue", str(file), "--prompt", line)
    kept = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in kept] == ["user", "assistant"] * 3
    assert reused[0] == 0 < 260 < reused[2]
    chat(place, input="\n".join([*lines, f"/save {tmp_path / 'at-once.json'}"]))
    assert json.loads((tmp_path / "at-once.json").read_text())["messages"] == kept
    chat(place, "--continue", str(file), "--system", "w1", "--prompt", "w2", exit_code=2)
    for content in ("", "[]", '{"messages": 3}', '{"messages": [{"role": "user"}]}'):
        file.write_text(content)
        result = chat(place, "--continue", str(file), "--prompt", "w2", exit_code=None)
        assert result.exit_code in (1, 2)
        assert "Traceback" not in result.stderr
        assert file.read_text() == content


def test_system_and_clear_begin_anew(place: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    chat(place, input=f"w1\n/system w5 w6\nw2\n/save {saved}\n")
    messages = json.loads(saved.read_text())["messages"]
    assert messages[0] == {"role": "system", "content": "w5 w6"}
    assert len(messages) == 3
    chat(place, input=f"w1\n/clear\n/save {saved}\n")
    assert json.loads(saved.read_text())["messages"] == []


def test_a_bad_line_costs_that_line_and_the_exit_code(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = chat(
        place,
        input=f"/bogus\n/save\n/save {tmp_path}/file/x.json\n/save {tmp_path}\nw1\n",
        exit_code=1,
    )
    errors = [line for line in shown.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 4
    assert shown.stdout.strip()
    assert str(tmp_path) in errors[3]
    assert ".medusa-part" not in errors[3]


def test_bytes_that_are_no_utf8_cost_a_character(place: Path) -> None:
    shown = chat(place, input=b"w1 \xff\xfe w2\nw3\n")
    assert shown.stderr.count("tokens per step") == 2


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(
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
    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda stream: True)
    shown = chat(place, input=f"w1\nw2\n/save {saved}\n")
    assert "(stopped)" in shown.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert len(messages) == 4
    assert len(messages[1]["content"]) < len(messages[3]["content"])


def test_ctrl_c_ends_a_piped_chat(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def interrupted(stream: Stream) -> None:
        asked.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "step", interrupted)
    chat(place, input="w1\nw2\n", exit_code=130)
    assert len(asked) == 1


def test_ctrl_c_ends_a_single_answer_with_130(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", positions=20_000)
    for path in tmp_path.glob("model/*config.json"):  # nothing but Ctrl-C may end it
        path.write_text(
            re.sub(r'"eos_token(_id)?": [^,\n]+', r'"eos_token\1": null', path.read_text())
        )
    words = [
        "chat",
        "--model",
        model,
        "--baseline",
        "--dtype",
        "fp32",
        "--max-new-tokens",
        "19000",
        "--prompt",
        "w1",
    ]
    answer = tmp_path / "answer"
    child = forked.start(words, tmp_path, die_at=None, results=answer)
    forked.wait_until(lambda: answer.exists() and answer.stat().st_size > 0, [child])
    os.kill(child.pid, signal.SIGINT)
    forked.end([child])
    told = child.output.read_text()
    assert child.code == INTERRUPTED == 130, told
    assert told.endswith("interrupted\n")
    assert "(stopped)" in told


def test_a_prompt_that_fills_the_context_is_refused(place: Path) -> None:
    assert "context of 512" in chat(place, "--prompt", "w1 " * 600, exit_code=1).stderr


def test_accepted_tokens_are_coloured_on_request(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Screen(force_terminal=True, color_system="standard", width=200)
    monkeypatch.setattr(console, "out", wide)
    steps = iter(
        [[Piece("w2 ", False)], [Piece("w3 ", True), Piece("w4 ", True), Piece("w5", False)], None]
    )
    monkeypatch.setattr(Stream, "step", lambda stream: next(steps))
    with wide.capture() as shown:
        chat(place, "--prompt", "w1 w2", "--show-accepted", "--quiet")
    assert "".join(re.findall("\x1b\\[1;32m(.*?)\x1b\\[0m", shown.get())).split() == ["w3", "w4"]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_streamed_pieces_split_no_character(size: int) -> None:
    class Bytes:
        vocabulary = Vocabulary(None)

        def decode(self, ids: list[int], *_, **__) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    text = "Grüße, 世界!\nnext line 🙂 end\n\nlast 漢"
    data = list(text.encode())
    stream = TextStream(Bytes())  # type: ignore[arg-type]
    pieces = [stream.add(data[i : i + size]) for i in range(0, len(data), size)]
    assert "".join(pieces) + stream.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def encode(messages: list[dict[str, str]]) -> list[int]:
    """Returns one token a message and one a character."""
    return [0 for message in messages for _ in message["content"] + "|"]


def turns(count: int) -> list[dict[str, str]]:
    """Returns turns of eight tokens, question and answer."""
    return [
        {"role": role, "content": "xxx"} for _ in range(count) for role in ("user", "assistant")
    ]


@pytest.mark.parametrize(
    ("context", "forgotten", "expected"),
    [
        (34, 0, (26, 0)),  # everything fits
        (33, 0, (10, 4)),  # with room for two answers; 18 tokens would leave room for one
        (1000, 2, (18, 2)),  # a forgotten turn stays so
    ],
)
def test_the_oldest_turns_are_left_out(
    context: int, forgotten: int, expected: tuple[int, int]
) -> None:
    tokens, left_out = fit(
        encode, turns(3), QUESTION, context=context, answer=8, forgotten=forgotten
    )
    assert (len(tokens), left_out) == expected


def test_every_turn_of_a_long_chat_is_answered(place: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    lines = [f"w{number} w9" for number in range(30)]
    shown = short(place, "--system", "w5", input="\n".join([*lines, f"/save {saved}"]) + "\n")
    assert shown.exit_code == 0, shown.stderr
    assert "error" not in shown.stderr, shown.stderr
    assert shown.stderr.count("tokens per step") == 30
    assert shown.stderr.count("context of 64 tokens is full") >= 2
    system, *messages = json.loads(saved.read_text())["messages"]
    assert system["content"] == "w5"
    assert [message["content"] for message in messages[::2]] == lines


def test_a_line_too_long_costs_that_line(place: Path) -> None:
    shown = short(place, input="w1\n" + "w2 " * 80 + "\nw3\n", exit_code=1)
    assert shown.stderr.count("error:") == 1
    assert shown.stderr.count("tokens per step") == 2
    assert "is full" not in shown.stderr


def test_a_system_prompt_that_fills_the_context_is_refused(place: Path) -> None:
    shown = short(place, "--system", "w1 " * 80, input="w1\nw2\n", exit_code=1)
    assert shown.stderr.count("error:") == 1
    assert shown.stdout == ""
    shown = short(place, "--system", "w5", input="/system " + "w1 " * 80 + "\nw2\n", exit_code=1)
    assert shown.stderr.count("tokens per step") == 1  # the earlier prompt is in force


@pytest.mark.parametrize(
    "words", [["--prompt", "w1 \udcff"], ["--prompt", "w1", "--system", "\ud83d"]]
)
def test_half_a_character_is_refused_by_its_flag(place: Path, words: list[str]) -> None:
    for more in ([], ["--raw"] if "--system" not in words else []):
        shown = medusa("chat", "--run", place, *words, *more, exit_code=2).stderr
        assert words[-2] in shown
        assert "leave out" not in shown
