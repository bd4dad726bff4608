"""`medusa report`: writes saved benches as a page and as Markdown."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import extras
from medusa_cli.files.io import Document
from medusa_cli.options import OutputFlags, flag, refuse
from medusa_cli.runs.run import Run

RUNS = "Runs with a bench: NAME (runs/NAME), a folder, or a bench's .json file. Several benches are shown side by side."
OUTPUT = "The page to write. [default: next to the first bench]"


@dataclass(frozen=True)
class JudgeFlags:
    """Holds the flags for a judge that grades the answers of a bench."""

    judge: options.Judge = None
    judge_model: options.JudgeModel = None

    def __post_init__(self) -> None:
        if self.judge is not None and self.judge_model is None:
            fault = f"--judge {self.judge} needs the name of a model"
            raise UsageError(fault, "give --judge-model NAME")
        if self.judge is None:
            given = {"--judge-model": self.judge_model}
            refuse(given, "has no effect without --judge", "give --judge URL")

    def grade(self, path: Path, document: Document) -> None:
        """Lets the judge, if there is one, grade a saved bench; prints the grades and adds them to the document."""
        if self.judge is None or self.judge_model is None:
            return
        from medusa_cli.bench.judge import judge_bench

        with console.progress("judging", unit="replies") as advance:
            judge_bench(path, document, self.judge, self.judge_model, advance)
        outcome = document["judge"]
        counts = ("wins", "ties", "losses")
        rows = []
        for method, grade in outcome["single"].items():
            pairs = outcome["pairs"].get(method)
            cells = (str(pairs[key]) if pairs else "-" for key in counts)
            rows.append([method, f"{grade['score']:.2f}", *cells])
        title = f"The judge's grades; pairs against {outcome['reference']}, in both orders"
        head = ("method", "score, of 10", *counts)
        console.result(console.grid(title, head, rows, left=("method",)))


def report(
    *,
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help=RUNS)],
    output: Annotated[Path | None, flag("--output FILE.html", OUTPUT, dir_okay=False)] = None,
    judging: JudgeFlags,
    printing: OutputFlags,
) -> None:
    """Write the figures of benches as one HTML page, which needs no network, and as Markdown.

    The page shows the speedup by method and category with 95 % intervals, the acceptance by position, sweeps, how many
    answers are identical, a judge's grades, and the environment.
    """
    printing.configure()
    from medusa_cli.bench.report import read_bench, write_report

    extras.need_extra("plot", "medusa report")
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        fault = f"--output {output} is not the name of a page"
        raise UsageError(fault, "give one that ends in .html")
    paths = [find_bench(name) for name in runs]
    documents = {path: read_bench(path) for path in paths}
    for path, document in documents.items():
        judging.grade(path, document)
    named = dict(zip(names_of(paths), paths, strict=True))
    page = paths[0].with_name("report.html") if len(paths) > 1 else paths[0].with_suffix(".html")
    written = write_report(named, output or page)
    if printing.json:
        grades = {name: documents[path].get("judge") for name, path in named.items()}
        console.emit_json({"written": [str(path) for path in written], "grades": grades})
    for path in written:
        console.result(f"report: {path}")


def names_of(paths: Sequence[Path]) -> list[str]:
    """Returns the names of benches in a report: the run's name or, outside a run, the file's name.

    If two names are equal, the file's name, which is a time, follows the run's name. If these are equal, too, the path
    is the name.
    """
    runs = [path.resolve().parent.parent.name for path in paths]
    inside = [path.parent.name == "bench" for path in paths]
    names = [run if own else path.stem for run, own, path in zip(runs, inside, paths, strict=True)]
    for longer in ([f"{name} {path.stem}" for name, path in zip(names, paths, strict=True)], paths):
        pairs = zip(names, longer, strict=True)
        names = [name if names.count(name) == 1 else str(other) for name, other in pairs]
    return names


def find_bench(name: str) -> Path:
    """Returns the bench file for a name: the file itself if the name ends in .json, else the newest of the run."""
    if name.endswith(".json"):
        return Path(name)
    folder = Run.open(name, named="RUN").bench_dir
    benches = sorted(path for path in folder.glob("*.json") if not path.name.startswith("sweep-"))
    if not benches:
        fault = f"{folder} holds no bench"
        raise UserError(fault, f"run `medusa bench --run {shlex.quote(name)}` first")
    if len(benches) > 1:
        console.info(f"{name}: the newest of {len(benches)} benches, {benches[-1].name}")
    return benches[-1]
