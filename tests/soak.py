"""Many small requests to a `medusa serve` of its own, a tenth left in the middle, a tenth malformed: `make soak`.

Ends with code 1 for a wrong answer, an answer that never comes, or memory that still grows over the last half.
"""

import argparse
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from medusa_cli.api import Medusa
from tests.helpers import save_model, save_run
from tests.serving import MODEL, Served

MALFORMED = ("{", '{"model": "tiny"}', '{"model": "tiny", "prompt": [1], "n": 2}', '{"model": "tiny", "prompt": [99]}')
# What memory may grow by from the middle to the end, as a share of it: allocators wander.
GROWTH = 0.03


class Process:
    """`medusa serve` on a free port, until the block ends, and then whether it ends well."""

    def __init__(self, words: list[str]) -> None:
        self._command = [sys.executable, "-m", "medusa_cli", "serve", "--port", "0", *words]

    def __enter__(self) -> "Process":
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = ""
        for line in self._process.stderr:
            said += line
            if found := re.search(r"http://127.0.0.1:(\d+)/v1", line):
                self.port = int(found[1])
                threading.Thread(target=self._process.stderr.read, daemon=True).start()
                return self
        raise RuntimeError(f"the server did not start: {said}")

    def __exit__(self, *reason: object) -> None:
        self._process.terminate()
        self.code = self._process.wait(60)

    @property
    def resident(self) -> int:
        """Bytes of its memory."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Clients:
    """Threads that take the next number, and do what it says, until all are done."""

    def __init__(self, server: Process, requests: int, answers: dict[tuple[int, ...], str]) -> None:
        self.server, self.requests, self.answers = server, requests, answers
        self.done, self.wrong, self.levels = 0, [], []  # type: ignore[var-annotated]
        self._lock = threading.Lock()

    def run(self) -> None:
        door = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        while True:
            with self._lock:
                number = self.done
                if number == self.requests:
                    return
                self.done += 1
                if number % max(1, self.requests // 100) == 0:
                    self.levels.append(self.server.resident)
            try:
                said = self.one(door, number)
            except (OSError, http.client.HTTPException, ValueError) as reason:
                said = f"{type(reason).__name__}: {reason}"
            if said:
                door.close()
                self.wrong.append(f"request {number}: {said}")

    def one(self, door: http.client.HTTPConnection, number: int) -> str | None:
        """Make one request; what was wrong with its answer."""
        chance = random.Random(number)
        prompt = chance.choice(list(self.answers))
        kind = chance.random()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "stream": chance.random() < 0.5}
        data = chance.choice(MALFORMED) if kind < 0.1 else json.dumps(body)
        door.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        response = door.getresponse()
        if 0.1 <= kind < 0.2:  # leave
            if body["stream"]:
                response.read(40)
            door.close()
            return None
        text = response.read().decode()
        if kind < 0.1:
            return None if response.status == 400 else f"malformed, answered {response.status}"
        if response.status != 200:
            return f"answered {response.status}: {text}"
        if body["stream"]:
            chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        else:
            text = json.loads(text)["choices"][0]["text"]
        return None if text == self.answers[prompt] else f"{text!r} is not {self.answers[prompt]!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = save_run(Path(folder) / "run", save_model(Path(folder) / "model"))
        medusa = Medusa.from_pretrained(drafter=run.path, tree="static", dtype="fp32")
        prompts = [(8 + n % 40, 9 + n % 7, 60 - n % 30) for n in range(64)]
        answers = {prompt: medusa.generate(prompt, max_new_tokens=12).text for prompt in prompts}
        words = ["--run", str(run.path), "--tree", "static", "--dtype", "fp32", "--name", MODEL]
        with Process([*words, "--queue", str(2 * asked.clients)]) as server:
            clients = Clients(server, asked.requests, answers)
            threads = [threading.Thread(target=clients.run) for _ in range(asked.clients)]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seen = Served(server.port)
            seen.until("medusa_requests_running", 0)
            left = seen.number("medusa_requests_waiting")
            seconds = time.monotonic() - began
            levels = [*clients.levels, server.resident]
    middle = sorted(levels[len(levels) // 2 :][:5])[2] if len(levels) > 10 else levels[0]
    end = sorted(levels[-5:])[2] if len(levels) > 10 else levels[-1]
    growth = end / middle - 1
    for line in clients.wrong[:20]:
        print(line, file=sys.stderr)
    print(
        f"{asked.requests} requests by {asked.clients} clients in {seconds:.0f} s: {len(clients.wrong)} wrong, "
        f"{left:.0f} left waiting, memory {levels[0] >> 20} MiB at first, {middle >> 20} in the middle, "
        f"{end >> 20} at the end ({growth:+.1%} over the last half), exit code {server.code}"
    )
    sys.exit(bool(clients.wrong or left or growth > GROWTH or server.code))


if __name__ == "__main__":
    main()
