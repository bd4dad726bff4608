"""The program as a whole: help, version, shared words, and how every kind of failure ends."""

import errno
import inspect
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from medusa_cli import __version__, cli, options
from medusa_cli import assets as store
from medusa_cli.commands import assets as assets_command
from medusa_cli.commands import bench, chat, demo
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.recipe import DistillRecipe
from tests.helpers import medusa

NAMES = [
    "distill",
    "merge",
    "train",
    "calibrate",
    "tree",
    "chat",
    "serve",
    "bench",
    "report",
    "compare",
    "doctor",
    "machine",
    "export",
    "import",
    "assets",
    "demo",
]
# Words that mean what they mean elsewhere, with bounds or a default of their own.
OWN = {
    ("--batch-size", "distill"),
    ("--batch-size", "serve"),
    ("--max-new-tokens", "serve"),
    ("--temperature", "doctor"),
}


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-m", "medusa_cli", *words], capture_output=True, text=True, env=env)


def fails(monkeypatch: pytest.MonkeyPatch, reason: BaseException) -> None:
    """Make `medusa assets` raise this."""

    def fetch() -> str:
        raise reason

    monkeypatch.setattr(assets_command, "_FETCH", {"sharegpt": fetch})


def test_help_is_instant() -> None:
    """Under half a second of processor time: unlike the clock, other work does not stretch it."""
    run("--help")
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times) < 0.5


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_bare_and_help_name_every_command(words: list[str]) -> None:
    shown = medusa(*words)
    assert shown.exit_code == 0
    listed = [line.split()[0] for line in shown.stdout.split("Commands:")[1].splitlines() if line.strip()]
    assert listed == NAMES
    assert "..." not in shown.stdout.split("Commands:")[1]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_and_the_common_flags(name: str) -> None:
    shown = medusa(name, "--help")
    assert shown.exit_code == 0
    for flag in ("--quiet", "--debug"):
        assert flag in shown.stdout, flag


def test_version() -> None:
    assert medusa("--version").stdout == f"medusa {__version__}\n"


def test_completion_for_the_shell() -> None:
    shown = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert shown.returncode == 0 and "complete" in shown.stdout


def flags(option: Any) -> list[str]:
    """The names of an option; in an annotation typer keeps the first as its default."""
    info = typing.get_args(option)[1]
    return [info.default, *info.param_decls]


SHARED = {
    flag: option
    for name, option in vars(options).items()
    if typing.get_origin(option) is typing.Annotated and not name.startswith(("RunOr", "ModelOr"))
    for flag in flags(option)
}


@pytest.mark.parametrize(
    "function", [cli.function_of(name) for name in cli.COMMANDS], ids=lambda function: function.__name__
)
def test_shared_words_mean_the_same_everywhere(function: Callable[..., None]) -> None:
    """A flag named like a shared option must be that option (or the --run that may be absent)."""
    runs = {options.Run, options.RunOrShipped, options.RunOrDefault, options.RunOrNew}
    for name, parameter in inspect.signature(function).parameters.items():
        flag = f"--{name.replace('_', '-')}"
        if flag == "--run":
            assert parameter.annotation in runs
        elif flag == "--model":
            assert parameter.annotation in {options.Model, options.ModelOrSaid}
        elif (flag, function.__name__) in OWN:
            continue
        elif flag in SHARED:
            assert parameter.annotation == SHARED[flag], f"{function.__name__} {flag} is its own"


def test_what_help_says_of_defaults_is_so() -> None:
    shared = {flag: typing.get_args(option)[1].help for flag, option in SHARED.items()}
    lengths = {"chat": chat.MAX_NEW_TOKENS, "distill and bench": bench.MAX_NEW_TOKENS, "demo": demo.MAX_NEW_TOKENS}
    assert ", ".join(f"{number} in {where}" for where, number in lengths.items()) in shared["--max-new-tokens"]
    assert DistillRecipe().max_new_tokens == bench.MAX_NEW_TOKENS


def test_the_words_of_devices_and_engines_are_those_that_load() -> None:
    from medusa_cli.engine import load

    assert options.ENGINES == load.ENGINES and set(options.DTYPES) == {"auto", *load.DTYPES}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "nonsense"),
        (["tree", "--budgt", "3"], "--budgt"),
        (["tree", "--budget", "many"], "--budget"),
        (["distill", "--temperature", "-1"], "--temperature"),
        (["distill", "--temperature", "nan"], "--temperature"),
        (["distill", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["distill", "--max-samples", "-3"], "--max-samples"),
        (["distill", "--device", "gpu"], "--device"),
        (["distill", "--dtype", "int7"], "--dtype"),
        (["assets", "imagenet"], "imagenet"),
        (["tree", "--shape", "2", "--output", "."], "'--output': file '.' is a directory"),
        (["compare", "x", "--data", "."], "'--data': file '.' is a directory"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(words: list[str], said: str) -> None:
    shown = medusa(*words)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith("error: ") and shown.stderr.count("\n") == 1
    assert said in shown.stderr


@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [
        (UserError("the file is empty", "write it again"), 1, "error: the file is empty; write it again"),
        (UsageError("--budget 0 cannot be"), 2, "error: --budget 0 cannot be"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a/x"),
            1,
            "no disk space left to write runs/a/x",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "runs/a"), 1, "no permission to use runs/a"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.json"), 1, "a.json: no such file"),
        (OSError("the model cannot be found"), 1, "error: OSError: the model cannot be found"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 1, "no disk space left"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", ".out.x1", None, "out"), 1, "error: out: is a directory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 1, "out of memory; use"),
        (MemoryError(), 1, "out of memory"),
        (typer.Abort(), 1, "aborted"),
        (ZeroDivisionError("division\nby zero"), 1, "internal error: ZeroDivisionError: division by zero"),
        (KeyError(), 1, "internal error: KeyError (run again with --debug"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_failures_are_one_line(monkeypatch: pytest.MonkeyPatch, reason: BaseException, code: int, said: str) -> None:
    fails(monkeypatch, reason)
    shown = medusa("assets", "--quiet")
    assert shown.exit_code == code
    assert shown.stdout == ""
    assert said in shown.stderr and shown.stderr.count("\n") == 1
    assert shown.stderr.startswith("error: ")


def test_debug_adds_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, UserError("the file is empty"))
    shown = medusa("assets", "--debug")
    assert shown.exit_code == 1
    assert "Traceback" in shown.stderr
    assert shown.stderr.endswith("error: the file is empty\n")


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, KeyboardInterrupt())
    shown = medusa("assets", "--quiet")
    assert (shown.exit_code, shown.stderr) == (130, "interrupted\n")
    assert "Traceback" not in shown.stderr


def test_a_command_that_stops_on_request_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, typer.Exit(3))
    shown = medusa("assets", "--quiet")
    assert (shown.exit_code, shown.stderr) == (3, "")


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m medusa_cli --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", re.findall(r"^medusa [a-z].*", README, re.MULTILINE))
def test_the_readmes_commands_are_accepted(line: str) -> None:
    name, *words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(cli.app)
    assert isinstance(group, cli.Boundary)
    group.commands[name].make_context(name, words)


def test_the_readmes_make_targets_exist() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):.*##", makefile, re.MULTILINE))
    named = set(re.findall(r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)[` ]", README, re.MULTILINE))
    assert {first or second for first, second in named} <= targets


def test_assets_says_where_things_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {"sharegpt_path": tmp_path / "s.json", "mt_bench_path": tmp_path / "q.jsonl"}
    monkeypatch.setattr(store, "model_dir", lambda name: str(tmp_path / name))
    for name, path in files.items():
        monkeypatch.setattr(store, name, lambda path=path: path)
    shown = medusa("assets", "--json")
    found: dict[str, Any] = json.loads(shown.stdout)
    assert found == {
        store.DEFAULT_MODEL: str(tmp_path / store.DEFAULT_MODEL),
        "sharegpt": str(tmp_path / "s.json"),
        "mt-bench": str(tmp_path / "q.jsonl"),
    }
    one = medusa("assets", "mt-bench")
    assert one.stdout == f"mt-bench: {tmp_path / 'q.jsonl'}\n"
