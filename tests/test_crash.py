"""kill -9 in every command that writes, and several writers of one run: a short round of what `make crash` does."""

import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from medusa_cli.cli import COMMANDS
from tests.crash import JOBS, Count, crash, learn, prepare


@pytest.mark.slow
def test_nothing_is_lost_doubled_or_changed_by_kills() -> None:
    words = [
        sys.executable,
        "-m",
        "tests.crash",
        "--kills",
        "16",
        "--rounds",
        "4",
        "--random-seed",
        "17",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^1[67] kills \(.*0 lost, 0 doubled, 0 changed, 0 files left", done.stdout, re.MULTILINE
    )


@pytest.mark.slow
def test_a_broken_recovery_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of a conversation whose line was never written stay in the file: so a run would be after every kill."""
    monkeypatch.setattr("medusa_cli.data.states.StateStore.truncate", lambda store, rows: None)
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    (tmp_path / "reference").mkdir()
    prepare(tmp_path / "reference")
    count = Count()
    crash(learn(tmp_path, JOBS[:1]), tmp_path, 8, Random(17), count)
    assert count.faults, count
    assert count.changed, count


def test_every_command_that_writes_a_run_is_killed() -> None:
    # And `assets`, which needs a network to write.
    only_read = {
        "chat",
        "compare",
        "demo",
        "doctor",
        "machine",
        "serve",
    }
    assert {job.words[0] for job in JOBS} == set(COMMANDS) - only_read - {"assets"}
