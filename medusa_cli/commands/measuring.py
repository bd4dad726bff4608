"""A bench on the screen: a bar while it runs, and what it and a sweep came to, as tables."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from medusa_cli import console
from medusa_cli.commands.beside import Beside
from medusa_cli.commands.judging import folder_of, judge_bench, verdict_table
from medusa_cli.commands.reporting import measured, write_report
from medusa_cli.runs.reading import Document
from medusa_cli.runs.resolve import Choice

if TYPE_CHECKING:
    from medusa_cli.assembly import Assembled
    from medusa_cli.backbone import Backbone
    from medusa_cli.benchmarks import Result
    from medusa_cli.benchmarks.bench import Bench


class _TokenBar:
    """Counts tokens; answers end early, and what they left of their allowance counts as done."""

    def __init__(self, bar: console.Bar, bench: "Bench", names: Sequence[str]) -> None:
        self._bar, self._bench, self._names, self._done = bar, bench, names, 0

    def tokens(self, name: str, new: list[int]) -> None:
        self._bar.advance(len(new))

    def answered(self, result: "Result") -> None:
        spent = sum(result.answers[name].tokens for name in self._names)
        self._bar.advance(len(result.question.turns) * len(self._names) * self._bench.tokens - spent)
        self._done += 1
        self._bar.describe(f"question {self._done}/{len(self._bench.questions)}")


@contextmanager
def bar(bench: "Bench", backbone: "Backbone", names: Sequence[str]) -> Iterator[_TokenBar]:
    """Watch a bench's methods by a bar."""
    turns = sum(len(question.turns) for question in bench.questions) * len(names)
    with console.progress("decoding", total=turns * bench.tokens, unit="tokens") as shown:
        yield _TokenBar(shown, bench, names)


def leave(
    bench: "Bench",
    loaded: "Callable[[Choice], Assembled]",
    folder: Path,
    page: bool,
    judge: str | None,
    judge_model: str | None,
    json: bool,
) -> None:
    """Run a bench, show it, and leave it in a folder with its answers, a judge's verdicts, and a page if wanted."""
    from medusa_cli.benchmarks.answers import write_answers
    from medusa_cli.benchmarks.bench import save

    kept = Beside(bench.rule, page)
    document = bench.run(loaded, bar, kept)
    if not json:
        show(document)
    try:
        saved = save(document, folder)
        console.result(f"report: {saved}")
        file = saved.with_suffix(".json")
        write_answers(folder_of(file), document["backbone"]["id"], bench.questions, kept.texts)
        if judge is not None and judge_model is not None:
            document = judge_bench(file, document, judge, judge_model)
            console.result(verdict_table(document["judge"]))
        if page:
            part = measured(folder.parent.name, document, folder)
            console.result(f"report: {write_report([part], saved.with_suffix('.html'))[0]}")
    finally:
        # A folder that cannot be written, or a judge that is silent, must not cost what was measured.
        if json:
            console.emit_json(document)


def show(document: Document) -> None:
    """The closing table, the categories, and where outputs part."""
    from medusa_cli.benchmarks.report import by_category, figures

    rows = figures(document)
    facts = " ".join(document["facts"])
    # 80 columns hold the table where padding is small and the names of methods alone give way, whole.
    table = Table(title=document["title"], caption=facts, collapse_padding=True, pad_edge=False)
    for column in rows[0]:
        widest = max(map(len, column.split()))
        table.add_column(column, justify="left" if column == "method" else "right", min_width=widest, overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    console.result(table)
    for title, (names, *cells) in by_category(document) if len(document["methods"]) > 1 else ():
        console.result(console.grid(title, names, cells, left=("category",)))
    for name, one in document["methods"].items():
        for part in one["divergences"][:5]:
            console.result(
                f"{name}: question {part['question']}, turn {part['turn'] + 1} differs at token {part['position']}, "
                f"logit margin {part['margin']:.4f}"
            )
        if len(one["divergences"]) > 5:
            console.result(f"{name}: {len(one['divergences']) - 5} more in the report")


def show_sweep(document: Document) -> None:
    """The points as a table, series by series."""
    rows = []
    for row in sorted(document["points"], key=lambda row: (row["series"], row["x"])):
        cells = (f"{row['x']:g}", f"{row['tokens_per_s']:.1f}", f"{row['acceptance_rate']:.2f}")
        more = ("-" if row[key] is None else f"{row[key]:.3f}" for key in ("overhead", "nll"))
        rows.append((row["series"], *cells, *more))
    names = ("series", document["axis"], "tokens/s", "acceptance rate", "overhead", "nats a token")
    console.result(console.grid(f"{document['title']}: sweep over {document['axis']}", names, rows, left=("series",)))
