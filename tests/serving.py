"""A server in a thread, on a free port of the loopback, and clients for it."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from medusa_cli.api import Medusa
from medusa_cli.serve.limits import Limits
from medusa_cli.serve.server import Server, listen, prepare

MODEL = "tiny"


@dataclass
class Served:
    """A running server: where it is, and what it is made of."""

    server: Server
    port: int
    medusa: Medusa

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, **options: Any) -> Any:
        from openai import OpenAI

        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60, **options})

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers and body of a plain request; a body that is no text goes as JSON."""
        given = {"Content-Type": "application/json", **(headers or {})}
        data = body if isinstance(body, str | bytes | None) else json.dumps(body)
        door = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            door.request(method, path, data, given)
            response = door.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read().decode()
        finally:
            door.close()

    def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, str], Any]:
        status, found, text = self.ask("POST", path, body, headers)
        return status, found, json.loads(text)

    def number(self, name: str) -> float:
        """A number of /metrics."""
        lines = self.ask("GET", "/metrics")[2].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def until(self, name: str, value: float, seconds: float = 60) -> None:
        """Wait until a number of /metrics is this one."""
        end = time.monotonic() + seconds
        while self.number(name) != value:
            assert time.monotonic() < end, f"{name} is {self.number(name)}, not {value}"
            time.sleep(0.02)


@contextmanager
def serving(medusa: Medusa, **settings: Any) -> Iterator[Served]:
    """A server for the time of a test."""
    door = listen("127.0.0.1", 0)
    server = prepare(medusa, Limits(**{"name": MODEL, "max_new_tokens": 400, **settings}))
    thread = threading.Thread(target=server.run, args=(door,), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Served(server, door.getsockname()[1], medusa)
    finally:
        if thread.is_alive():
            with suppress(KeyboardInterrupt):  # a test may have told it already
                server.stop()
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"
