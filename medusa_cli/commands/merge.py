"""`medusa merge`: what several runs distilled as one run's data."""

from collections import Counter
from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.commands.groups import Said
from medusa_cli.errors import UserError
from medusa_cli.runs.run import DEFAULT_RUN


def merge(
    asked: typer.Context,
    *,
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="The runs whose conversations are copied.")],
    run: options.Run = DEFAULT_RUN,
    said: Said,
) -> None:
    """Copy the conversations of several distillations of one model, with their states, into another run.

    For data that was distilled on several machines or from several seeds. A conversation whose id is there already is
    passed over, so the same command goes on where it was stopped, and with more runs adds theirs.
    """
    said.configure()
    from medusa_cli.distilling.merging import BROKEN, KNOWN, Merge
    from medusa_cli.distilling.parts import unmerged
    from medusa_cli.runs.lock import sole_writer
    from medusa_cli.runs.reading import read_lines
    from medusa_cli.runs.run import Run

    sources = [Run.open(one, named="RUN") for one in runs]
    target = Run.open(run, create=True)
    asked.with_resource(sole_writer(target.path, "medusa merge", console.warn))
    merging = Merge(sources, target)
    for one in sources:
        if unmerged(one):
            console.warn(f"{one.path} has parts of a distillation that has not ended: `medusa distill` in it adds them")
    total = sum(1 for one in sources for _ in read_lines(one.distill_path))
    counts = Counter[str]()
    with console.progress("merging", total=total, unit="conversations") as bar:
        for became in merging.run():
            counts[became] += 1
            bar.advance(1)
    if counts[BROKEN]:
        console.warn(f"{counts[BROKEN]:,} conversations were left out: the states beside them are of something else")
    outcome = merging.outcome(counts)
    if said.json:
        console.emit_json(outcome)
    if not outcome["conversations"]:
        raise UserError(f"{target.distill_path} holds no conversation", "name runs of `medusa distill`")
    if not said.json:
        console.result(
            f"{outcome['answer_tokens']:,} answer tokens in {outcome['conversations']:,} conversations: "
            f"{target.distill_path} ({outcome['taken']:,} copied now, {counts[KNOWN]:,} there already). "
            f"Next: medusa train --run {run}"
        )
