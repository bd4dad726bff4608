"""Distillation through `transformers serve` with the default model, killed and restarted: no sample lost or doubled."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from medusa_cli import assets
from medusa_cli.distill.endpoint import Tokenizer

pytestmark = pytest.mark.slow

TOPICS = ["bread", "rain", "trains", "cats", "the moon", "salt", "bridges", "music", "maps", "tea", "snow", "clocks"]


class Server:
    """`transformers serve` on one port, which can be killed and started again."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [sys.executable, "-m", "transformers.cli.transformers", "serve", assets.model_dir(assets.DEFAULT_MODEL)]
        words += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(self.port)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment)
        wait_for(self._healthy, 180, self.log)

    def _healthy(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log.read_text()[-2000:]
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/health", timeout=2).status_code == 200
        return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def wait_for(ready: Callable[[], bool], seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        pytest.skip("transformers serve needs more packages: pip install 'transformers[serving]'")
    one = Server(tmp_path / "server.log")
    one.start()
    yield one
    one.kill()


@pytest.fixture
def words(server: Server, tmp_path: Path) -> list[str]:
    """The command, its 12 seeds of two turns each."""
    rows = [
        {"id": topic, "conversations": [{"from": "human", "value": f"What is good about {topic}?"},
                                        {"from": "human", "value": "Say it in other words."}]}
        for topic in TOPICS
    ]  # fmt: skip
    (tmp_path / "seeds.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    command = [sys.executable, "-m", "medusa_cli", "distill", "--seed", str(tmp_path / "seeds.jsonl"), "--json"]
    return [*command, "--run", str(tmp_path / "run"), "--endpoint", server.url, "--max-new-tokens", "24",
            "--concurrency", "3"]  # fmt: skip


def lines(run: Path) -> list[dict]:
    path = run / "distill.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def check(run: Path) -> None:
    """Every conversation is there once, with token ids that say its text."""
    records = lines(run)
    assert sorted(one["id"] for one in records) == sorted(TOPICS)
    speaker = Tokenizer(assets.DEFAULT_MODEL)
    for one in records:
        assert [m["role"] for m in one["messages"]] == ["user", "assistant", "user", "assistant"]
        for (start, end), said in zip(one["spans"], (1, 3), strict=True):
            text = speaker.tokenizer.decode(one["tokens"][start:end], skip_special_tokens=True)
            assert text.strip() == one["messages"][said]["content"].strip() != ""
            assert end - start <= 25  # the 24 asked for, and the end token of an answer that came to its end


def test_a_server_that_is_killed_and_started_again_costs_no_sample(
    server: Server, words: list[str], tmp_path: Path
) -> None:
    run, log = tmp_path / "run", server.log
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(lines(run)) >= 3 or child.poll() is not None, 180, log)
    server.kill()
    assert child.poll() is None and len(lines(run)) < len(TOPICS)
    time.sleep(2)  # the command is now asking a server that is not there
    server.start()
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    summary = json.loads(out)
    assert summary["conversations"] == len(TOPICS) and summary["failed"] == 0
    check(run)


def test_when_server_and_command_die_the_same_command_goes_on(server: Server, words: list[str], tmp_path: Path) -> None:
    run, log = tmp_path / "run", server.log
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(lines(run)) >= 3 or child.poll() is not None, 180, log)
    server.kill()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    before = len(lines(run))
    assert 3 <= before < len(TOPICS)
    refused = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1 and "does not answer" in refused.stderr
    server.start()
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"resuming: {before} conversations are there already" in done.stderr
    check(run)
