"""`medusa report`: writes saved benches as a page and as Markdown."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli import console, options
from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.options import OutputFlags
from medusa_cli.runs.accuracies import outdated, read_calibration
from medusa_cli.runs.io import Document, read_object, write_atomic
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.bench.report import SavedBench


def report(
    *,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Runs with a bench: NAME means runs/NAME, anything with a / is a folder, a .json file is a bench "
            "itself. Several stand side by side.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", dir_okay=False, help="The page to write. [default: beside the first bench]"),
    ] = None,
    judge: options.Judge = None,
    judge_model: options.JudgeModel = None,
    said: OutputFlags,
) -> None:
    """Write what benches measured as one HTML page, which needs no network, and as Markdown.

    Speedup by method and category with 95 % intervals, where the gain comes from, acceptance by position and by node of
    the tree, times of passes, identity, heads, training, sweeps as far as the runs hold them, and the environment.
    """
    said.configure()
    from medusa_cli.commands.bench import ask_judge, check_judge

    check_judge(judge, judge_model)
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {output} is not the name of a page", "give one that ends in .html")
    paths = [find_bench(name) for name in runs]
    for path in dict.fromkeys(paths):
        document = read_bench(path)
        if judge is not None and judge_model is not None:
            ask_judge(path, document, judge, judge_model)
    names = [path.resolve().parent.parent.name if path.parent.name == "bench" else path.stem for path in paths]
    # Two benches of one run are told apart by their times.
    names = [name if names.count(name) == 1 else f"{name} {path.stem}" for name, path in zip(names, paths, strict=True)]
    default = paths[0].with_suffix(".html") if len(paths) == 1 else paths[0].with_name("report.html")
    benches = [saved_bench(name, path) for name, path in zip(names, paths, strict=True)]
    written = write_report(benches, output or default)
    if said.json:
        console.emit_json({"written": [str(path) for path in written]})
    for path in written:
        console.result(f"report: {path}")


def find_bench(name: str) -> Path:
    """Returns the bench file of a name: the file itself, or the newest of a run."""
    if name.endswith(".json"):
        return Path(name)
    folder = Run.open(name, named="RUN").bench_dir
    benches = sorted(path for path in folder.glob("*.json") if not path.name.startswith("sweep-"))
    if not benches:
        raise UserError(f"{folder} holds no bench", f"run `medusa bench --run {name}` first")
    if len(benches) > 1:
        console.info(f"{name}: the newest of {len(benches)} benches, {benches[-1].name}")
    return benches[-1]


def read_bench(path: Path) -> Document:
    document = read_object(path, "the bench")
    if not isinstance(document.get("methods"), dict) or not document["methods"] or "baseline" not in document:
        raise UserError(f"{path} is not a bench", "give a run, or a JSON file that `medusa bench` wrote")
    return document


@contextmanager
def _malformed(what: Path | str) -> Iterator[None]:
    """Raises UserError, naming the bench, if it holds what no bench writes: a file may hold anything."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as reason:
        text = f"{what} holds figures that no bench writes ({type(reason).__name__}: {first_line(reason)})"
        raise UserError(text, "run `medusa bench` again") from reason


def saved_bench(name: str, path: Path) -> "SavedBench":
    """Reads a bench, the accuracies and the training of its first drafter, and the sweeps beside it."""
    from medusa_cli.bench.report import SavedBench
    from medusa_cli.train.log import NAME, read_log

    document = read_bench(path)
    with _malformed(path):
        drafters = [Path(one["drafter"]) for one in (document.get("drafting") or {}).values()]
        sweeps = [read_object(sweep, "the sweep") for sweep in sorted(path.parent.glob("sweep-*.json"))]
        if not drafters:
            return SavedBench(name, document, sweeps=sweeps)
        run = Run(drafters[0].parent)
        heads = read_calibration(run.calibration_path) if run.calibration_path.is_file() else None
        current = heads is not None and not outdated(heads.drafter, drafters[0])
        accuracies = heads.accuracies if heads is not None and current else ()
        return SavedBench(name, document, accuracies, read_log(run.path / NAME), sweeps)


def write_report(benches: "Sequence[SavedBench]", page: Path, with_page: bool = True) -> list[Path]:
    """Writes the page, unless it is not wanted, and the Markdown beside it; returns their paths."""
    from medusa_cli.bench.report import html, markdown, sections

    with _malformed(" or ".join(bench.name for bench in benches)):
        parts = sections(benches)
        texts = {page: html(benches, parts)} if with_page else {}
        texts[page.with_suffix(".md")] = markdown(benches, parts)
    for path, text in texts.items():
        write_atomic(path, text)
    return list(texts)
