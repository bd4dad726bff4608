"""The program as a whole: help, version, shared options, and how every kind of failure ends."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from medusa_cli import __version__, cli
from medusa_cli.commands import assets as assets_command
from medusa_cli.errors import LONGEST, UsageError, UserError, in_flags
from medusa_cli.serve.refusals import refusal_for
from tests.helpers import (
    medusa,
    medusa_json,
    program,
    python,
    save_conversations,
    save_model,
    save_run,
    write_lines,
)

LONG = "x" * 5000


def fails(monkeypatch: pytest.MonkeyPatch, reason: BaseException) -> None:
    """Makes `medusa assets` raise this."""

    def fetch() -> str:
        raise reason

    monkeypatch.setattr(assets_command, "_FETCH", {"sharegpt": fetch})


def test_help_is_instant() -> None:
    """Measures processor time, which other work does not stretch."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert program("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times) < 0.4


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(words: list[str]) -> None:
    listed = medusa(*words).stdout.split("Commands:")[1]
    assert [line.split()[0] for line in listed.splitlines() if line.strip()] == list(cli.COMMANDS)


def test_version_and_completion() -> None:
    assert medusa("--version").stdout == f"medusa {__version__}\n"
    shown = program("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert shown.returncode == 0
    assert "complete" in shown.stdout


COMPLETING = """
import sys
from medusa_cli.cli import main
sys.argv = ["medusa"]
try:
    main()
finally:
    assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "environment"),
    [
        ("bash", {"COMP_WORDS": "{line}", "COMP_CWORD": "{last}"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "{line}"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "{line}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
@pytest.mark.parametrize(
    ("line", "expected"), [("medusa ca", "calibrate"), ("medusa chat --draf", "--drafter")]
)
def test_commands_and_their_options_complete_without_torch(
    shell: str, environment: dict[str, str], line: str, expected: str
) -> None:
    values = {
        name: text.format(line=line, last=line.count(" ")) for name, text in environment.items()
    }
    done = python(COMPLETING, env={**os.environ, **values, "_MEDUSA_COMPLETE": f"complete_{shell}"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr
    assert expected in done.stdout
    assert "--model" not in done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, a calibrated run and questions, and a run with conversations alone."""
    folder = tmp_path_factory.mktemp("cli")
    save_run(folder / "mine", save_model(folder / "model"), calibrated=True)
    write_lines(folder / "q.jsonl", [{"turns": ["w1"]}])
    save_conversations(folder / "talks", 8)
    return folder


BENCH = "bench --questions {place}/q.jsonl --run {place}/mine --quiet"
SWEEP = f"{BENCH} --sweep"
MACHINE = "machine --model {place}/model --engine eager --quiet --context"
REPORT = "report {place}/mine"
TREE = "tree --run {place}/mine"
CALIBRATE = "calibrate --run {place}/mine --quiet"
TRAIN = "train --run {place}/talks --model {place}/model --quiet"
JOINT = f"{TRAIN} --stage 2"
FIRP = f"{TRAIN} drafter=firp"
JUDGE = f"{BENCH} --methods ar,medusa"
EXPORT = "export --run {place}/mine --output out"
MISTAKES = [
    (2, "nonsense", "nonsense"),
    (2, LONG, "xxx"),
    (2, "tree --budgt 3", "--budgt"),
    (2, f"tree --{LONG} 3", "xxx"),
    (2, f"tree --shape {LONG}", "--shape"),
    (2, "tree --shape 100,100,100", "1,024"),
    (2, "tree --shape 4,x", "--shape"),
    (2, "tree --shape 2 --budget 3", "--budget and --shape"),
    (2, "tree --shape 2 --heads 0", "--heads 0"),
    (2, "tree --shape 2 --output .", "--output"),
    (2, "tree --budget many", "--budget"),
    (2, f"{TREE} --measure", "--measure"),
    (2, f"{TREE} --budget 0", "--budget 0"),
    (2, f"{TREE} --budget 41", "--budget 41"),
    (2, f"{TREE} --heads 4", "--heads 4"),
    (1, "tree --run default", "medusa calibrate"),
    (1, "tree --run no-such-run", "--run"),
    (1, "tree --calibration none.json", "none.json"),
    (1, "tree --calibration {place}/mine/calibration.json --budget auto", "--budget auto"),
    (1, "tree --choices none.json", "none.json"),
    (2, "chat --json", "--json"),
    (2, "chat --quantize int3", "--quantize"),
    (2, "chat --tree dynamic:²", "--tree"),
    (2, f"chat --tree dynamic:{'9' * 5000}", "--tree"),
    (2, "chat --temperature 1e-300", "--temperature"),
    (2, "chat --top-p 0.1", "--top-p"),
    (2, "chat --sampling greedy --temperature 0.9", "--temperature"),
    (2, f"chat --random-seed {10**30}", "--random-seed"),
    (2, "chat --run \udcff", "--run"),
    (2, "chat --run ..", "--run"),
    (2, "chat --top-k -1", "--top-k"),
    (2, ["chat", "--prompt", " "], "--prompt"),
    (1, "chat --model ./no-such-folder --baseline --prompt w1", "--model"),
    (2, "distill --temperature -1", "--temperature"),
    (2, "distill --max-new-tokens 0", "--max-new-tokens"),
    (2, "distill --max-samples -3", "--max-samples"),
    (2, "distill --device gpu", "--device"),
    (2, "distill --dtype int7", "--dtype"),
    (1, f"distill --seed ./{LONG[:200]}.json", "--seed"),
    (2, "assets imagenet", "imagenet"),
    (2, "compare x --data .", "--data"),
    (1, f"compare no-such-run-{LONG[:200]}", "RUN"),
    (2, f"train train.lr={LONG}", "train.lr"),
    (2, f"train {LONG}=3", "xxx"),
    (2, f"{TRAIN} train.lrr=3", "train.lr"),
    (2, f"{TRAIN} drafter=medussa", "medusa"),
    (1, f"{TRAIN} gone.yaml", "gone.yaml"),
    (2, f"{TRAIN} a.yaml b.yaml", "b.yaml"),
    (1, f"{TRAIN} --data gone.jsonl", "gone.jsonl"),
    (1, f"{TRAIN} --resume", "checkpoint.pt"),
    (1, f"{TRAIN} --run nowhere/at/all", "--run"),
    (1, f"{TRAIN} --from nowhere/at/all", "--from"),
    (1, f"{TRAIN} --from {{place}}/model", "--from"),
    (2, f"{TRAIN} distill.seed=\udcff", "distill.seed"),
    (2, f"{TRAIN} train.shard=true", "train.shard"),
    (2, f"{TRAIN} --tuning qlora", "--tuning qlora"),
    (2, f"{TRAIN} --schedule sine", "--schedule sine"),
    (2, f"{JOINT} --tuning full", "train.objective=kl"),
    (2, f"{JOINT} --tuning full --quantize bnb.nf4 train.objective=ce", "train.tuning=full"),
    (2, f"{JOINT} drafter.vocabulary=shared", "drafter.vocabulary=shared"),
    (2, f"{FIRP} train.regress=1", "train.regress"),
    (2, f"{FIRP} --engine fast", "engine"),
    (2, f"{FIRP} --stage 2", "stage"),
    (2, f"{CALIBRATE} --top 0", "--top"),
    (2, f"{CALIBRATE} --data {{place}}", "--data"),
    (1, f"{CALIBRATE} --run no/where", "no/where"),
    (1, f"{CALIBRATE} --drafter nowhere", "nowhere"),
    (2, f"{BENCH} --methods hf,magic", "magic"),
    (2, f"{BENCH} --mt-bench", "--mt-bench"),
    (2, f"{BENCH} --limit 0", "--limit"),
    (1, f"{BENCH} --questions nowhere.jsonl", "nowhere.jsonl"),
    (2, f"{BENCH} --methods ar --gguf {{place}}/q.jsonl", "--gguf"),
    (2, f"{BENCH} --methods llama.cpp", "--methods llama.cpp"),
    (2, f"{BENCH} --methods ar,hf --drafter {{place}}/mine/drafter", "--drafter"),
    (2, f"{BENCH} --methods ar,hf --tree static", "--tree"),
    (2, f"{BENCH} --methods ar,lookup --no-lookup", "--no-lookup"),
    (2, f"{BENCH} --values 3", "--values"),
    (2, f"{BENCH} --batch-size 2 --methods ar,hf-lookup", "hf-lookup"),
    (2, f"{BENCH} --methods hf,hf-assisted", "--draft-model"),
    (2, f"{BENCH} --methods hf,ar --draft-model {{place}}/model", "--draft-model"),
    (2, f"{JUDGE} --judge http://127.0.0.1:9", "--judge-model"),
    (2, f"{JUDGE} --judge-model wise", "--judge"),
    (2, f"{SWEEP} width", "--sweep 'width'"),
    (2, f"{SWEEP} nodes --values 2,x", "--values '2,x'"),
    (2, f"{SWEEP} nodes --values 9999", "--values 9999"),
    (2, f"{SWEEP} temperature --values -1", "--values"),
    (2, f"{SWEEP} nodes --tree static", "--tree"),
    (2, f"{SWEEP} temperature --temperature 1", "--temperature"),
    (2, f"{SWEEP} nodes --methods ar", "--methods"),
    (2, f"{SWEEP} nodes --report", "--report"),
    (2, f"{SWEEP} nodes --judge http://127.0.0.1:9 --judge-model wise", "--judge"),
    (2, f"{MACHINE} 5000", "--context"),
    (2, f"{MACHINE} 20,510", "--context"),
    (2, f"{MACHINE} many", "--context"),
    (2, f"{MACHINE} ²", "--context"),
    (2, f"{MACHINE} {'9' * 5000}", "--context"),
    (1, "report nowhere", "nowhere"),
    (1, "report {place}/model", "medusa bench"),
    (1, "report {place}/nowhere.json", "nowhere.json"),
    (1, "report {place}/mine/calibration.json", "calibration.json"),
    (2, f"{REPORT} --output page.txt", "--output page.txt"),
    (2, f"{EXPORT} --budget few", "--budget"),
    (2, f"{EXPORT} --budget {'9' * 5000}", "--budget"),
    (2, f"{EXPORT} --to eagle3 --budget 5", "--budget"),
    (2, f"{EXPORT} --to onnx", "--to"),
    (2, f"{EXPORT} --to data --model {{place}}/model", "--model"),
    (2, f"{EXPORT} --to data --trust-remote-code", "--trust-remote-code"),
    (2, "serve --host nowhere.invalid", "--host nowhere.invalid"),
    (2, "tree --device cpu", "--device"),
    (2, "bench --sweep epsilon --temperature 0", "--temperature"),
    (2, "serve --host \0", "--host"),
    (2, "serve --port 65536", "--port"),
    (2, "serve --ssl-certfile /no/such/file", "--ssl-certfile /no/such/file"),
    (2, "serve --ssl-certfile {place}/model/config.json", "--ssl-certfile"),
    (2, "serve --ssl-keyfile key.pem", "--ssl-certfile"),
    (1, "serve --run /no/such/run", "/no/such/run"),
    (2, "serve --baseline --lookup", "--lookup"),
    (2, "chat --baseline --tree static --prompt w1", "--tree"),
]


@pytest.mark.parametrize(
    ("code", "words", "named"), MISTAKES, ids=[ascii(words)[:60] for _, words, _ in MISTAKES]
)
def test_a_wrong_command_line_is_one_short_line(
    code: int,
    words: str | list[str],
    named: str,
    place: Path,
    tmp_path: Path,
    fetched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if code == 2 and "--context" not in words:
        monkeypatch.setattr(
            "medusa_cli.engine.load.load_network",
            lambda *_, **__: pytest.fail("a model was loaded"),
        )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "default").mkdir(parents=True)
    words = words.format(place=place).split(" ") if isinstance(words, str) else words
    shown = medusa(*words, exit_code=code)
    assert shown.stdout == ""
    assert shown.stderr.startswith("error: ")
    assert shown.stderr.count("\n") == 1
    assert named in shown.stderr
    assert len(shown.stderr) <= LONGEST + len("\n")
    assert fetched == []


@pytest.mark.quick(
    "Abort--",
    "KeyError--",
    "MemoryError--",
    "OSError--0",
    "OSError--1",
    "OSError--3",
    "PermissionError--",
    "RuntimeError--0",
    "RuntimeError--1",
    "ZeroDivisionError--",
)
@pytest.mark.parametrize(
    ("reason", "code", "named"),
    [
        (UserError("the file is empty", "write it again"), 1, "the file is empty; write it again"),
        (UsageError("@budget 0 is too small"), 2, "--budget 0 is too small"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a/x"), 1, "runs/a/x"),
        (OSError(errno.EFBIG, "File too large", "runs/a/x"), 1, "space left to write runs/a/x"),
        (RuntimeError("I/O error: File too large (os error 27)"), 1, "space left"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/a"), 1, "runs/a"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.json"), 1, "a.json"),
        (OSError("the model cannot be found"), 1, "the model cannot be found"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 1, "disk space"),
        (
            IsADirectoryError(errno.EISDIR, "Is a directory", ".out.x1", None, "out"),
            1,
            "error: out: ",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "out of memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            1,
            "out of memory",
        ),
        (MemoryError(), 1, "out of memory"),
        (typer.Abort(), 1, "aborted"),
        (ZeroDivisionError("division\nby zero"), 1, "ZeroDivisionError: division by zero"),
        (KeyError(), 1, "KeyError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failure_is_one_line(
    monkeypatch: pytest.MonkeyPatch, reason: BaseException, code: int, named: str
) -> None:
    fails(monkeypatch, reason)
    shown = medusa("assets", "--quiet", exit_code=code)
    assert shown.stdout == ""
    assert named in shown.stderr
    assert shown.stderr.startswith("error: ")
    assert shown.stderr.count("\n") == 1
    debugged = medusa("assets", "--debug", exit_code=code).stderr
    assert "Traceback" in debugged
    assert debugged.endswith(shown.stderr)


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, KeyboardInterrupt())
    assert "Traceback" not in medusa("assets", "--quiet", exit_code=130).stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_exit_codes(number: int, code: int) -> None:
    """Checks 128 plus the signal number, as a shell reports it."""
    script = (
        "import os, sys; from medusa_cli import cli, console; from medusa_cli.commands import assets\n"
        f"assets._FETCH['sharegpt'] = lambda: os.kill(os.getpid(), {number})\n"
        "with console.terminated(): cli.app(['assets', 'sharegpt', '--quiet'])"
    )
    done = python(script)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "resumes"),
    [(["distill"], True), (["bench", "--sweep", "nodes"], True), (["bench"], False)],
    ids=str,
)
def test_interrupted_command_that_resumes_says_so(
    words: list[str], resumes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("medusa_cli.options.OutputFlags.configure", interrupted)
    shown = medusa(*words, exit_code=130).stderr
    assert shown.startswith("interrupted")
    assert (shown.strip() != "interrupted") == resumes


def test_a_command_that_stops_on_request_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, typer.Exit(3))
    assert medusa("assets", "--quiet", exit_code=3).stderr == ""


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m medusa_cli --help | true"
    assert (
        subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=os.environ
        ).stderr
        == ""
    )


def test_a_setting_is_a_flag_a_keyword_or_a_field() -> None:
    error = UsageError("@max_new_tokens 0 is too small", "use 1 or more, or another @run")
    assert (
        in_flags(error.text) == "--max-new-tokens 0 is too small; use 1 or more, or another --run"
    )
    assert str(error) == "max_new_tokens 0 is too small; use 1 or more, or another run"
    assert in_flags("left out (@no_resume keeps them; @max_samples too) [@run]") == (
        "left out (--no-resume keeps them; --max-samples too) [--run]"
    )
    refusal = refusal_for(error, "prompt")
    assert (refusal.param, refusal.code) == ("max_tokens", "invalid_value")
    assert str(refusal).startswith("max_tokens 0")
    assert (
        refusal_for(UserError("it is too long", "give another @model"), "prompt").param == "prompt"
    )


@pytest.mark.parametrize(
    "text", ["me@example.org", "the file '@run' is none", "@scope/name", "@run.json (a@run)"]
)
def test_text_that_only_looks_like_a_setting_stays(text: str) -> None:
    assert in_flags(UserError(text).text) == str(UserError(text)) == text


def test_assets_prints_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = {"sharegpt": tmp_path / "s.json", "mt-bench": tmp_path / "q.jsonl"}
    monkeypatch.setattr(
        assets_command, "_FETCH", {name: lambda path=path: path for name, path in paths.items()}
    )
    assert medusa_json("assets") == {name: str(path) for name, path in paths.items()}
    assert medusa("assets", "mt-bench").stdout == f"mt-bench: {paths['mt-bench']}\n"
