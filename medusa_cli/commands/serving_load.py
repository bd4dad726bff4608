"""`make bench-serve`: tokens/s of `medusa chat`, of the Python API, of `medusa serve` and of `transformers serve`."""

import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli import console, options
from medusa_cli.assets import DEFAULT_MODEL, model_dir, mt_bench_path
from medusa_cli.errors import UsageError, UserError, in_flags

if TYPE_CHECKING:
    from medusa_cli.benchmarks.ways import Way

# Of so many questions that stand together, of one category each, one is asked.
STRIDE = 3
WAYS = ("chat", "api", "serve", "transformers")
# Unless told how much, its continuous batching takes most of the memory there is.
BLOCKS = ("--cb-block-size", "32", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "512")
EXTRA = "pip install 'transformers[serving]'"


def serving_load(
    model: options.Model = None,
    run: options.RunOrShipped = None,
    ways: Annotated[str, typer.Option(metavar="NAMES", help=f"Some of {', '.join(WAYS)}.")] = "chat,api,serve",
    clients: Annotated[str, typer.Option(metavar="N,..", help="How many clients ask a server at a time.")] = "1,8",
    questions: Annotated[int, typer.Option(metavar="N", min=1, help="Questions in each round.")] = 8,
    max_new_tokens: options.MaxNewTokens = 128,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds, each of other questions.")] = 2,
    dtype: options.Dtype = "fp32",
    json: options.Json = False,
) -> None:
    """Ask the same MT-Bench questions of each way in turns; print tokens/s. All answers are of max_new_tokens: others
    are left out beforehand."""
    console.configure(json=json)
    from medusa_cli.benchmarks.servers import TRANSFORMERS
    from medusa_cli.benchmarks.ways import in_turns, whole_answers

    named, tokens, name = ways.split(","), max_new_tokens or 128, model or DEFAULT_MODEL
    if unknown := [one for one in named if one not in WAYS]:
        raise UsageError(f"--ways {unknown[0]!r} is unknown", f"use some of {', '.join(WAYS)}")
    counts = [int(one) for one in clients.split(",")]
    with contextlib.ExitStack() as stack:
        found: list[Way] = []
        if "chat" in named or "api" in named:
            found += [way for way in _here(name, run, dtype, tokens) if way.name in named]
        if "serve" in named:
            words = ["serve", "--model", name, *(["--run", run] if run else []), "--dtype", dtype]
            found += _server(stack, "serve", ("medusa_cli",), words, name, tokens, counts)
        if "transformers" in named:
            kind = {"fp32": "float32", "bf16": "bfloat16"}.get(dtype, "auto")
            words = [model_dir(name), "--continuous-batching", "--dtype", kind, *BLOCKS]
            found += _server(stack, "transformers", TRANSFORMERS, words, model_dir(name), tokens, counts)
        asked = whole_answers(found[0], _spread(), questions * rounds, tokens)
        for number in range(rounds):
            in_turns(found, asked[number * questions :][:questions])
            console.info(f"round {number + 1} of {rounds} is done")
    _report(found, json)


def _here(name: str, run: str | None, dtype: str, tokens: int) -> "list[Way]":
    """Chat and the API, over one model in this thread."""
    from medusa_cli.api import Medusa
    from medusa_cli.benchmarks.ways import Way
    from medusa_cli.commands.groups import Where
    from medusa_cli.commands.loading import load
    from medusa_cli.commands.session import Session
    from medusa_cli.decoding.sampling import Sampling
    from medusa_cli.runs.resolve import choose

    made = load(choose(name, run, None, None), Where(dtype=dtype))
    # Decoders of their own: neither knows a question from the other.
    session, medusa = Session(Medusa(made), Sampling(), tokens), Medusa(made)

    def chat(question: str) -> int:
        session.clear(None)
        return int(session.answer(question, show=False)[1].tokens)

    def api(question: str) -> int:
        return len(medusa.generate(question, max_new_tokens=tokens).tokens)

    return [Way("chat", chat), Way("api", api)]


def _server(
    stack: contextlib.ExitStack,
    name: str,
    module: Sequence[str],
    words: Sequence[str],
    model: str,
    tokens: int,
    counts: Sequence[int],
) -> "list[Way]":
    """A server of its own for each number of clients: none knows the questions from another round's."""
    from medusa_cli.benchmarks.servers import PORT, ask, started
    from medusa_cli.benchmarks.ways import Way

    found = []
    for count in counts:
        console.info(f"starting {name} for {count} clients")
        port = stack.enter_context(
            started(module, [*words, "--port", PORT], EXTRA if name == "transformers" else "see medusa doctor")
        )

        def asked(question: str, port: int = port) -> int:
            return ask(port, model, question, tokens)

        way = Way(name, asked, count)
        for _ in range(2):  # the first answers warm it up
            way.run(["Count from one to a hundred."] * count)
        way.loads.clear()
        found.append(way)
    return found


def _spread() -> list[str]:
    """MT-Bench's first turns, a few of every category at a time: those of one category stand together."""
    from medusa_cli.benchmarks import read_questions

    asked = read_questions(mt_bench_path())[0]
    return [asked[place].turns[0] for first in range(STRIDE) for place in range(first, len(asked), STRIDE)]


def _report(ways: "Sequence[Way]", json: bool) -> None:
    """Print each way's rate, and how it stands to the first."""
    from medusa_cli.benchmarks.ways import standings

    rows = [asdict(row) for row in standings(ways)]
    if json:
        console.emit_json(rows)
        return
    for row in rows:
        console.result(
            f"{row['way']:13} {row['clients']:2} at a time: {row['tokens_per_s']:6.1f} tokens/s, "
            f"{row['over_the_first']:.2f} x {ways[0].name}, {row['tokens']} tokens"
        )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers must not be left behind
    try:
        typer.run(serving_load)
    except UserError as reason:
        console.error(in_flags(reason))
        sys.exit(reason.exit_code)
