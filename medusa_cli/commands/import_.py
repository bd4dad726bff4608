"""`medusa import`: a drafter that another tool trained, into a run of its own."""

from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.options import OutputFlags


def import_(
    *,
    place: Annotated[
        str,
        typer.Argument(
            metavar="PATH|ID",
            help="A folder, a file of weights or a hub id: heads of FasterDecoding, vLLM or TGI, Hydra's, or an "
            "EAGLE-3 folder.",
        ),
    ],
    run: options.RunOrNew = None,
    model: options.ModelOfDrafter = None,
    trust_remote_code: options.TrustRemoteCode = False,
    printed: OutputFlags,
) -> None:
    """Take in a drafter that was trained elsewhere, or exported by `medusa export --to medusa` or `eagle3`.

    Every tensor is checked against the model's widths before anything is written, and nothing in the files is executed.
    Then calibrate the run; tree, chat and bench take it by --run like any other.
    """
    printed.configure()
    from medusa_cli.export.incoming import import_drafter

    done = import_drafter(place, run, model, trust_remote_code)
    for note in done.notes:
        console.warn(note)
    if printed.json:
        facts = {"run": str(done.run.path), "drafter": done.kind, "format": done.format, "heads": done.heads}
        console.emit_json({**facts, "notes": done.notes})
        return
    name = str(done.run.path) if run is None or "/" in run else run
    console.result(
        f"{done.run.drafter_dir}: a {done.kind} drafter of {done.heads} heads (from the {done.format} layout). "
        f"Next: medusa calibrate --run {name} --data CONVERSATIONS.jsonl"
    )
