"""Runs commands in processes of their own: exit codes as in docs/exit-codes.md, and short error lines."""

import os
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


def medusa_process(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "medusa_cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


@pytest.mark.parametrize(
    ("code", "words"),
    [(code, words) for code, lines in CASES.items() for words in lines],
    ids=lambda value: value if isinstance(value, int) else " ".join(value)[:40],
)
def test_exit_code_and_short_error_line(code: int, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "default").mkdir(parents=True)
    done = medusa_process(*words, folder=tmp_path)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert len(done.stderr) <= LONGEST + len("\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_exit_codes(number: int, code: int) -> None:
    """Checks 128 plus the signal number, as a shell reports it."""
    script = (
        "import os, sys; from medusa_cli import cli, console; from medusa_cli.commands import assets\n"
        f"assets._FETCH['sharegpt'] = lambda: os.kill(os.getpid(), {number})\n"
        "with console.terminated(): cli.app(['assets', 'sharegpt', '--quiet'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
