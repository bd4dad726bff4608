"""Wrong command lines on the default model: refused before anything is fetched, each option of each command."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from medusa_cli import cli
from medusa_cli.files.catalogue import DEFAULT_MODEL
from tests.helpers import medusa, python, save_conversations, save_model, save_run, write_lines
from tests.test_cli import MISTAKES

# Words that make a command complete.
COMPLETE = {
    "calibrate": ["--run", "{place}/mine"],
    "compare": ["{place}/mine"],
    "export": ["--output", "new"],
    "import": ["{place}/mine/drafter", "--model", DEFAULT_MODEL],
    "report": ["{place}/mine"],
    "train": ["--run", "{place}/talks"],
    "tune": [DEFAULT_MODEL],
}
# A wrong value of each option that is no number, in every command that has the option.
WRONG = {
    "--activations": "int3",
    "--allow-host": "",
    "--api-key": "",
    "--calibration": "gone.json",
    "--chat-template": "gone.jinja",
    "--choices": "gone.json",
    "--context": "many",
    "--cors": "",
    "--data": "gone.jsonl",
    "--device": "gpu",
    "--draft-model": "./gone",
    "--drafter": "./gone",
    "--dtype": "int7",
    "--endpoint": "nowhere",
    "--engine": "fast",
    "--from": "gone",
    "--gguf": "gone.gguf",
    "--grammar": "gone.lark",
    "--host": "nowhere.invalid",
    "--json-schema": "gone.json",
    "--judge": "http://127.0.0.1:9",
    "--judge-model": "wise",
    "--kv": "int3",
    "--logger": "paper",
    "--methods": "magic",
    "--model": "./gone",
    "--name": "",
    "--peer": "nowhere",
    "--prefix-store": "store:many",
    "--prompt": " ",
    "--record": "/nowhere/at/all.jsonl",
    "--push": "nowhere",
    "--quantize": "int3",
    "--questions": "gone.jsonl",
    "--regex": "(",
    "--run": "..",
    "--sampling": "beam",
    "--schedule": "sine",
    "--seed": "./gone.json",
    "--shape": "4,x",
    "--ssl-certfile": "gone.pem",
    "--ssl-keyfile": "gone.pem",
    "--stop": "",
    "--sweep": "width",
    "--temperature": "-1",
    "--time": "soon",
    "--to": "onnx",
    "--top-k": "-1",
    "--top-p": "7",
    "--tree": "dynamic:0",
    "--tuning": "qlora",
    "--uds": "/nowhere/at/all.sock",
    "--values": "3",
}
# Options that are right with every value, or that need data to be checked.
RIGHT = {
    "--access-log",
    "--debug",
    "--drop-refusals",
    "--dry-run",
    "--exact",
    "--json",
    "--keep-refusals",
    "--overwrite",
    "--quick",
    "--quiet",
    "--system",
    "--trust-remote-code",
}
# Exit code, words, and what the message names.
LINES = [
    (2, "machine --digest --context 256", "--context"),
    (2, "chat --top-k 5 --temperature 0", "--top-k 5"),
    (2, "chat --top-p 0.5 --temperature 0", "--top-p 0.5"),
    (2, "chat --sampling exact --temperature 0", "--sampling exact"),
    (2, "chat --sampling typical --top-k 4", "--top-k 4"),
    (2, "chat --temperature 0.5 --top-p 7", "--top-p 7"),
    (2, "chat --regex a --json-schema {place}/q.jsonl", "--regex"),
    (2, "chat --raw --system x", "--raw"),
    (2, "chat --raw --chat-template {place}/q.jsonl", "--raw"),
    (2, "chat --show-accepted --baseline", "--show-accepted"),
    (2, "chat --show-accepted --prompt w1 --json", "--show-accepted"),
    (2, "chat --baseline --lookup", "--lookup"),
    (2, "chat --raw --continue talk.json", "--continue"),
    (2, "chat --run {place}/mine --drafter {place}/mine", "--drafter"),
    (2, "chat --quantize int8 --engine eager", "--quantize int8"),
    (2, "chat --kv fp16 --engine torch", "--kv fp16"),
    (2, "chat --activations int8 --engine eager", "--activations int8"),
    (2, "chat --kv fp16 --engine eager", "--kv fp16"),
    (2, "chat --kv q8 --model smollm2-135m", "--kv"),
    (1, "chat --drafter {place}/model", "--drafter"),
    (2, "chat --exact --engine eager", "--exact"),
    (2, "chat --exact --kv fp16", "--exact"),
    (2, "chat --quantize bnb.nf4", "--quantize bnb.nf4"),
    (2, "chat --device cuda:9", "--device 'cuda:9'"),
    (1, "chat --drafter mtp", "mtp"),
    (1, "demo --no-lookup --tree gone.json", "gone.json"),
    (2, "serve --quiet --access-log", "--access-log"),
    (2, "serve --uds x.sock --port 5", "--port 5"),
    (2, "serve --uds x.sock --host 0.0.0.0", "--host 0.0.0.0"),
    (2, "serve --uds {place}/q.jsonl", "--uds"),
    (2, "bench --methods nope", "nope"),
    (2, "bench --limit 0", "--limit"),
    (2, "bench --batch-size 2 --methods hf-lookup", "hf-lookup"),
    (2, "bench --draft-model x", "--draft-model x"),
    (1, "bench --methods hf-assisted --draft-model ./gone", "./gone"),
    (2, "bench --peer x=http://127.0.0.1:9 --temperature 1", "--temperature"),
    (2, "bench --device cuda:9", "--device"),
    (2, "bench --coding --category nope", "nope"),
    (2, "bench --mt-bench --coding", "--coding"),
    (2, "bench --agent --coding", "--agent"),
    (2, "bench --category nope", "nope"),
    (2, "bench --mt-bench --category math,nope", "nope"),
    (2, "bench --sweep epsilon --values 7", "epsilon"),
    (2, "bench --sweep nodes --values 99999", "--values 99999"),
    (2, "bench --sweep nodes --methods ar", "--methods ar"),
    (2, "bench --sweep nodes --report", "--report"),
    (2, "bench --methods ar,lookup --no-lookup", "--no-lookup"),
    (1, "bench --methods hydra", "hydra"),
    (2, "distill --max-new-tokens 5000", "--max-new-tokens 5000"),
    (2, "distill --run new distill.taps=[-5]", "distill.taps"),
    (2, "distill --device cuda:9", "--device"),
    (1, "distill --endpoint http://127.0.0.1:9", "--endpoint"),
    (1, "distill --resume", "--resume"),
    (1, "distill --run new --model {place}/wordless", "wordless' has no tokenizer"),
    (1, "tune {place}/wordless", "wordless' has no tokenizer"),
    (1, "bench --methods ar --model {place}/wordless", "wordless' has no tokenizer"),
    (1, "distill --model {place}/base", "base' has no chat template"),
    (1, "tune {place}/base", "base' has no chat template"),
    (1, "bench --methods ar --model {place}/base", "base' has no chat template"),
    (2, "train --run {place}/talks --schedule warmup", "--schedule warmup"),
    (2, "train --run {place}/talks --stage 2 --tuning qlora", "qlora"),
    (2, "train --run {place}/talks --stage 2 --tuning full", "train.tuning=full"),
    (2, "train --run {place}/talks --stage 2 --quantize int8", "--quantize int8"),
    (2, "train --run {place}/talks --dry-run --resume", "--resume"),
    (1, "train --run {place}/talks --resume", "checkpoint.pt"),
    (1, "train", "distill.jsonl"),
    (1, "train --run new --data {place}/q.jsonl", "q.jsonl"),
    (1, "calibrate --run {place}/mine --data {place}/q.jsonl --model " + DEFAULT_MODEL, "q.jsonl"),
    (1, f"calibrate --drafter {DEFAULT_MODEL}", "distill.jsonl"),
    (2, "calibrate --output page.png", "--output page.png"),
    (2, "tree --output page.png", "--output page.png"),
    (2, "tree --measure", "--measure"),
    (2, "tree --budget auto --heads 99", "--heads 99"),
    (2, "export", "--output"),
    (2, "export --output new --private", "--private"),
    (2, "export --output new --to eagle3 --budget 5", "--budget"),
    (1, "export --output {place}", "--output"),
    (1, "export --output {place} --overwrite", "--output"),
    (1, "export --output {place}/q.jsonl", "--output"),
    (1, "export --output new --to medusa", "--to medusa"),
    (2, "report {place}/mine --output page.txt", "--output page.txt"),
    (1, f"import {{place}}/mine/drafter --run {{place}}/mine --model {DEFAULT_MODEL}", "drafter already"),
    (1, f"import mtp --model {DEFAULT_MODEL} --draft-vocab-size 5", "mtp"),
    (1, f"import mtp --model {DEFAULT_MODEL} --data gone.jsonl", "gone.jsonl"),
    (2, "import {place}/mine/drafter --draft-vocab-size 5", "--draft-vocab-size"),
    (2, "compare {place}/mine --max-samples 3", "--max-samples 3"),
    (2, "compare {place}/mine --engine native", "--engine native"),
    (2, f"assets {DEFAULT_MODEL} imagenet", "imagenet"),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a run, a run of conversations only, a file of one question and unusable models."""
    folder = tmp_path_factory.mktemp("refusals")
    save_run(folder / "mine", save_model(folder / "model"), calibrated=True)
    wordless, base = (
        shutil.copytree(folder / "model", folder / name) for name in ("wordless", "base")
    )
    for path in wordless.glob("token*"):
        path.unlink()
    (base / "chat_template.jinja").unlink()
    save_conversations(folder / "talks", 8)
    write_lines(folder / "q.jsonl", [{"turns": ["w1"]}])
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in an empty folder with an empty default run."""
    (tmp_path / "runs" / "default").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def options(command: str) -> Iterator[Any]:
    """Yields a command's options."""
    for parameter in cli.load_command(command).params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            yield parameter


def wrong_values(option: Any) -> Iterator[str]:
    """Yields values that an option refuses."""
    if option.bare_type in (int, float):
        yield "many"
    if option.min is not None:
        yield str(option.min - 1)
    if option.max is not None:
        yield str(option.max + 1)
    if option.opts[0] in WRONG:
        yield WRONG[option.opts[0]]


CASES = [
    (command, option.opts[0], value)
    for command in cli.COMMANDS
    for option in options(command)
    for value in wrong_values(option)
]


def refusal(words: list[str], place: Path, code: int | None = None) -> str:
    """Returns the last line of what a refused command line prints; the line leaves no file behind."""
    before = set(Path().rglob("*"))
    shown = medusa(*(word.format(place=place) for word in words), exit_code=code)
    assert set(Path().rglob("*")) == before
    assert shown.exit_code in (1, 2)
    assert shown.stdout == ""
    line = shown.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert "internal error" not in line
    return line


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_option_has_a_wrong_line_here(command: str) -> None:
    tried = [line for _, line, _ in LINES]
    tried += [line for _, line, _ in MISTAKES if isinstance(line, str)]
    named = {word for line in tried if line.split(" ")[0] == command for word in line.split(" ")}
    for option in options(command):
        flags = {*option.opts, *option.secondary_opts}
        covered = any(wrong_values(option)) or option.opts[0] in WRONG
        assert covered or flags & (named | RIGHT), f"{command} {option.opts[0]}: add a wrong line"


@pytest.mark.parametrize(("command", "flag", "value"), CASES)
def test_a_wrong_value_is_refused_before_anything_is_fetched(
    command: str, flag: str, value: str, place: Path, fetched: list[str]
) -> None:
    line = refusal([command, *COMPLETE.get(command, []), flag, value], place)
    assert flag in line or (value and value in line)
    assert fetched == []


@pytest.mark.parametrize(("code", "words", "named"), LINES)
def test_a_wrong_line_is_refused_before_anything_is_fetched(
    code: int, words: str, named: str, place: Path, fetched: list[str]
) -> None:
    assert named in refusal(words.split(" "), place, code)
    assert fetched == []


def test_a_right_line_asks_for_the_model(fetched: list[str]) -> None:
    """Shows that the fixture sees a fetch."""
    medusa("chat", "--prompt", "w1", exit_code=1)
    assert any(DEFAULT_MODEL in wanted for wanted in fetched)


EARLY = [
    "chat --model ./gone",
    "chat --run ..",
    "chat --drafter ./gone",
    "chat --drafter mtp",
    "chat --tree dynamic:0",
    "chat --chat-template gone.jinja",
    "chat --json-schema gone.json",
    "chat --stop=",
    "demo --drafter ./gone",
    "machine --context many",
    "machine --model ./gone",
    "calibrate --run gone",
    "calibrate --drafter qwen2.5-coder-0.5b --model ./gone",
    "export --to onnx",
    "export --run gone",
    "compare gone",
    "report gone",
    "import mtp",
    "doctor --model ./gone",
    "doctor --run gone",
    "assets imagenet",
]
COUNTING = """
import sys
from typer.testing import CliRunner
from medusa_cli.cli import app
for line in {lines!r}:
    done = CliRunner().invoke(app, line.split(" "))
    assert done.exit_code in (1, 2) and "internal error" not in done.output, done.output
    if "torch" in sys.modules:
        sys.exit(line)
"""


@pytest.mark.slow
def test_names_and_words_are_refused_before_torch_is_imported() -> None:
    done = python(COUNTING.format(lines=EARLY))
    assert done.returncode == 0, done.stderr
