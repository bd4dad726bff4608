"""`medusa bench`: measures decoding methods on questions; sweeps, pass times, a judge and a page on request."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from medusa_cli import console, options
from medusa_cli.commands.report import saved_bench, write_report
from medusa_cli.errors import UsageError
from medusa_cli.options import DraftFlags, LoadFlags, OutputFlags, QuestionFlags, SamplingFlags, follow_choice, load
from medusa_cli.runs.io import Document
from medusa_cli.runs.run import RUNS, Run, called

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from medusa_cli.bench.measure import Result
    from medusa_cli.bench.run import Bench
    from medusa_cli.model import Backbone

MAX_NEW_TOKENS = 256
# The flags that --steps takes; it asks no questions and runs no drafter.
WITH_STEPS = {"steps", "context", "model", "run", "device", "dtype", "engine", "quantize"}
WITH_STEPS |= {"trust_remote_code", "json", "quiet", "debug"}
SWEEPS, MORE = "Sweeps and pass times", "Methods of other programs, and a judge"


def bench(
    asked: typer.Context,
    *,
    which: QuestionFlags,
    methods: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Of hf (transformers' generate), hf-lookup (its prompt lookup), hf-assisted (its assisted generation, "
            "with --draft-model), ar (our plain loop), medusa (the drafter, over --tree, with lookups by --lookup), "
            "medusa-alone (without), medusa-dynamic (over dynamic trees), lookup (lookups alone), llama.cpp (if "
            "llama-cpp-python is installed), and drafters side by side: hydra, amphista and so on, of the runs by that "
            "name inside the run, or the run's own; with commas between.",
        ),
    ] = "hf,ar,medusa",
    batch_size: options.BatchSize = 1,
    report: Annotated[
        bool,
        typer.Option("--report", help="Write an HTML page with charts, too, and time passes by rows for it."),
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS",
            help="One bench a value of nodes, epsilon, temperature, heads, batch or context; goes on where it was "
            "killed. Default of --methods then: ar,medusa.",
            rich_help_panel=SWEEPS,
        ),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="With --sweep: its values, such as 4,16,64.", rich_help_panel=SWEEPS),
    ] = None,
    steps: Annotated[
        bool,
        typer.Option(
            "--steps",
            help="Time forward passes by rows and engine instead of answering questions.",
            rich_help_panel=SWEEPS,
        ),
    ] = False,
    context: Annotated[
        str,
        typer.Option(metavar="N[,N]", help="With --steps: tokens in the cache, a list.", rich_help_panel=SWEEPS),
    ] = "384",
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FOLDER|ID",
            help="The model that drafts for hf-assisted: same vocabulary.",
            rich_help_panel=MORE,
        ),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="The file that llama.cpp reads. [default: the default model's own]",
            rich_help_panel=MORE,
        ),
    ] = None,
    judge: options.Judge = None,
    judge_model: options.JudgeModel = None,
    drafting: DraftFlags,
    rules: SamplingFlags,
    place: LoadFlags,
    said: OutputFlags,
) -> None:
    """Measure speedup, acceptance length and overhead, and check that the output is that of plain decoding.

    Every method answers every question in turn, both turns, on the same prompts. The report goes into the run's bench/
    directory (runs/MODEL/bench for the drafter that ships).
    """
    said.configure()
    given = {name for name in asked.params if getattr(asked.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    if steps:
        for name in sorted(given - WITH_STEPS):
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --steps", "leave one of them out")
        time_steps(drafting.choose(need_drafter=False).model, place, context, said.json)
        return
    for word, needed, there in (("context", "--steps", False), ("values", "--sweep", sweep)):
        if word in given and not there:
            raise UsageError(f"--{word} has no effect without {needed}", f"leave it out, or give {needed}")
    check_judge(judge, judge_model)
    from medusa_cli.bench import sweep as sweeps
    from medusa_cli.bench.methods import find_competitors, parse_methods, split_names
    from medusa_cli.bench.run import Bench

    if sweep is not None:
        swept = sweeps.parse_values(sweep, values)
        for name in sorted(sweeps.AXES[sweep].replaces & given):
            raise UsageError(f"--{name.replace('_', '-')} is set by --sweep {sweep}", "leave it out")
        if sweep in sweeps.TREE_AXES:
            drafting = replace(drafting, lookup=bool(drafting.lookup))
        methods = methods if "methods" in given else "ar,medusa"
        sweeps.check_methods(methods)
    names = split_names(methods)
    competitors = find_competitors(names, drafting.model, drafting.run, drafting.tree, drafting.lookup)
    # Where runs of their own hold the drafters, each takes --lookup, and "medusa-dynamic" is over that of "medusa".
    own = "medusa" not in competitors and any(name.startswith("medusa") for name in names)
    if drafting.drafter is not None and not own:
        raise UsageError(
            f"--drafter {drafting.drafter} has no effect with --methods {methods}", "leave one of them out"
        )
    choice = (drafting if own else replace(drafting, lookup=False)).choose(need_drafter=own)
    parse_methods(methods, competitors, choice.model, rules.sampled, gguf, draft_model, batch_size)
    questions, count = which.chosen()
    place = follow_choice(choice, place)
    what = Bench(
        choice,
        names,
        questions,
        rules.max_new_tokens or MAX_NEW_TOKENS,
        rules.sampled,
        which.title,
        place,
        batch_size,
        competitors,
        gguf,
        draft_model,
    )
    console.info(
        f"{len(questions)} of {count} questions of {which.title}, up to {what.max_new_tokens} new tokens a turn, "
        f"{', '.join(names)}; --limit N takes fewer, --max-new-tokens N makes them shorter"
    )
    folder = (choice.run or Run(RUNS / called(choice.model))).bench_dir
    measured = partial(load, place=place)
    if sweep is not None:
        document = sweeps.sweep(what, sweep, swept, folder, lambda point: point.run(measured, TokenBar(point))[0])
        show_sweep(document)
        console.result(f"sweep: {folder / f'sweep-{sweep}.json'}; `medusa report` draws it beside the run's bench")
        if said.json:
            console.emit_json(document)
        return
    document, texts = what.run(measured, TokenBar(what), report)
    show(document)
    try:
        path = save(what, document, texts, folder)
        if judge is not None and judge_model is not None:
            document = ask_judge(path, document, judge, judge_model)
        page = saved_bench(folder.parent.name, path)
        for written in write_report([page], path.with_suffix(".html"), with_page=report):
            console.result(f"report: {written}")
    finally:
        # A folder that cannot be written, or a judge that does not answer, must not cost what was measured.
        if said.json:
            console.emit_json(document)


def save(what: "Bench", document: Document, texts: dict[str, dict[str, list[str]]], folder: Path) -> Path:
    from medusa_cli.bench import run
    from medusa_cli.bench.judge import write_answers

    path = run.save(document, folder)
    write_answers(path.with_suffix(""), document["backbone"]["id"], what.questions, texts)
    return path


class TokenBar:
    """Shows a bench's progress; an answer that ends early counts as done."""

    def __init__(self, what: "Bench") -> None:
        self._what, self._names, self._answered = what, list[str](), 0
        self._open: AbstractContextManager[console.Bar] | None = None

    def begin(self, backbone: "Backbone", names: Sequence[str]) -> None:
        turns = sum(len(question.turns) for question in self._what.questions) * len(names)
        self._names, self._answered = list(names), 0
        self._open = console.progress("decoding", total=turns * self._what.max_new_tokens, unit="tokens")
        self._bar = self._open.__enter__()

    def tokens(self, name: str, new: list[int]) -> None:
        self._bar.advance(len(new))

    def answered(self, result: "Result") -> None:
        spent = sum(result.answers[name].tokens for name in self._names)
        self._bar.advance(len(result.question.turns) * len(self._names) * self._what.max_new_tokens - spent)
        self._answered += 1
        self._bar.describe(f"question {self._answered}/{len(self._what.questions)}")
        if self._open is not None and self._answered == len(self._what.questions):
            self._open.__exit__(None, None, None)


def show(document: Document) -> None:
    """Prints the closing table, the categories, and where answers differ."""
    methods = document["methods"]
    head = ["method", "tokens/s", f"speedup over {document['baseline']}", "95 %", "acceptance length", "overhead"]
    # 80 columns hold the table where padding is small and only the names of methods give way.
    table = Table(title=document["title"], caption=" ".join(document["facts"]), collapse_padding=True, pad_edge=False)
    for column in (*head, "identical"):
        width = max(map(len, column.split()))
        table.add_column(column, justify="left" if column == "method" else "right", min_width=width, overflow="fold")
    for name, figures in methods.items():
        interval, same = figures["speedup_95"], figures["identical"]
        identical = "-" if same is None else f"{same}/{figures['questions']}"
        table.add_row(
            name,
            f"{figures['tokens_per_s']:.1f}",
            f"{figures['speedup']:.2f}",
            "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
            f"{figures['acceptance_length']:.2f}",
            "-" if figures["overhead"] is None else f"{figures['overhead']:.2f}",
            "reference" if name == document["reference"] and same is not None else identical,
        )
    console.result(table)
    drafted = [name for name in methods if methods[name]["acceptance_length"] > 1]
    for title, key, names in (
        ("Speedup", "speedup", list(methods)),
        ("Acceptance length", "acceptance_length", drafted),
    ):
        categories = list(next(iter(methods.values()))["per_category"])
        if len(categories) > 1 and len(methods) > 1 and names:
            cells = [[c, *(f"{methods[name]['per_category'][c][key]:.2f}" for name in names)] for c in categories]
            console.result(console.grid(f"{title} by category", ["category", *names], cells, left=("category",)))
    for name, figures in methods.items():
        for part in figures["differences"][:5]:
            place = f"question {part['question']}, turn {part['turn'] + 1}, token {part['position']}"
            console.result(f"{name}: {place} differs, logit margin {part['margin']:.4f}")


def show_sweep(document: Document) -> None:
    rows = []
    for row in sorted(document["points"], key=lambda row: (row["series"], row["x"])):
        more = ("-" if row[key] is None else f"{row[key]:.3f}" for key in ("overhead", "nll"))
        cells = (f"{row['x']:g}", f"{row['tokens_per_s']:.1f}", f"{row['acceptance_length']:.2f}")
        rows.append((row["series"], *cells, *more))
    head = ("series", document["axis"], "tokens/s", "acceptance length", "overhead", "nats a token")
    console.result(console.grid(f"{document['title']}: sweep over {document['axis']}", head, rows, left=("series",)))


def check_judge(url: str | None, model: str | None) -> None:
    """Raises UsageError if one of the judge's flags is given without the other."""
    if url is not None and model is None:
        raise UsageError(f"--judge {url} needs the name of a model", "give --judge-model NAME")
    if model is not None and url is None:
        raise UsageError(f"--judge-model {model} has no effect without --judge", "give --judge URL")


def ask_judge(path: Path, document: Document, url: str, model: str) -> Document:
    """Lets a judge grade a saved bench, prints the outcome, and returns the bench with it."""
    from medusa_cli.bench.judge import Judge, judge_bench

    with console.progress("judging", unit="verdicts") as bar:
        document = judge_bench(path, document, Judge(url, model, os.environ.get("MEDUSA_API_KEY")), bar.advance)
    outcome, counts = document["judge"], ("wins", "ties", "losses")
    rows = []
    for method, grade in outcome["single"].items():
        pairs = outcome["pairs"].get(method)
        rows.append([method, f"{grade['score']:.2f}", *(str(pairs[key]) if pairs else "-" for key in counts)])
    title = f"The judge's verdicts; pairs against {outcome['reference']}, in both orders"
    console.result(console.grid(title, ("method", "score, of 10", *counts), rows, left=("method",)))
    return document


def time_steps(model: str, place: LoadFlags, contexts: str, as_json: bool) -> None:
    """Times passes and prints them, context by context."""
    words = [word.strip() for word in contexts.split(",")]
    for word in words:
        if not word.isdigit() or int(word) < 1:
            raise UsageError(f"--context {contexts!r}: {word!r} is not a number >= 1", "use for example 512,2048")
    from medusa_cli.bench.steps import time_engines

    document = time_engines(model, place, sorted({int(word) for word in words}))
    if as_json:
        console.emit_json(document)
    for size, engines in document["contexts"].items():
        title = f"Milliseconds a pass of {place.of(model)} (over its 1-row pass), {int(size):,} tokens in the cache"
        rows = [
            [
                count,
                *(
                    f"{e['step_ms'][count]:.1f} ({e['step_ms'][count] / e['step_ms']['1']:.2f})"
                    for e in engines.values()
                ),
            ]
            for count in next(iter(engines.values()))["step_ms"]
        ]
        rows.append(["prefill, s", *(f"{engine['prefill_s']:.2f}" for engine in engines.values())])
        rows.append(["cache, MB", *(f"{engine['cache_bytes'] / 1e6:.1f}" for engine in engines.values())])
        console.result(console.grid(title, ["rows", *engines], rows))
        peak = document["peak_bytes"][size] / 1e6
        console.result(f"reading the weights takes {document['ceiling_ms']:.1f} ms; peak memory {peak:,.0f} MB")
