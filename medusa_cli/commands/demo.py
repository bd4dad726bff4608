"""`medusa demo`: the same questions decoded plain and with drafts, side by side."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from medusa_cli import console, options
from medusa_cli.options import DraftFlags, LoadFlags, OutputFlags, flag
from medusa_cli.runs.load_options import as_trained

if TYPE_CHECKING:
    from medusa_cli.bench.run import OnTokens
    from medusa_cli.bench.stats import Result
    from medusa_cli.model import Backbone

MAX_NEW_TOKENS = 128
QUESTIONS = 3
HEADINGS = {"hf": "plain decoding (transformers' generate)", "medusa": "with drafts (medusa)"}


def demo(
    *,
    limit: Annotated[int, flag("--limit N", "MT-Bench questions over the categories.", show_default=True)] = QUESTIONS,
    max_new_tokens: options.MaxNewTokens = None,
    drafting: DraftFlags,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Watch MT-Bench questions being answered plain and with drafts, and see what it gains.

    Greedy decoding; the closing table is that of `medusa bench`. Under five minutes on two cores.
    """
    printing.configure()
    choice = drafting.choose()

    from medusa_cli.bench.questions import read_questions, spread
    from medusa_cli.bench.run import Bench, unwatched
    from medusa_cli.commands.bench import show
    from medusa_cli.decode import Sampling
    from medusa_cli.files.assets import mt_bench_path

    tokens = max_new_tokens or MAX_NEW_TOKENS
    questions = spread(read_questions(mt_bench_path())[0], limit)
    console.info(
        f"{len(questions)} MT-Bench questions, up to {tokens} new tokens a turn (--limit N, --max-new-tokens N)"
    )
    loading = as_trained(loading, choice.trained)
    title, methods = "Plain and drafted decoding, greedy", ["hf", "ar", "medusa"]
    drafts = {"medusa": choice} if choice.drafter else {}
    bench = Bench(choice, drafts, methods, questions, tokens, Sampling(), title, loading)
    with console.terminated():
        document = bench.run(unwatched if printing.json or printing.quiet else panes)
    if printing.json:
        console.emit_json(document)
        return
    show(document)
    drafted = document["methods"]["medusa"]
    console.result(f"answers identical to plain decoding: {drafted['identical']} of {drafted['questions']}")


@contextmanager
def panes(backbone: "Backbone", turns: int) -> "Iterator[OnTokens]":
    """Shows plain answers, which come first, and drafted ones: two panes that fill; without a terminal as text."""
    out, current = console.out, list[int]()  # current: tokens of the turn under way
    live = Live(console=out, refresh_per_second=12, transient=True)

    def show(name: str, results: "Sequence[Result]", new: list[int]) -> None:
        if name not in HEADINGS:
            return
        [result] = results
        turn = len(result.answers[name].turns) - (0 if new else 1)
        current.extend(new)
        texts = {}
        for method, heading in HEADINGS.items():
            answer = result.answers.get(method)
            known = answer.turns if answer else []
            ids = known[turn] if turn < len(known) else current if method == name else []
            speed = f", {answer.tokens / answer.seconds:.1f} tokens/s" if answer and answer.seconds else ""
            # Half a character at the end waits for the rest.
            texts[heading + speed] = backbone.tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
        if live.is_started:
            # A panel taller than the screen would flicker: while text streams, only its end is shown.
            limit = max(4, out.height - 6) * (out.width // 2 - 5)
            live.update(_panels({title: text[-limit:] for title, text in texts.items()}))
        if new:
            return
        current.clear()
        if name == "medusa":
            console.result(f"\n{result.question.category}: {result.question.turns[turn]}")
            text = "\n".join(f"--- {title}\n{text}" for title, text in texts.items())
            console.result(_panels(texts) if out.is_terminal else text)

    with live if out.is_terminal and not out.plain else nullcontext():
        yield show


def _panels(texts: Mapping[str, str]) -> Columns:
    """Returns texts side by side under their titles."""
    return Columns(Panel(Text(text), title=title, width=console.out.width // 2 - 1) for title, text in texts.items())
