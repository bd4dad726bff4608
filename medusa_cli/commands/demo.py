"""`medusa demo`: answers questions by plain decoding and with drafts, then compares all methods in a table."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from medusa_cli import console, options
from medusa_cli.files.extras import has_package
from medusa_cli.options import DraftFlags, LoadFlags, OutputFlags, load
from medusa_cli.runs.load_options import as_trained
from medusa_cli.runs.resolve import Choice

if TYPE_CHECKING:
    from medusa_cli.api import Medusa
    from medusa_cli.bench.stats import Measurement, Result
    from medusa_cli.decode import Decoder, Piece, Request
    from medusa_cli.model import Backbone

QUESTIONS = (
    "Explain recursion to a beginner in three sentences.",
    "Write a Python function that checks if a word is a palindrome, and show how to call it.",
    "Write a SQL query for the ten customers who spent most last year.",
)
MAX_NEW_TOKENS = 96
WARM_UP_TOKENS = 8
TITLES = {"ar": "plain decoding", "medusa": "with drafts", "lookup": "with n-gram drafts"}
OTHERS = {"hf": "transformers", "llama.cpp": "llama.cpp"}
ROUNDING = "Other programs round in another order or width, so a near-tie of two tokens may fall the other way."
SIDE_BY_SIDE = 88  # minimum width in columns of a terminal that shows two panes side by side
REFRESH_S = 0.1

Measurements = Mapping[str, "Measurement"]


def demo(
    *,
    max_new_tokens: options.MaxNewTokens = None,
    drafting: DraftFlags,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Watch how plain decoding and decoding with drafts answer three questions, and that only the speed differs.

    Decoding is greedy. Accepted draft tokens are green. A table then also has transformers, and llama.cpp if xllamacpp
    is installed and the model is a GGUF file. This takes about a minute with the default model on two cores.
    """
    printing.configure()
    choice = drafting.choose()
    from medusa_cli.api import Medusa

    tokens = max_new_tokens or MAX_NEW_TOKENS
    with console.terminated(), Medusa(load(choice, loading, chat=True)) as medusa:
        facts = loading.of(medusa.loaded.description)
        drafted = "medusa" if medusa.loaded.drafter is not None else "lookup"
        live = not (printing.json or printing.quiet)
        ours, texts = answer_questions(medusa, drafted, tokens, live)
    measured = ours | answer_by_others(choice, loading, tokens)
    figures = {name: figures_of(name, measured) for name in measured}
    if printing.json:
        answers = [
            {"question": question, "text": text, "identical": first == second}
            for question, text, first, second in zip(
                QUESTIONS, texts, ours["ar"].turns, ours[drafted].turns, strict=True
            )
        ]
        document = {"facts": facts, "max_new_tokens": tokens, "answers": answers}
        console.emit_json({**document, "methods": figures})
        return
    console.result(closing_table(figures, facts))


def answer_questions(
    medusa: "Medusa", drafted: str, max_new_tokens: int, live: bool
) -> tuple[dict[str, "Measurement"], list[str]]:
    """Answers all questions by plain decoding and with drafts, and shows both answers to each question.

    Returns the measurements and the texts of plain decoding. live: also show the texts while they grow.
    """
    from medusa_cli.bench.stats import Measurement
    from medusa_cli.decode import Decoder

    decoders = {"ar": Decoder(medusa.backbone), drafted: medusa.decoder()}
    measured = {name: Measurement() for name in decoders}
    for decoder in decoders.values():
        warm_up = medusa.request(QUESTIONS[0], max_new_tokens=min(WARM_UP_TOKENS, max_new_tokens))
        for _ in decoder.run([warm_up]):
            pass
    plain_texts = []
    for question in QUESTIONS:
        title: str | Text = f"\n{question}\n"
        if console.out.is_terminal:
            title = Text(f"\n{question}", style="bold")
        console.result(title)
        request = medusa.request(question, max_new_tokens=max_new_tokens)
        sides = {name: Side(TITLES[name], Measurement([[]])) for name in decoders}
        with streaming(live) as show:
            for name, decoder in decoders.items():
                for pieces in timed_steps(decoder, request, medusa.backbone, sides[name].measured):
                    sides[name].add(pieces)
                    show(list(sides.values()))
        show_answers(sides["ar"], sides[drafted])
        plain_texts.append(sides["ar"].text.plain)
        for name, side in sides.items():
            measured[name].extend(side.measured)
    return measured, plain_texts


@dataclass
class Side:
    """Holds a method's name, its measurement, and its answer with colored draft tokens."""

    name: str
    measured: "Measurement"
    text: Text = field(default_factory=Text)

    @property
    def title(self) -> str:
        rate = rate_of(self.measured)
        return f"{self.name}, {rate:.1f} tokens/s" if rate else self.name

    def add(self, pieces: Sequence["Piece"]) -> None:
        for piece in pieces:
            self.text.append(piece.text, "bold green" if piece.accepted else "")


def timed_steps(
    decoder: "Decoder", request: "Request", backbone: "Backbone", measured: "Measurement"
) -> Iterator[list["Piece"]]:
    """Yields the text of each step of one request, and adds the steps to a measurement.

    The measured time does not include the display of the text.
    """
    from medusa_cli.decode import Answer

    decoder.prefixes.clear()  # so that each method runs the whole prompt
    answer = Answer(backbone)
    steps = decoder.run([request])
    while True:
        start = time.perf_counter()
        item = next(steps, None)
        measured.seconds += time.perf_counter() - start
        if item is None:
            return
        sequence, step = item
        measured.add(step)
        yield answer.add(step, sequence.finish_reason)


def rate_of(measured: "Measurement") -> float:
    """Returns the tokens per second, including the time of the prefill."""
    return measured.tokens / measured.seconds if measured.seconds else 0.0


@contextmanager
def streaming(live: bool) -> Iterator[Callable[[Sequence[Side]], None]]:
    """Yields a function that shows two growing answers in panes. Without a terminal, this function shows nothing."""
    out = console.out
    if not live or not out.is_terminal or out.plain:
        yield lambda sides: None
        return
    due = 0.0
    # The panes are drawn between steps, because a separate thread would slow the steps down.
    with Live(console=out, auto_refresh=False, transient=True) as screen:

        def show(sides: Sequence[Side]) -> None:
            nonlocal due
            if time.monotonic() < due:
                return
            # A pane taller than the screen would flicker, so only the end of its text is shown.
            lines = out.height - 6
            width = out.width // 2 - 4
            if out.width < SIDE_BY_SIDE:
                lines = lines // 2 - 2
                width = out.width - 4
            screen.update(panes(sides, max(1, lines) * width), refresh=True)
            due = time.monotonic() + REFRESH_S

        yield show


def panes(sides: Sequence[Side], letters: int = sys.maxsize) -> RenderableType:
    """Returns answers side by side, or one below the other in a narrow terminal.

    letters: the maximum number of characters per answer; of a longer answer, only the end is shown.
    """
    texts = [side.text[max(0, len(side.text) - letters) :] for side in sides]
    panels = [Panel(text, title=side.title) for text, side in zip(texts, sides, strict=True)]
    if console.out.width < SIDE_BY_SIDE:
        return Group(*panels)
    table = Table.grid(expand=True)
    for _ in panels:
        table.add_column(ratio=1)
    table.add_row(*panels)
    return table


def show_answers(plain: Side, drafted: Side) -> None:
    """Prints both complete answers, and whether they are the same.

    Without a terminal, identical answers are printed only once.
    """
    expected = plain.measured.turns[0]
    actual = drafted.measured.turns[0]
    if console.out.is_terminal:
        console.result(panes([plain, drafted]))
    else:
        shown = [plain] if expected == actual else [plain, drafted]
        console.result("\n\n".join(side.text.plain for side in shown) + "\n")
    if expected != actual:
        from medusa_cli.decode.ngram import shared_length

        place = shared_length(expected, actual)
        text = f"not identical: token {place} differs first; `medusa machine` says if this engine promises the same"
        console.result(Text(text, style="bold red") if console.out.is_terminal else text)
        return
    text = f"identical: the same {len(expected)} tokens"
    gain = rate_of(drafted.measured) / rate_of(plain.measured)
    length = drafted.measured.stats.acceptance_length
    text += f", {gain:.2f} x as fast, {length:.2f} tokens per step"
    console.result(Text(text, style="bold green") if console.out.is_terminal else text)


def answer_by_others(
    choice: Choice, loading: LoadFlags, max_new_tokens: int
) -> dict[str, "Measurement"]:
    """Answers the questions with transformers, and with llama.cpp if possible.

    Returns the measurements by method.
    """
    from medusa_cli.bench.bench import Bench
    from medusa_cli.bench.questions import Question
    from medusa_cli.bench.stats import Measurement
    from medusa_cli.decode import Sampling

    names = ["hf"]
    # With an adapter, the model differs from the GGUF file that llama.cpp reads.
    in_file = choice.adapter is None and choice.source.kind == "gguf"
    if in_file and has_package("xllamacpp"):
        names.append("llama.cpp")
    questions = [Question(str(number), "demo", (text,)) for number, text in enumerate(QUESTIONS, 1)]
    loading = as_trained(loading, choice.trained)
    bench = Bench(choice, {}, names, questions, max_new_tokens, Sampling(), "demo", loading)
    measured = {name: Measurement() for name in names}
    title = " and ".join(OTHERS[name] for name in names)
    with console.progress(title, len(names) * len(questions), "answers") as advance:

        def on_tokens(name: str, results: "Sequence[Result]", new: list[int]) -> None:
            if not new:  # the answer is complete
                measured[name].extend(results[0].answers[name])
                advance(1)

        bench.run(lambda backbone, turns: nullcontext(on_tokens))
    return measured


def figures_of(name: str, measured: Measurements) -> dict[str, Any]:
    """Returns a method's row of the closing table.

    identical: the number of answers that equal those of plain decoding.
    """
    own = measured[name]
    plain = measured["ar"]
    pairs = zip(own.turns, plain.turns, strict=True)
    return {
        "tokens": own.tokens,
        "seconds": round(own.seconds, 4),
        "tokens_per_s": round(rate_of(own), 2),
        "speedup": round(rate_of(own) / rate_of(plain), 4),
        "acceptance_length": round(own.stats.acceptance_length, 4),
        "identical": sum(answer == expected for answer, expected in pairs),
        "questions": len(own.turns),
    }


def closing_table(figures: Mapping[str, Mapping[str, Any]], facts: str) -> RenderableType:
    """Returns a table of all methods: their speed, and how many of their answers equal those of plain decoding.

    If another program's answer differs, the caption explains why that can happen.
    """
    names = TITLES | OTHERS
    form = ("{tokens_per_s:.1f}", "{speedup:.2f} x", "{acceptance_length:.2f}")
    caption = f"{facts}."
    rows = []
    for name, row in figures.items():
        same = "" if name == "ar" else "{identical} of {questions}"
        rows.append([names[name], *(cell.format(**row) for cell in (*form, same))])
        if name in OTHERS and row["identical"] < row["questions"]:
            caption = f"{facts}. {ROUNDING}"
    head = ("method", "tokens/s", "over plain", "tokens per step", "same answers")
    return console.grid("The same questions, greedy", head, rows, left=("method",), caption=caption)
