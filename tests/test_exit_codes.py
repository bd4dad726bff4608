"""The exit codes that docs/exit-codes.md promises, each seen from outside, and messages that stay short."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_cli.errors import LONGEST

ROOT = Path(__file__).parent.parent
LONG = "x" * 5000
CASES = {
    0: [["--version"], ["tree", "--shape", "2,1", "--quiet"]],
    1: [
        ["tree", "--run", "no-such-run"],
        ["chat", "--model", "./no-such-folder", "--baseline", "--prompt", "w1"],
        ["compare", f"no-such-run-{LONG[:200]}"],
        ["distill", "--seed", f"./{LONG[:200]}.json"],
    ],
    2: [
        ["nonsense"],
        [LONG],
        ["tree", f"--{LONG}", "3"],
        ["tree", "--shape", LONG],
        ["train", f"train.lr={LONG}"],
        ["train", f"{LONG}=3"],
        ["chat", "--json"],
    ],
}


def medusa(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "medusa_cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


@pytest.mark.parametrize(
    ("code", "words"),
    [(code, words) for code, lines in CASES.items() for words in lines],
    ids=lambda value: value if isinstance(value, int) else " ".join(value)[:40],
)
def test_a_command_ends_with_its_code_and_a_short_line(code: int, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "default").mkdir(parents=True)
    done = medusa(*words, folder=tmp_path)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert len(done.stderr) <= LONGEST + len("\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_command_with_the_shells_code(number: int, code: int) -> None:
    """As a shell says it: what a signal ends has 128 and its number, whether or not the program saw it."""
    script = (
        "import os, sys; from medusa_cli import cli, console; from medusa_cli.commands import assets\n"
        f"assets._FETCH['sharegpt'] = lambda: os.kill(os.getpid(), {number})\n"
        "with console.terminated(): cli.app(['assets', 'sharegpt', '--quiet'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_names_the_codes_there_are() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    named = [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert named == [*CASES, 130, 143]


def test_the_tests_that_security_names_exist() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|docs)/[\w./-]+)`", page))
    assert len(named) >= 5 and all((ROOT / name).is_file() for name in named)
