"""From run names and files to what a report is made of, and the page and the Markdown on disk."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_cli import console
from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.runs.accuracies import outdated, read_calibration
from medusa_cli.runs.files import write_atomic
from medusa_cli.runs.reading import Document, read_object
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.benchmarks.pieces import SavedBench


def gather(names: Sequence[str]) -> "list[SavedBench]":
    """Each run's newest bench, or the bench in a file that is named, with what lies beside its drafter.

    UserError for a run without a bench, and for a file that is none.
    """
    paths = [bench_of(name) for name in names]
    documents = [read_bench(path) for path in paths]
    labels = [_label(path) for path in paths]
    # Two benches of one run go by their time as well.
    labels = [one if labels.count(one) == 1 else f"{one} {path.stem}" for one, path in zip(labels, paths, strict=True)]
    found = []
    for label, document, path in zip(labels, documents, paths, strict=True):
        with _drawn_from(path):
            found.append(measured(label, document, path.parent))
    return found


@contextmanager
def _drawn_from(bench: Path | str) -> Iterator[None]:
    """UserError, naming the bench, where its figures are not those that a bench writes: a file may hold anything."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as reason:
        what = f"{type(reason).__name__}: {first_line(reason)}"
        raise UserError(f"{bench} holds figures that no bench writes ({what})", "run `medusa bench` again") from reason


def read_bench(path: Path) -> Document:
    """A saved bench; UserError, naming the file, for anything else."""
    document = read_object(path, "the bench")
    methods = document.get("methods")
    if not isinstance(methods, dict) or not methods or "baseline" not in document:
        raise UserError(f"{path} is no bench", "give a run, or a JSON file that `medusa bench` wrote")
    return document


def measured(name: str, document: Document, folder: Path) -> "SavedBench":
    """A bench with the accuracies and the training beside its first drafter, and the sweeps beside the bench."""
    from medusa_cli.benchmarks.pieces import SavedBench
    from medusa_cli.training.log import NAME, read_log

    found: Document = {"sweeps": [read_object(path, "the sweep") for path in sorted(folder.glob("sweep-*.json"))]}
    for one in (document.get("drafting") or {}).values():
        drafter = Path(one["drafter"])
        run = Run(drafter.parent)
        if run.calibration_path.is_file():
            heads = read_calibration(run.calibration_path)
            if not outdated(heads.drafter, drafter):
                found["accuracies"] = heads.accuracies
        found["training"] = read_log(run.path / NAME)
        break
    return SavedBench(name, document, **found)


def write_report(sources: "Sequence[SavedBench]", target: Path) -> list[Path]:
    """Write the page and, beside it, the Markdown; their paths."""
    from medusa_cli.benchmarks.page import contents, html, markdown

    with _drawn_from(" or ".join(one.name for one in sources)):
        parts = contents(sources)
        pages = {target: html(sources, parts), target.with_suffix(".md"): markdown(sources, parts)}
    for path, text in pages.items():
        write_atomic(path, text)
    return list(pages)


def place_of(names: Sequence[str], output: Path | None) -> Path:
    """Where a report goes: what --output says, else beside the first of its benches."""
    if output is not None:
        if output.suffix.lower() not in (".html", ".htm"):
            raise UsageError(f"--output {output} is no name for a page", "give one that ends in .html")
        return output
    first = bench_of(names[0])
    return first.with_suffix(".html") if len(names) == 1 else first.with_name("report.html")


def bench_of(name: str) -> Path:
    """The file of a bench: the one that is named, or the last of a run's."""
    path = Path(name)
    if path.suffix == ".json":
        return path
    folder = Run.open(name, named="RUN").bench_dir
    found = sorted(one for one in folder.glob("*.json") if not one.name.startswith("sweep-"))
    if not found:
        raise UserError(f"{folder} holds no bench", f"run `medusa bench --run {name}` first")
    if len(found) > 1:
        console.info(f"{name}: the newest of {len(found)} benches, {found[-1].name}")
    return found[-1]


def _label(path: Path) -> str:
    """The run that a bench belongs to, or the file's own name where it lies in none."""
    return path.resolve().parent.parent.name if path.parent.name == "bench" else path.stem
