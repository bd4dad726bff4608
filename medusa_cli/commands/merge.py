"""`medusa merge`: several runs' distilled conversations as one run's data."""

from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.errors import UserError
from medusa_cli.options import OutputFlags
from medusa_cli.runs.run import DEFAULT_RUN


def merge(
    context: typer.Context,
    *,
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="The runs whose conversations are copied.")],
    run: options.Run = DEFAULT_RUN,
    output: OutputFlags,
) -> None:
    """Copy the conversations of several distillations of one model, with their states, into another run.

    For data that was distilled on several machines or from several seeds. A conversation whose id is there already is
    passed over, so the same command resumes where it was stopped, and with more runs adds theirs.
    """
    output.configure()
    from medusa_cli.distill.distillation import merge_runs, parts_of
    from medusa_cli.runs.run import Run, sole_writer

    sources = [Run.open(name, named="RUN") for name in runs]
    target = Run.open(run, create=True)
    context.with_resource(sole_writer(target.path, "medusa merge", console.warn))
    for source in sources:
        if parts_of(source):
            console.warn(f"{source.path} has parts of an unfinished distillation: `medusa distill` in it adds them")
    with console.progress("merging", unit="conversations") as bar:
        summary = merge_runs(sources, target, on_copied=lambda: bar.advance(1))
    if summary["broken"]:
        console.warn(f"{summary['broken']:,} conversations were left out: their states are of something else")
    if output.json:
        console.emit_json(summary)
    if not summary["conversations"]:
        raise UserError(f"{target.distill_path} holds no conversation", "name runs of `medusa distill`")
    console.result(
        f"{summary['answer_tokens']:,} answer tokens in {summary['conversations']:,} conversations: "
        f"{target.distill_path} ({summary['taken']:,} copied now, {summary['known']:,} there already). "
        f"Next: medusa train --run {run}"
    )
