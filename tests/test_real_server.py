"""Distillation through `transformers serve` with the default model, killed and restarted: no sample lost or doubled."""

import contextlib
import json
import os
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

    def start(self) -> None:
        words = [sys.executable, "-m", "transformers.cli.transformers", "serve", assets.model_dir(assets.DEFAULT_MODEL)]
        words += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(self.port)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment)
        wait_for(self._healthy, self.log)

    def _healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/health", timeout=2).status_code == 200
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_for(ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 180
    while not ready():
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        pytest.skip("transformers serve needs more packages: pip install 'transformers[serving]'")
    server = Server(tmp_path / "server.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def words(server: Server, tmp_path: Path) -> list[str]:
    """The command, with 12 seeds of two turns each."""
    seeds = []
    for topic in TOPICS:
        turns = (f"What is good about {topic}?", "Say it in other words.")
        seeds.append({"id": topic, "conversations": [{"from": "human", "value": turn} for turn in turns]})
    (tmp_path / "seeds.jsonl").write_text("\n".join(map(json.dumps, seeds)) + "\n")
    words = f"--seed {tmp_path}/seeds.jsonl --json --run {tmp_path}/run --endpoint {server.url} --max-new-tokens 24"
    return [sys.executable, "-m", "medusa_cli", "distill", *words.split(), "--concurrency", "3"]


def records(run: Path) -> list[dict]:
    path = run / "distill.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_killed_servers_and_commands_cost_no_sample_and_double_none(
    server: Server, words: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(records(run)) >= 3 or child.poll() is not None, server.log)
    server.kill()
    child.kill()
    child.wait()
    before = records(run)
    assert 3 <= len(before) < len(TOPICS)
    refused = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1 and "--endpoint" in refused.stderr
    server.start()
    summary, after = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout), records(run)
    assert summary["conversations"] == len(TOPICS) and summary["failed"] == 0
    assert after[: len(before)] == before and sorted(record["id"] for record in after) == sorted(TOPICS)
    tokenizer = Tokenizer(assets.DEFAULT_MODEL).tokenizer
    for record in after:
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"] * 2
        for (start, end), turn in zip(record["spans"], (1, 3), strict=True):
            text = tokenizer.decode(record["tokens"][start:end], skip_special_tokens=True)
            assert text.strip() == record["messages"][turn]["content"].strip() != ""
            assert end - start <= 25  # the limit of 24, and the end token of a complete answer
