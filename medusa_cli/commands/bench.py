"""`medusa bench`: measures decoding methods on questions. Options add a sweep, a judge or a page of figures."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from medusa_cli import console, options
from medusa_cli.commands.report import JudgeFlags
from medusa_cli.errors import UsageError
from medusa_cli.files import extras
from medusa_cli.files.io import Document
from medusa_cli.files.model_files import check_chat_template, check_model_files
from medusa_cli.files.model_source import ModelSource
from medusa_cli.options import (
    DraftFlags,
    LoadFlags,
    OutputFlags,
    QuestionFlags,
    SamplingFlags,
    flag,
    refuse,
)
from medusa_cli.runs.load_options import as_trained
from medusa_cli.runs.run import RUNS, Run, called

if TYPE_CHECKING:
    from medusa_cli.bench.answers import OnTokens
    from medusa_cli.bench.bench import Bench
    from medusa_cli.model import Backbone

MAX_NEW_TOKENS = 256
METHODS = (
    "hf (transformers' generate), hf-lookup (hf with prompt lookup), hf-assisted (hf with --draft-model), ar (our "
    "plain decoding), medusa (the drafter, with --tree and --lookup), medusa-alone (the drafter without n-gram "
    "drafts), lookup (n-gram drafts only), llama.cpp, llama.cpp-ngram (llama.cpp with its own n-gram drafts), or a "
    "kind of drafter, such as hydra: the drafter in the run's subfolder of this name, or else the run's own drafter. "
    "[default: hf,ar,medusa; with --sweep or --agent ar,medusa]"
)
SWEEP = "Run one bench for each value of nodes, epsilon or temperature. The same command resumes an interrupted sweep."
GGUF = "The GGUF file that llama.cpp reads. [default: the file of --model, if that is a GGUF file or a name]"
PEER = (
    "An OpenAI-compatible server (vLLM, SGLang, llama-server) as one more method; repeatable. A server with drafts is "
    "compared with one without them whose name begins its own: vllm-ngram with vllm. Each server gets the key in "
    "MEDUSA_API_KEY."
)
swept = partial(flag, panel="Sweeps")
other = partial(flag, panel="Methods of other programs")


@dataclass(frozen=True)
class SweepFlags:
    """Holds the flags of a sweep, which runs one bench for each value of a setting."""

    sweep: Annotated[str | None, swept("--sweep AXIS", SWEEP)] = None
    values: Annotated[
        str | None, swept("--values LIST", "With --sweep: the values, such as 4,16,64.")
    ] = None

    def __post_init__(self) -> None:
        if self.sweep is None:
            remedy = "leave it out, or give --sweep AXIS"
            refuse({"--values": self.values}, "has no effect without --sweep", remedy)

    def points(self, tree: str | None, sampling: SamplingFlags) -> list[float]:
        """Returns the values of the sweep's axis, or an empty list without --sweep.

        Raises UsageError for values that are not valid, and for flags of settings that the sweep sets itself.
        """
        if self.sweep is None:
            return []
        from medusa_cli.bench.sweep import AXES, parse_values

        points = parse_values(self.sweep, self.values)
        own: dict[str, Any] = {"tree": tree, **vars(sampling)}
        given = {f"--{name}": own[name] for name in AXES[self.sweep].replaces}
        refuse(given, f"is set by --sweep {self.sweep}", "leave it out")
        if self.sweep == "epsilon" and sampling.temperature == 0:
            fault = "--temperature 0 samples nothing, so --sweep epsilon has no effect"
            raise UsageError(fault, "leave it out, which means 0.7")
        return points


def bench(
    *,
    which: QuestionFlags,
    methods: Annotated[str | None, flag("--methods LIST", METHODS)] = None,
    batch_size: options.BatchSize = 1,
    report: Annotated[
        bool, flag("--report", "Also write the figures as an HTML page and as Markdown.")
    ] = False,
    sweeping: SweepFlags,
    draft_model: Annotated[
        str | None, other("--draft-model NAME|FOLDER|ID", "The model that drafts for hf-assisted.")
    ] = None,
    peer: Annotated[list[str] | None, other("--peer NAME=URL", PEER)] = None,
    gguf: Annotated[Path | None, other("--gguf FILE", GGUF, exists=True, dir_okay=False)] = None,
    judging: JudgeFlags,
    drafting: DraftFlags,
    sampling: SamplingFlags,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Measure speedup, acceptance length and overhead, and check that the output equals that of plain decoding.

    All methods answer all turns of each question, from the same prompts. Figures and answers
    go into the run's bench/ directory (runs/MODEL/bench for the drafter that ships).
    """
    printing.configure()
    sweep = sweeping.sweep
    if sweep is not None:
        remedy = "leave it out; `medusa report` draws the sweep"
        refuse({"--report": report, "--judge": judging.judge}, "has no effect with --sweep", remedy)
    from medusa_cli.bench import sweep as sweeps
    from medusa_cli.bench.bench import Bench
    from medusa_cli.bench.methods import choose_files, split_names
    from medusa_cli.bench.peers import parse_peers
    from medusa_cli.model.load import resolve_device

    if report:
        extras.need_extra("plot", "--report")
    points = sweeping.points(drafting.tree, sampling)
    peers = parse_peers(peer or [])
    usual = "hf,ar,medusa" if sweep is None and not which.agent else "ar,medusa"
    names = split_names(",".join([methods or usual, *peers]))
    model = None if drafting.model is None else ModelSource.of(drafting.model)
    files = drafting.run, drafting.drafter, drafting.tree
    choice, drafts = choose_files(names, model, *files, drafting.lookup)
    # Bench checks the settings, so it is made before the questions are fetched.
    what = Bench(
        choice,
        drafts,
        names,
        questions=[],
        max_new_tokens=sampling.max_new_tokens or MAX_NEW_TOKENS,
        sampling=sampling.sampled,
        title=which.title,
        options=as_trained(loading, choice.trained),
        batch_size=batch_size,
        gguf=gguf,
        draft_model=None if draft_model is None else ModelSource.of(draft_model),
        peers=peers,
        cached=which.agent,
    )
    if sweep is not None:
        sweeps.check(what, sweep, points)
    resolve_device(loading.device)
    for source in filter(None, (what.draft_model, choice.source)):
        check_model_files(source)
    if choice.template is None:
        check_chat_template(choice.source)
    questions, count = which.chosen()
    what = replace(what, questions=questions)
    console.info(
        f"{len(questions)} of {count} questions of {which.title}, up to {what.max_new_tokens} new tokens a turn, "
        f"{', '.join(names)}; --limit N takes fewer, --max-new-tokens N makes them shorter"
    )
    folder = (choice.run or Run(RUNS / called(choice.model))).bench_dir
    if sweep is None:
        _measure(what, folder, judging, report, printing.json)
        return
    document = sweeps.sweep(what, sweep, points, folder, answer_bar)
    show_sweep(document)
    console.result(
        f"sweep: {folder / f'sweep-{sweep}.json'}; `medusa report` draws it next to the run's bench"
    )
    if printing.json:
        console.emit_json(document)


def _measure(what: "Bench", folder: Path, judging: JudgeFlags, report: bool, json: bool) -> None:
    """Runs a bench, prints it and saves it; if requested, adds the judge's grades and writes the page."""
    from medusa_cli.bench.bench import save
    from medusa_cli.bench.report import write_report

    document = what.run(answer_bar)
    show(document)
    try:
        path = save(document, folder)
        console.result(f"saved: {path}")
        judging.grade(path, document)
        if report:
            written = write_report({folder.parent.name: path}, path.with_suffix(".html"))
            console.result("\n".join(f"saved: {file}" for file in written))
    finally:
        # The measurement must not be lost if a folder cannot be written or a judge does not answer.
        if json:
            console.emit_json(document)


@contextmanager
def answer_bar(backbone: "Backbone", turns: int) -> "Iterator[OnTokens]":
    """Shows a progress bar of the turns that the methods answer; yields the function that counts them."""
    with console.progress("decoding", total=turns, unit="answers") as advance:
        yield lambda name, results, new: advance(0 if new else len(results))


def show(document: Document) -> None:
    """Prints the tables of a bench, and where answers differ from those of the reference method."""
    from medusa_cli.bench.report import BY_TURN, gains_table, parts_table, turns_table

    tables = {
        document["title"]: gains_table(document),
        "Prompts and generation apart": parts_table(document),
        BY_TURN: turns_table(document),
    }
    caption = " ".join(document["facts"])
    for title, (head, rows) in tables.items():
        if rows:
            console.result(console.grid(title, head, rows, left=("method",), caption=caption))
        caption = ""
    for name, figures in document["methods"].items():
        for part in figures["differences"][:5]:
            where = (
                f"question {part['question']}, turn {part['turn'] + 1}, token {part['position']}"
            )
            console.result(f"{name}: {where} differs, logit margin {part['margin']:.4f}")


def show_sweep(document: Document) -> None:
    form = ("{series}", "{x:g}", "{tokens_per_s:.1f}")
    optional = {"acceptance_length": ".2f", "overhead": ".3f", "nll": ".3f"}
    rows = []
    for row in sorted(document["points"], key=lambda row: (row["series"], row["x"])):
        cells = [
            "-" if row[key] is None else format(row[key], own) for key, own in optional.items()
        ]
        rows.append([*(cell.format(**row) for cell in form), *cells])
    axis = document["axis"]
    head = ("series", axis, "tokens/s", "acceptance length", "overhead", "nats per token")
    title = f"{document['title']}: sweep over {axis}"
    console.result(console.grid(title, head, rows, left=("series",)))
