"""`make bench-endpoint`: does distilling keep a server as busy as asking it the same questions and nothing else?"""

import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli import console, options
from medusa_cli.assets import DEFAULT_MODEL, DEFAULT_SEED, model_dir
from medusa_cli.errors import UserError, in_flags
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.distilling import RecordWriter, Settings
    from medusa_cli.distilling.endpoint import Endpoint
    from medusa_cli.distilling.seeds import Seed


def endpoint_load(
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="The server. [default: `transformers serve`, started here]")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name on it.")] = None,
    model: options.Model = None,
    seed: options.Seed = None,
    questions: Annotated[int, typer.Option(metavar="N", min=1, help="Questions in each round.")] = 48,
    max_new_tokens: options.MaxNewTokens = 64,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Questions at a time.")] = 8,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds of both, in turns.")] = 3,
) -> None:
    """Ask a server the same questions bare and through `medusa distill`, in turns; print both rates and their ratio."""
    name = model or DEFAULT_MODEL
    with contextlib.ExitStack() as stack:
        url = endpoint or f"http://127.0.0.1:{stack.enter_context(_served(name))}"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = _measure(url, endpoint_model, name, seed or DEFAULT_SEED, questions, max_new_tokens or 64,
                         concurrency, rounds, folder)  # fmt: skip
    bare, distilled, tokens = found
    console.result(f"bare:     {questions / bare:.2f} questions/s, {tokens / bare:.1f} tokens/s")
    console.result(f"distill:  {questions / distilled:.2f} questions/s, {tokens / distilled:.1f} tokens/s")
    console.result(
        f"distilling keeps {bare / distilled:.1%} of the server's own throughput (at {concurrency} at a time)"
    )


def _measure(
    url: str,
    endpoint_model: str | None,
    name: str,
    seed: str,
    questions: int,
    max_new_tokens: int,
    concurrency: int,
    rounds: int,
    folder: Path,
) -> tuple[float, float, int]:
    """Median seconds of a bare round and of a distilled one, and the answer tokens of either."""
    from medusa_cli.commands.answering import connect
    from medusa_cli.distilling import RecordWriter, Settings, read_seeds
    from medusa_cli.distilling.bare import bare_load
    from medusa_cli.distilling.distilled import order
    from medusa_cli.distilling.tokenizer import Tokenizer

    speaker = Tokenizer(name)
    settings = Settings(max_new_tokens=max_new_tokens, max_turns=1, capacity=512)
    short = [one for one in read_seeds(seed)[0] if sum(map(len, one.turns[:1])) < settings.capacity]
    seeds = order(short, settings, questions)
    if len(seeds) < questions:
        raise UserError(f"--seed {seed} has {len(seeds)} short questions", "ask for fewer --questions")

    def server() -> "Endpoint":
        return connect(url, endpoint_model, name, speaker)

    bare_load(server(), seeds[:concurrency], settings, concurrency)  # the first answers warm it up
    bare, distilled, tokens = [], [], 0
    for number in range(rounds):
        bare.append(bare_load(server(), seeds, settings, concurrency))
        run = Run.open(f"{folder}/{number}", create=True)
        took, tokens = _distil(server(), seeds, settings, concurrency, run, RecordWriter(run, speaker.hidden_size, {}))
        distilled.append(took)
        console.info(f"round {number + 1}: bare {bare[-1]:.1f} s, distill {distilled[-1]:.1f} s")
    return statistics.median(bare), statistics.median(distilled), tokens


def _distil(
    server: "Endpoint", seeds: "list[Seed]", settings: "Settings", concurrency: int, run: Run, writer: "RecordWriter"
) -> tuple[float, int]:
    """Seconds that the distillation of the seeds takes, and its answer tokens; UserError if one of them fails."""
    from medusa_cli.commands.answering import Meter, from_server
    from medusa_cli.distilling.failures import Failures

    failures = Failures(run)
    start = time.perf_counter()
    with console.progress("distilling", total=len(seeds), unit="conversations") as bar:
        skipped = from_server(server, seeds, settings, concurrency, writer, failures, Meter(bar))
    writer.close()
    took = time.perf_counter() - start
    if skipped:
        raise UserError(f"{len(skipped)} questions are longer than {settings.capacity} positions", "use another --seed")
    # An answer whose text does not give its tokens back was made all the same: it is no less work for the server.
    lines = failures.path.read_text().splitlines() if failures.count else []
    refused = [json.loads(line)["reason"] for line in lines]
    if any("give the text back" not in reason for reason in refused):
        raise UserError(f"{len(refused)} questions failed: {refused[0]}", "see the server's log")
    return took, writer.tokens


def _served(name: str) -> contextlib.AbstractContextManager[int]:
    """`transformers serve` with a model, until the block ends; its port."""
    from medusa_cli.benchmarks.servers import PORT, TRANSFORMERS, started

    console.info(f"starting `transformers serve` with {name}")
    return started(
        TRANSFORMERS, [model_dir(name), "--port", PORT], "pip install 'transformers[serving]', or give --endpoint"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not be left behind
    try:
        typer.run(endpoint_load)
    except UserError as reason:
        console.error(in_flags(reason))
        sys.exit(reason.exit_code)
