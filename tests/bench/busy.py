"""`make bench-busy`: decoding, distillation and training, alone and beside a program that keeps cores busy."""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from medusa_cli.files.cpus import cpu_count

# The least speed beside a busy core, as a share of the quiet one.
AIM = 0.4
SPIN = "while True: pass"


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keeps so many cores busy for the time of the block."""
    spinners = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(cores)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def medusa(*words: Any) -> Any:
    """Returns the document of a command, run in a process of its own."""
    command = [sys.executable, "-m", "medusa_cli", *map(str, words), "--json", "--quiet"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"`medusa {' '.join(map(str, words))}` failed")
    return json.loads(done.stdout)


def rates(samples: int) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yields the name of each kind of work, and a function that returns its tokens a second."""

    def decoded() -> float:
        words = ("--limit", samples, "--max-new-tokens", 64, "--methods", "medusa")
        return float(medusa("bench", *words)["methods"]["medusa"]["tokens_per_s"])

    def distilled(run: str) -> float:
        words = ("--run", run, "--max-samples", samples, "--max-new-tokens", 64)
        return float(medusa("distill", *words)["tokens_per_s"])

    def distilled_anew() -> float:
        with tempfile.TemporaryDirectory() as folder:
            return distilled(f"{folder}/run")

    yield "decoding", decoded
    yield "distillation", distilled_anew
    with tempfile.TemporaryDirectory() as folder:
        distilled(f"{folder}/run")
        tokens = f"train.max_tokens={500 * samples}"
        words = ("medusa1", tokens, "train.batch_tokens=500", "train.max_length=250")
        yield (
            "training",
            lambda: float(medusa("train", *words, "--run", f"{folder}/run")["tokens_per_s"]),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=16, help="questions and conversations")
    parser.add_argument("--cores", type=int, default=max(1, cpu_count() // 2), help="busy ones")
    asked = parser.parse_args()
    slow = []
    for name, rate in rates(asked.samples):
        rate()  # what a first run makes is kept
        quiet = rate()
        with busy(asked.cores):
            beside = rate()
        share = beside / quiet
        print(f"{name}: {quiet:.1f} tokens/s alone, {beside:.1f} beside {asked.cores} busy cores")
        print(f"  {share:.2f} of the quiet speed; the aim is {AIM}")
        if share < AIM:
            slow.append(name)
    if slow:
        sys.exit(f"slower than the aim: {', '.join(slow)}")


if __name__ == "__main__":
    main()
