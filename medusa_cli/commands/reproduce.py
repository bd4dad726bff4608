"""`medusa reproduce`: the headlines of the papers on a small model, which `make reproduce` runs."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from medusa_cli import console, options
from medusa_cli.commands.groups import Said
from medusa_cli.errors import UserError
from medusa_cli.runs.reading import Document
from medusa_cli.runs.run import Run


def reproduce(
    *,
    run: options.Run = "papers",
    model: Annotated[str, typer.Option(metavar="NAME|FOLDER|ID", help="The backbone.")] = "smollm2-135m",
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the JSON and the Markdown go.")] = Path(
        "docs/results"
    ),
    questions: Annotated[int, typer.Option(metavar="N", min=1, help="MT-Bench questions a bench.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens a turn.")] = 64,
    said: Said,
) -> None:
    """Run the shape of every headline of the papers and say of each whether it is reproduced.

    What the run holds already is kept where the same was asked for, so that a killed run goes on.
    """
    from medusa_cli.benchmarks.papers import held, markdown
    from medusa_cli.benchmarks.reproduction import RECIPES, Ledger, steps
    from medusa_cli.runs.files import write_atomic, write_json
    from medusa_cli.runs.reading import read_json
    from medusa_cli.runs.run import provenance

    said.configure()
    if not RECIPES.is_dir():
        raise UserError(
            f"there is no folder {RECIPES}/ here", "run it in a clone of the project: it trains by the recipes there"
        )
    target = Run.open(run, create=True)
    todo = steps(target.path, model, questions, max_new_tokens)
    ledger = Ledger(target.path, todo)
    for number, step in enumerate(todo, 1):
        if not ledger.holds(step):
            console.info(f"step {number} of {len(todo)}: medusa {' '.join(step.words)}")
            began = time.monotonic()
            step.run(said.quiet, ledger.begin(step))
            ledger.end(step)
            console.info(f"{step.name}: {time.monotonic() - began:.0f} s")
    evidence = {step.name: read_json(step.makes, f"the figures of {step.name}") for step in todo if step.kept}
    rows = held(evidence)
    facts = [
        f"{model}, {questions} MT-Bench questions, {max_new_tokens} tokens a turn; `make reproduce` makes this page."
    ]
    facts += evidence["64 nodes"].get("facts", [])
    document = {**provenance(evidence["auto"]["backbone"]), "facts": facts, "claims": rows}
    write_json(output / "reproduction.json", document)
    write_atomic(output / "reproduction.md", markdown(rows, facts))
    if said.json:
        console.emit_json(document)
        return
    console.result(_table(rows))
    console.result(f"saved: {output / 'reproduction.md'}")


def _table(rows: list[Document]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("where", "what it says", "paper", "here", ""):
        table.add_column(name, justify="right" if name in ("paper", "here") else "left")
    for row in rows:
        paper = "-" if row["paper"] is None else f"{row['paper']:.2f}"
        table.add_row(row["source"], row["says"], paper, f"{row['ours']:.2f}", row["verdict"])
    return table
