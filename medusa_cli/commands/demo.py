"""`medusa demo`: the same questions decoded plain and with drafts, side by side."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli import console, options
from medusa_cli.commands.groups import Drafting, Said, Where, but
from medusa_cli.commands.loading import follow_choice, load
from medusa_cli.runs.reading import Document

if TYPE_CHECKING:
    from rich.columns import Columns
    from rich.live import Live

    from medusa_cli.backbone import Backbone
    from medusa_cli.benchmarks import Result
    from medusa_cli.benchmarks.bench import Bench

MAX_NEW_TOKENS = 128
QUESTIONS = 3
LEFT, RIGHT = "hf", "medusa"
HEADINGS = {LEFT: "plain decoding (transformers' generate)", RIGHT: "with drafts (medusa)"}


def demo(
    *,
    limit: Annotated[
        int, typer.Option(metavar="N", help="MT-Bench questions, spread over the categories.")
    ] = QUESTIONS,
    max_new_tokens: options.MaxNewTokens = None,
    drafting: Drafting,
    place: Annotated[Where, but("load_in_4bit", "load_in_8bit")],
    said: Said,
) -> None:
    """Watch MT-Bench questions being answered plain and with drafts, and see what it gains.

    Greedy decoding; the closing table is that of `medusa bench`. Under five minutes on two cores.
    """
    said.configure()
    choice = drafting.choose()

    from medusa_cli.assets import mt_bench_path
    from medusa_cli.benchmarks import read_questions, spread
    from medusa_cli.benchmarks.bench import Bench
    from medusa_cli.commands.measuring import show
    from medusa_cli.decoding import Sampling

    tokens = max_new_tokens or MAX_NEW_TOKENS
    chosen = spread(read_questions(mt_bench_path())[0], limit)
    console.info(
        f"{len(chosen)} MT-Bench questions, up to {tokens} new tokens a turn; --limit N, --max-new-tokens N take more"
    )
    place = follow_choice(choice, place)
    title = "Plain and drafted decoding, greedy"
    bench = Bench(choice, [LEFT, "ar", RIGHT], chosen, tokens, Sampling(), title, place.loading)
    document = bench.run(partial(load, place=place), _Stage(show=not (said.json or said.quiet)))
    if said.json:
        console.emit_json(document)
        return
    show(document)
    console.result(_verdict(document["methods"][RIGHT], document["dtype"]))


def _verdict(measured: Document, kind: str) -> str:
    """Whether the answers are those of plain decoding, and, where some are not, how often and by how little."""
    count, parted = measured["questions"], measured["divergences"]
    if measured["identical"] == count:
        return "output identical to plain decoding: yes"
    line = f"output identical to plain decoding: in {measured['identical']} of {count} answers"
    if kind == "float32" or not parted:
        return line
    margin = max(one["margin"] for one in parted)
    once = f"{len(parted)} time{'s' * (len(parted) > 1)} in {measured['tokens']:,} tokens"
    return (
        f"{line}. {once} the model liked two next words almost equally (scores at most {margin:.2g} apart), and "
        f"{kind}, which rounds scores, picked the other one; there the texts part. --dtype fp32 rounds far less"
    )


class _Stage:
    """Two panels that fill as tokens come on a terminal; the finished answers one below the other elsewhere.

    The left one is filled first, question by question, and stands beside the right one when that is.
    """

    def __init__(self, show: bool) -> None:
        self._show = show
        self._live: Live | None = None
        self._texts = {LEFT: "", RIGHT: ""}
        self._plain: list[str] = []

    @contextmanager
    def __call__(self, bench: "Bench", backbone: "Backbone", names: Sequence[str]) -> "Iterator[_Stage]":
        """Watch these methods."""
        from rich.live import Live

        from medusa_cli.decoding.text import TextStream

        self._new_stream = lambda: TextStream(backbone)
        self._names = [name for name in names if name in HEADINGS]
        self._clear()
        with ExitStack() as guard:
            if self._show and console.out.is_terminal:
                guard.enter_context(console.terminated())
                self._live = guard.enter_context(Live(console=console.out, refresh_per_second=12, transient=True))
            yield self
        del self._new_stream, self._streams  # they hold the model, which must go before the next one comes

    def _clear(self) -> None:
        self._streams = {name: self._new_stream() for name in self._names}
        self._texts = {LEFT: self._plain[0] if RIGHT in self._names else "", RIGHT: ""}

    def tokens(self, name: str, new: list[int]) -> None:
        """Show new tokens of one of the two methods; [] ends an answer."""
        if name in self._names:
            self._texts[name] += self._streams[name].add(new)
            if not new:  # the answer is over: the next turn's begins on a line of its own
                self._texts[name] += self._streams[name].rest() + "\n\n"
                self._streams[name] = self._new_stream()
            if self._live is not None:
                self._live.update(self._panels(tail=True))

    def answered(self, result: "Result") -> None:
        """Keep the plain answer, or leave the question with both answers and their speed on the screen."""
        if RIGHT not in self._names:
            self._plain.append(self._texts[LEFT])
        elif self._show:
            rates = {name: f"{one.tokens / one.seconds:.1f} tokens/s" for name, one in result.answers.items()}
            console.result(f"\n{result.question.category}: {result.question.turns[0]}")
            if self._live is not None:
                self._live.console.print(self._panels(rates=rates))
            else:
                for name, heading in HEADINGS.items():
                    console.result(f"--- {heading}, {rates[name]}\n{self._texts[name].strip()}")
        if RIGHT in self._names:
            self._plain = self._plain[1:] or [""]
        self._clear()

    def _panels(self, rates: dict[str, str] | None = None, tail: bool = False) -> "Columns":
        from rich.columns import Columns
        from rich.panel import Panel
        from rich.text import Text

        width = console.out.width // 2 - 1
        # A panel taller than the screen would flicker: while streaming, the last lines are shown.
        room = max(4, console.out.height - 6) * (width - 4)
        panels = []
        for name, heading in HEADINGS.items():
            text = self._texts[name].strip()
            title = f"{heading}, {rates[name]}" if rates else heading
            panels.append(Panel(Text(text[-room:] if tail else text), title=title, width=width))
        return Columns(panels)
