"""`medusa demo`: the same questions decoded plain and with drafts, side by side."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from medusa_cli import console, options
from medusa_cli.options import DraftFlags, LoadFlags, OutputFlags, flag, follow_choice, load

if TYPE_CHECKING:
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
    place: LoadFlags,
    shown: OutputFlags,
) -> None:
    """Watch MT-Bench questions being answered plain and with drafts, and see what it gains.

    Greedy decoding; the closing table is that of `medusa bench`. Under five minutes on two cores.
    """
    shown.configure()
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
    panes = Panes(show=not (shown.json or shown.quiet))
    with console.terminated():
        try:
            document, _ = bench.run(partial(load, place=place), panes)
        finally:
            panes.stop()
    if shown.json:
        console.emit_json(document)
        return
    show(document)
    drafted = document["methods"]["medusa"]
    console.result(f"answers identical to plain decoding: {drafted['identical']} of {drafted['questions']}")


class Panes:
    """Shows plain answers, which come first, and drafted ones: two panes that fill; without a terminal as text."""

    def __init__(self, show: bool) -> None:
        self._show, self._live = show, Live(console=console.out, refresh_per_second=12, transient=True)
        self._plain: list[str] = []

    def stop(self) -> None:
        self._live.stop()

    def begin(self, backbone: "Backbone", names: Sequence[str]) -> None:
        self.stop()
        self._decode: Any = backbone.tokenizer.decode  # not the backbone: its memory is given back
        self._side, self._number = "hf" if "hf" in names else "medusa", 0
        self._ids: list[list[int]] = [[]]  # of each turn of the answer under way
        if self._show and console.out.is_terminal:
            self._live.start()

    def tokens(self, name: str, new: list[int]) -> None:
        """Shows new tokens of a pane's method; [] ends the answer to a turn."""
        if name == self._side:
            self._ids[-1] += new
            self._ids += [] if new else [[]]
            if self._live.is_started:
                # A panel taller than the screen would flicker: while text streams, only its end is shown.
                limit = max(4, console.out.height - 6) * (console.out.width // 2 - 5)
                self._live.update(_panels({name: text[-limit:] for name, text in self._texts().items()}))

    def answered(self, result: "Result") -> None:
        """Keeps the plain answer, or prints both with their speed."""
        texts = self._texts()
        if self._side == "hf":
            self._plain.append(texts["hf"])
        elif self._show:
            console.result(f"\n{result.question.category}: {result.question.turns[0]}")
            rates = {
                name: f", {answer.tokens / answer.seconds:.1f} tokens/s" for name, answer in result.answers.items()
            }
            if self._live.is_started:
                self._live.console.print(_panels(texts, rates))
            else:
                for name, heading in HEADINGS.items():
                    console.result(f"--- {heading}{rates[name]}\n{texts[name]}")
        self._number, self._ids = self._number + 1, [[]]

    def _texts(self) -> dict[str, str]:
        """Returns the text of each pane; half a character at the end waits for the rest."""
        turns = (self._decode(ids, skip_special_tokens=True).rstrip("\ufffd") for ids in self._ids)
        text = "\n\n".join(turns).strip()
        return {"hf": text, "medusa": ""} if self._side == "hf" else {"hf": self._plain[self._number], "medusa": text}


def _panels(texts: Mapping[str, str], rates: Mapping[str, str] | None = None) -> Columns:
    """Returns the answers side by side under their headings."""
    return Columns(
        Panel(Text(texts[name]), title=heading + (rates or {}).get(name, ""), width=console.out.width // 2 - 1)
        for name, heading in HEADINGS.items()
    )
