"""A tiny server in a thread, on a free port of the loopback, and clients for it."""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from medusa_cli import cli
from medusa_cli.api import Medusa
from medusa_cli.serve.middleware import Limits
from medusa_cli.serve.server import Server, listen
from tests.helpers import byte_tokenizer, save_model, save_run

MODEL = "tiny"
IDS = [5, 9, 20, 11, 7]


def tiny_medusa(folder: Path, engine: str = "auto") -> Medusa:
    """Returns a tiny model with random Medusa heads and a static tree."""
    run = save_run(folder / "run", save_model(folder / "model"))
    return Medusa.from_pretrained(drafter=run.path, tree="static", dtype="fp32", engine=engine)


@dataclass
class Served:
    """A running server and its clients' methods."""

    port: int
    server: Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, **options: Any) -> Any:
        """Returns OpenAI's client."""
        from openai import OpenAI

        return OpenAI(
            **{
                "base_url": f"{self.url}/v1",
                "api_key": "none",
                "max_retries": 0,
                "timeout": 60,
                **options,
            }
        )

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        """Returns status, headers and body of a plain request; a body that is no text goes as JSON."""
        data = body if isinstance(body, str | bytes | None) else json.dumps(body)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(
                method, path, data, {"Content-Type": "application/json", **(headers or {})}
            )
            response = connection.getresponse()
            return (
                response.status,
                {k.lower(): v for k, v in response.getheaders()},
                response.read().decode(),
            )
        finally:
            connection.close()

    def post(
        self, body: Any, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        status, answered, text = self.request("POST", path, body, headers)
        return status, answered, json.loads(text)

    def number(self, name: str) -> float:
        """Returns a number of /metrics."""
        lines = self.request("GET", "/metrics")[2].splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name
        )

    def until(self, name: str, value: float, seconds: float = 60) -> None:
        """Waits until a number of /metrics has this value."""
        end = time.monotonic() + seconds
        while self.number(name) != value:
            assert time.monotonic() < end, f"{name} is {self.number(name)}, not {value}"
            time.sleep(0.02)


@contextmanager
def serving(medusa: Medusa, uds: Path | None = None, **settings: Any) -> Iterator[Served]:
    """Runs a server for the time of a test, on a free port or at a Unix socket."""
    listener = listen("127.0.0.1", 0, uds)
    server = Server(medusa, Limits(**{"names": (MODEL,), "max_new_tokens": 400, **settings}))
    thread = threading.Thread(target=server.run, args=(listener,), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Served(0 if uds else listener.getsockname()[1], server)
    finally:
        if thread.is_alive():
            with suppress(KeyboardInterrupt):  # the test may have stopped it
                server.stop()
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def serving_bytes(folder: Path) -> Iterator[Served]:
    """Runs a server of a tiny random model that writes bytes, with its drafter and n-grams."""
    model = save_model(folder / "model", vocab=320, positions=2048)
    byte_tokenizer().save_pretrained(model)
    run = save_run(folder / "run", model)
    with serving(
        Medusa.from_pretrained(drafter=run.path, tree="static", dtype="fp32", lookup=True)
    ) as server:
        yield server


def start(
    words: list[str], log: Path, prefix: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts `medusa serve` on a free port, its stderr in a file; returns the process and the port."""
    command = [*prefix, sys.executable, "-m", "medusa_cli", "serve", "--port", "0", *words]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file)
    return process, port_of(log, lambda: process.poll() is None)


def fork(words: list[str], log: Path) -> tuple[BaseProcess, int]:
    """Starts a server as `start` does, in a fork of this process, which has imported everything."""

    def run() -> None:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        # The renderers of this process are no children of the fork.
        forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
        sys.argv = ["medusa", "serve", "--port", "0", *words]
        cli.main()

    process = get_context("fork").Process(target=run)
    process.start()
    return process, port_of(log, process.is_alive)


def port_of(log: Path, is_alive: Callable[[], bool]) -> int:
    """Waits for the address that a server prints; returns its port."""
    while is_alive():
        if log.exists() and (address := re.search(r"http://127.0.0.1:(\d+)/v1", log.read_text())):
            return int(address[1])
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text()}")
