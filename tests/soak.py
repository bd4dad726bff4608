"""Many small requests to a `medusa serve` of its own, a tenth cancelled, a tenth malformed: `make soak`.

Exits with 1 for a wrong or missing answer, or for memory that still grows over the last half.
"""

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.serving import MODEL, Served, start, tiny_medusa

MALFORMED = ("{", '{"model": "tiny"}', '{"model": "tiny", "prompt": [1], "n": 2}', '{"model": "tiny", "prompt": [99]}')
# Allowed growth of memory from the middle to the end, as a share: allocators wander.
GROWTH = 0.03


def memory_of(process: subprocess.Popen[str]) -> int:
    """Returns the resident bytes of a process."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
    documents = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
    answer = "".join(json.loads(document)["choices"][0]["text"] for document in documents)
    return None if answer == answers[prompt] else f"{answer!r} is not {answers[prompt]!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    args = parser.parse_args()
    wrong, levels = list[str](), list[int]()
    with tempfile.TemporaryDirectory() as folder:
        medusa = tiny_medusa(Path(folder))
        prompts = [(8 + n % 40, 9 + n % 7, 60 - n % 30) for n in range(64)]
        answers = {prompt: medusa.generate(prompt, max_new_tokens=12).text for prompt in prompts}
        words = ["--run", f"{folder}/run", "--tree", "static", "--dtype", "fp32", "--name", MODEL]
        process, port = start([*words, "--queue", str(2 * args.clients)])

        def client(number: int) -> None:
            if number % max(1, args.requests // 100) == 0:
                levels.append(memory_of(process))
            if fault := ask(port, number, answers):
                wrong.append(f"request {number}: {fault}")

        began = time.monotonic()
        with ThreadPoolExecutor(args.clients) as pool:
            list(pool.map(client, range(args.requests)))
        server = Served(port)
        server.until("medusa_requests_running", 0)
        left, seconds = server.number("medusa_requests_waiting"), time.monotonic() - began
        levels.append(memory_of(process))
        process.terminate()
        code = process.wait(60)
    middle = sorted(levels[len(levels) // 2 :][:5])[2] if len(levels) > 10 else levels[0]
    end = sorted(levels[-5:])[2] if len(levels) > 10 else levels[-1]
    growth = end / middle - 1
    print("\n".join(wrong[:20]), file=sys.stderr)
    print(
        f"{args.requests} requests by {args.clients} clients in {seconds:.0f} s: {len(wrong)} wrong, "
        f"{left:.0f} left waiting, memory {levels[0] >> 20} MiB at first, {middle >> 20} in the middle, "
        f"{end >> 20} at the end ({growth:+.1%} over the last half), exit code {code}"
    )
    sys.exit(bool(wrong or left or growth > GROWTH or code))


if __name__ == "__main__":
    main()
