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
            "EAGLE-3 folder, speculators' too.",
        ),
    ],
    run: options.RunOrNew = None,
    model: options.ModelOfDrafter = None,
    trust_remote_code: options.TrustRemoteCode = False,
    printing: OutputFlags,
) -> None:
    """Take in a drafter that was trained elsewhere, or exported by `medusa export --to` medusa, eagle3, speculators.

    Every tensor is checked against the model's widths before anything is written, and nothing in the files is executed.
    Then calibrate the run; tree, chat and bench take it by --run like any other.
    """
    printing.configure()
    from medusa_cli.export.incoming import import_drafter

    target, facts, notes = import_drafter(place, run, model, trust_remote_code)
    for note in notes:
        console.warn(note)
    if printing.json:
        console.emit_json({"run": str(target.path), **facts, "notes": notes})
        return
    name = str(target.path) if run is None or "/" in run else run
    console.result(
        f"{target.drafter_dir}: a {facts['drafter']} drafter of {facts['heads']} heads (from the {facts['format']} "
        f"layout). Next: medusa calibrate --run {name} --data CONVERSATIONS.jsonl"
    )
