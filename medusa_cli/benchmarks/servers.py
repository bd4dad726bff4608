"""Servers that speak OpenAI's API: started for a measurement, and asked."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from medusa_cli.errors import UserError

# Answers come in seconds; a model may take longer to load.
STARTS_WITHIN = 300
TRANSFORMERS = ("transformers.cli.transformers", "serve")
# Stands among the words of a command for the port that is found.
PORT = "PORT"


@contextlib.contextmanager
def started(module: Sequence[str], words: Sequence[str], remedy: str) -> Iterator[int]:
    """The port of a server, `python -m MODULE WORDS`, until the block ends; UserError, with the end of what it said and
    the remedy, where it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", *module, *(str(port) if one is PORT else one for one in words)]
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            if not _listens(process, port):
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines()[-1:]
                raise UserError(f"`{' '.join(module)}` does not start: {' '.join(said)}", remedy)
            yield port
        finally:
            process.kill()
            process.wait()


def _listens(process: "subprocess.Popen[bytes]", port: int) -> bool:
    """Wait until the server can be reached; False if it ends before, or takes too long."""
    for _ in range(10 * STARTS_WITHIN):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.1)
    return False


def ask(port: int, model: str, question: str, tokens: int) -> int:
    """Have one greedy answer; how many tokens it has. UserError where it is refused."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0.0,
    }
    door = http.client.HTTPConnection("127.0.0.1", port, timeout=STARTS_WITHIN)
    try:
        door.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = door.getresponse()
        said = response.read().decode()
        if response.status != 200:
            raise UserError(f"the server answered {response.status}: {said[:300]}", "see its log")
        return int(json.loads(said)["usage"]["completion_tokens"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as reason:
        raise UserError(f"the server's answer cannot be read: {reason!r}", "see its log") from reason
    finally:
        door.close()
