"""`make bench-serve`: tokens/s of the Python API and of servers on the same questions."""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from medusa_cli.api import Medusa
from medusa_cli.bench.questions import read_questions
from medusa_cli.files.assets import model_dir, mt_bench_path

STARTS_WITHIN = 300
TRANSFORMERS = ("transformers.cli.transformers", "serve")
# Without these limits its continuous batching takes nearly all memory.
BLOCKS = ("--cb-block-size", "32", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "512")
Ask = Callable[[str], int]  # from a question to the answer's tokens


@contextlib.contextmanager
def server(*words: str) -> Iterator[str]:
    """Yields the address of `python -m WORDS --port PORT`, which ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, "-m", *words, "--port", str(port)], env=environment)
    try:
        for _ in range(10 * STARTS_WITHIN):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=1),
            ):
                break
            if process.poll() is not None:
                sys.exit(f"`{' '.join(words)}` does not start")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def asks(url: str, model: str, tokens: int) -> Ask:
    """Returns a function that has a server answer greedily and counts the answer's tokens."""

    def ask(question: str) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": question}]}
        body |= {"max_tokens": tokens, "temperature": 0.0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=STARTS_WITHIN) as reply:
            return int(json.load(reply)["usage"]["completion_tokens"])

    return ask


def rate(ask: Ask, questions: Sequence[str], clients: int) -> float:
    """Returns tokens/s over the questions, `clients` of them asked at a time."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        tokens = sum(pool.map(ask, questions))
    return tokens / (time.perf_counter() - start)


def serve(asked: argparse.Namespace) -> None:
    """Prints tokens/s of the API, `medusa serve` and `transformers serve`, by clients, on the same questions."""
    loaded = Medusa.from_pretrained(asked.model, dtype=asked.dtype)

    def api(question: str) -> int:
        return len(loaded.generate(question, max_new_tokens=asked.tokens).tokens)

    # Answers that end early would make the rates of batches incomparable.
    every = [question.turns[0] for question in read_questions(mt_bench_path())[0]]
    questions = [
        text
        for text in every[:: max(1, len(every) // (3 * asked.questions))]
        if api(text) == asked.tokens
    ]
    questions = questions[: asked.questions]
    clients = [int(count) for count in asked.clients.split(",")]
    rates = {("Medusa.generate", 1): rate(api, questions, 1)}
    kind = {"fp32": "float32", "bf16": "bfloat16"}.get(asked.dtype, "auto")
    commands = {
        "medusa serve": (
            asked.model,
            ("medusa_cli", "serve", "--model", asked.model, "--dtype", asked.dtype),
        ),
        "transformers serve": (
            model_dir(asked.model),
            (
                *TRANSFORMERS,
                model_dir(asked.model),
                "--continuous-batching",
                "--dtype",
                kind,
                *BLOCKS,
            ),
        ),
    }
    for name, (model, words) in commands.items():
        for count in clients:
            with server(
                *words
            ) as url:  # a server of its own for each: no prefix is cached from another round
                ask = asks(url, model, asked.tokens)
                rate(ask, ["Count from one to a hundred."] * 2 * count, count)  # warm-up
                rates[name, count] = rate(ask, questions, count)
    first = rates["Medusa.generate", 1]
    for (name, count), value in rates.items():
        print(
            f"{name:20} {count:2} at a time: {value:6.1f} tokens/s, {value / first:.2f} x Medusa.generate"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128, help="tokens an answer")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--clients", default="1,8", help="clients at a time, a list")
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
