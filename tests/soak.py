"""Many small requests to a `medusa serve` of its own, a tenth cancelled, a tenth malformed: `make soak`.

After the first quarter, hostile clients connect: silent ones, ones that never end a head, ones that hardly read.
Exits with 1 for a wrong or missing answer, for answers that take twice as long beside hostile clients, for a long log,
or for memory that still grows over the last half.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.serving import MODEL, Served, start, tiny_medusa

MALFORMED = (
    "{",
    '{"model": "tiny"}',
    '{"model": "tiny", "prompt": [1], "n": 0}',
    '{"model": "tiny", "prompt": [99]}',
)
# Allowed growth of memory from the middle to the end, as a share: allocators wander. Bytes of the log. Times slower.
GROWTH, MAX_LOG, SLOWER = 0.03, 1 << 20, 2
SILENT, HALF_HEADED, SLOW = 300, 300, 100


def memory_of(process: subprocess.Popen[str]) -> int:
    """Returns the resident bytes of a process."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def harass(port: int, ready: Any) -> None:
    """Keeps hostile connections open: each sends a beginning, then a byte a second at most, and hardly reads.

    Those cut off come back, 100 a second: a flood of requests would be another test.
    """
    unread = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10
    half = b"GET / HTTP/1.1\r\nX-a: "
    kinds = [(b"", b"")] * SILENT + [(half, b"a")] * HALF_HEADED + [(unread, b"")] * SLOW
    sockets: dict[int, socket.socket] = {}
    while True:
        for place in [place for place in range(len(kinds)) if place not in sockets][:100]:
            connection = sockets[place] = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.setblocking(False)
            connection.send(kinds[place][0])
        for place, connection in list(sockets.items()):
            try:
                connection.send(kinds[place][1])
                if not connection.recv(1):
                    raise ConnectionResetError
            except BlockingIOError:  # still open
                pass
            except OSError:
                sockets.pop(place).close()
        if len(sockets) == len(kinds):
            ready.set()
        time.sleep(1)


def ask(port: int, number: int, answers: dict[tuple[int, ...], str]) -> str | None:
    """Makes one request; returns the fault of its answer."""
    chance = random.Random(number)
    prompt, kind, stream = chance.choice(list(answers)), chance.random(), chance.random() < 0.5
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 12, "stream": stream})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        data = chance.choice(MALFORMED) if kind < 0.1 else body
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if 0.1 <= kind < 0.2:  # cancelled
            response.read(40 if stream else 0)
            return None
        text = response.read().decode()
    except (OSError, http.client.HTTPException) as reason:
        return f"{type(reason).__name__}: {reason}"
    finally:
        connection.close()
    if kind < 0.1:
        return None if response.status == 400 else f"malformed, answered {response.status}"
    if response.status != 200:
        return f"answered {response.status}: {text}"
    documents = (
        [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
    )
    answer = "".join(json.loads(document)["choices"][0]["text"] for document in documents)
    return None if answer == answers[prompt] else f"{answer!r} is not {answers[prompt]!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    args = parser.parse_args()
    wrong, levels = list[str](), list[int]()
    # Of requests before and beside hostile clients.
    seconds: tuple[list[float], list[float]] = (
        [],
        [],
    )
    with tempfile.TemporaryDirectory() as folder:
        medusa = tiny_medusa(Path(folder))
        prompts = [(8 + n % 40, 9 + n % 7, 60 - n % 30) for n in range(64)]
        answers = {prompt: medusa.generate(prompt, max_new_tokens=12).text for prompt in prompts}
        words = ["--run", f"{folder}/run", "--tree", "static", "--dtype", "fp32", "--name", MODEL]
        log = Path(folder) / "log"
        process, port = start([*words, "--queue", str(2 * args.clients)], log)
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Event()
        hostile = spawn.Process(target=harass, args=(port, ready), daemon=True)

        def client(number: int) -> None:
            if number % max(1, args.requests // 100) == 0:
                levels.append(memory_of(process))
            began = time.monotonic()
            if fault := ask(port, number, answers):
                wrong.append(f"request {number}: {fault}")
            seconds[number >= calm].append(time.monotonic() - began)

        began, calm = time.monotonic(), args.requests // 4
        with ThreadPoolExecutor(args.clients) as pool:
            list(pool.map(client, range(calm)))
            hostile.start()
            ready.wait(60)
            list(pool.map(client, range(calm, args.requests)))
        hostile.kill()
        server = Served(port)
        server.until("medusa_requests_running", 0)
        left, total = server.number("medusa_requests_waiting"), time.monotonic() - began
        levels.append(memory_of(process))
        process.terminate()
        code, logged = process.wait(60), log.stat().st_size
    middle = sorted(levels[len(levels) // 2 :][:5])[2] if len(levels) > 10 else levels[0]
    end = sorted(levels[-5:])[2] if len(levels) > 10 else levels[-1]
    growth = end / middle - 1
    (calm_s, calm_p99), (hostile_s, hostile_p99) = (
        (median(s), max(quantiles(s, n=100))) for s in seconds
    )
    print("\n".join(wrong[:20]), file=sys.stderr)
    print(
        f"{args.requests} requests by {args.clients} clients in {total:.0f} s: {len(wrong)} wrong, "
        f"{left:.0f} left waiting, memory {levels[0] >> 20} MiB at first, {middle >> 20} in the middle, "
        f"{end >> 20} at the end ({growth:+.1%} over the last half), exit code {code}"
    )
    print(
        f"seconds a request, median and 99th percentile: {calm_s:.3f} and {calm_p99:.3f} before, {hostile_s:.3f} and "
        f"{hostile_p99:.3f} beside {SILENT} silent, {HALF_HEADED} half-headed and {SLOW} slow clients; "
        f"{logged:,} bytes of log"
    )
    slow = hostile_s > SLOWER * calm_s or hostile_p99 > SLOWER * calm_p99
    sys.exit(bool(wrong or left or growth > GROWTH or code or slow or logged > MAX_LOG))


if __name__ == "__main__":
    main()
