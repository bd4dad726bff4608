"""`medusa demo`: the same questions decoded plain and with drafts, side by side."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli import console, options
from medusa_cli.options import DraftFlags, LoadFlags, OutputFlags, follow_choice, load

if TYPE_CHECKING:
    from rich.columns import Columns
    from rich.live import Live

    from medusa_cli.bench.stats import Result
    from medusa_cli.model import Backbone

MAX_NEW_TOKENS = 128
QUESTIONS = 3
HEADINGS = {"hf": "plain decoding (transformers' generate)", "medusa": "with drafts (medusa)"}


def demo(
    *,
    limit: Annotated[
        int, typer.Option(metavar="N", help="MT-Bench questions, spread over the categories.")
    ] = QUESTIONS,
    max_new_tokens: options.MaxNewTokens = None,
    drafting: DraftFlags,
    place: LoadFlags,
    said: OutputFlags,
) -> None:
    """Watch MT-Bench questions being answered plain and with drafts, and see what it gains.

    Greedy decoding; the closing table is that of `medusa bench`. Under five minutes on two cores.
    """
    said.configure()
    choice = drafting.choose()

    from medusa_cli.assets import mt_bench_path
    from medusa_cli.bench.questions import read_questions, spread
    from medusa_cli.bench.run import Bench
    from medusa_cli.commands.bench import show
    from medusa_cli.decode import Sampling

    tokens = max_new_tokens or MAX_NEW_TOKENS
    questions = spread(read_questions(mt_bench_path())[0], limit)
    console.info(
        f"{len(questions)} MT-Bench questions, up to {tokens} new tokens a turn (--limit N, --max-new-tokens N)"
    )
    place = follow_choice(choice, place)
    title, methods = "Plain and drafted decoding, greedy", ["hf", "ar", "medusa"]
    bench = Bench(choice, methods, questions, tokens, Sampling(), title, place)
    with console.terminated(), Panes(show=not (said.json or said.quiet)) as panes:
        document, _ = bench.run(partial(load, place=place), panes)
    if said.json:
        console.emit_json(document)
        return
    show(document)
    drafted = document["methods"]["medusa"]
    same = drafted["identical"] == drafted["questions"]
    console.result(
        "output identical to plain decoding: "
        + ("yes" if same else f"in {drafted['identical']} of {drafted['questions']} answers")
    )


class Panes:
    """Shows plain and drafted answers: on a terminal in two panes that fill, elsewhere one below the other.

    Plain decoding answers all questions first; its answers then stand beside the drafted ones.
    """

    def __init__(self, show: bool) -> None:
        self._show = show
        self._live: Live | None = None
        self._number, self._side = 0, "hf"
        self._ids: list[list[int]] = [[]]  # of each turn of the answer under way
        self._plain: list[str] = []

    def __enter__(self) -> "Panes":
        return self

    def __exit__(self, *reason: object) -> None:
        self._stop()

    def begin(self, backbone: "Backbone", names: Sequence[str]) -> None:
        from rich.live import Live

        self._stop()
        self._decode: Any = backbone.tokenizer.decode  # not the backbone: its memory is given back
        self._side, self._number, self._ids = "hf" if "hf" in names else "medusa", 0, [[]]
        if self._show and console.out.is_terminal:
            self._live = Live(console=console.out, refresh_per_second=12, transient=True)
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def tokens(self, name: str, new: list[int]) -> None:
        """Shows new tokens of a pane's method; [] ends the answer to a turn."""
        if name == self._side:
            self._ids[-1] += new
            self._ids += [] if new else [[]]
            if self._live is not None:
                self._live.update(self._panels(self._texts(), tail=True))

    def answered(self, result: "Result") -> None:
        """Keeps the plain answer, or prints both with their speed."""
        texts = self._texts()
        if self._side == "hf":
            self._plain.append(texts["hf"])
        elif self._show:
            rates = {name: f"{one.tokens / one.seconds:.1f} tokens/s" for name, one in result.answers.items()}
            console.result(f"\n{result.question.category}: {result.question.turns[0]}")
            if self._live is not None:
                self._live.console.print(self._panels(texts, rates))
            else:
                for name, heading in HEADINGS.items():
                    console.result(f"--- {heading}, {rates[name]}\n{texts[name]}")
        self._number, self._ids = self._number + 1, [[]]

    def _texts(self) -> dict[str, str]:
        """Returns the text of each pane; half a character at the end waits for the rest."""
        turns = (self._decode(ids, skip_special_tokens=True).rstrip("\ufffd") for ids in self._ids)
        text = "\n\n".join(turns).strip()
        return {"hf": text, "medusa": ""} if self._side == "hf" else {"hf": self._plain[self._number], "medusa": text}

    def _panels(self, texts: dict[str, str], rates: dict[str, str] | None = None, tail: bool = False) -> "Columns":
        from rich.columns import Columns
        from rich.panel import Panel
        from rich.text import Text

        width = console.out.width // 2 - 1
        # A panel taller than the screen would flicker: while text streams, only its end is shown.
        room = max(4, console.out.height - 6) * (width - 4)
        return Columns(
            Panel(
                Text(texts[name][-room:] if tail else texts[name]),
                title=f"{heading}, {rates[name]}" if rates else heading,
                width=width,
            )
            for name, heading in HEADINGS.items()
        )
