"""`make bench-serve`: tokens/s of servers by the number of clients, on the same questions."""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from medusa_cli.bench.questions import read_questions
from medusa_cli.files.fetch import mt_bench_path
from medusa_cli.files.model_source import ModelSource

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


def commands(asked: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Returns the words that start each server that `--servers` names."""
    slots = ("--batch-size", str(max(asked.clients)))
    medusa = ("medusa_cli", "serve", "--model", asked.model, "--dtype", asked.dtype, *slots)
    kind = {"fp32": "float32", "bf16": "bfloat16"}.get(asked.dtype, "auto")
    folder = ModelSource.of(asked.model).folder
    known = {
        "baseline": (*medusa, "--baseline"),
        "drafts": medusa,
        "transformers": (*TRANSFORMERS, folder, "--continuous-batching", "--dtype", kind, *BLOCKS),
    }
    return {name: known[name] for name in asked.servers.split(",")}


def load(asked: argparse.Namespace) -> None:
    """Prints tokens/s of servers by clients, on the same questions; the servers take turns.

    A number before each question keeps a server from finding it in its prefix cache.
    """
    every = [question.turns[0] for question in read_questions(mt_bench_path())[0]]
    questions = every[:: max(1, len(every) // asked.questions)][: asked.questions]
    rates: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        urls = {
            name: stack.enter_context(server(*words)) for name, words in commands(asked).items()
        }
        urls |= dict(peer.split("=", 1) for peer in asked.peer)
        names = {
            name: ModelSource.of(asked.model).folder if name == "transformers" else asked.model
            for name in urls
        }
        askers = {name: asks(url, names[name], asked.tokens) for name, url in urls.items()}
        for count in asked.clients:
            for ask in askers.values():
                rate(ask, [f"Count from {count} to a hundred."] * 2 * count, count)
            for turn in range(asked.rounds):
                numbered = [f"{count}.{turn}: {question}" for question in questions]
                order = list(askers.items())
                shift = turn % len(order)
                for name, ask in order[shift:] + order[:shift]:
                    value = rate(ask, numbered, count)
                    rates.setdefault((name, count), []).append(value)
                    print(f"{name} {count} clients: {value:.1f}", file=sys.stderr, flush=True)
    first = next(iter(urls))
    for (name, count), values in rates.items():
        ratios = [own / base for own, base in zip(values, rates[first, count], strict=True)]
        speed = f"{name:14} {count:2} clients: {statistics.median(values):6.1f} tokens/s"
        spread = f"({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{speed}, {statistics.median(ratios):.2f} x {first} {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--tokens", type=int, default=96, help="tokens an answer")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3, help="times that each server answers them")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--clients",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[1, 2, 4, 8, 16],
        help="clients at a time, a list",
    )
    parser.add_argument(
        "--servers", default="baseline,drafts", help="of baseline, drafts, transformers"
    )
    parser.add_argument(
        "--peer", action="append", default=[], help="NAME=URL of a server that runs already"
    )
    load(parser.parse_args())


if __name__ == "__main__":
    main()
