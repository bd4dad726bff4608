"""`medusa import`: a drafter that another tool trained, into a run of its own."""

from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.commands.groups import Said


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
    model: options.ModelOrSaid = None,
    trust_remote_code: options.TrustRemoteCode = False,
    said: Said,
) -> None:
    """Take in a drafter that was trained elsewhere, or exported by `medusa export --to medusa` or `eagle3`.

    Every tensor is checked against the model's widths before anything is written, and nothing in the files is executed.
    The run is then like any other: calibrate, tree, chat and bench take it by --run.
    """
    said.configure()
    from medusa_cli.exporting.incoming import import_drafter

    done = import_drafter(place, run, model, trust_remote_code)
    for note in done.notes:
        console.warn(note)
    name = str(done.run.path) if run is None or "/" in run else run
    if said.json:
        facts = {"run": str(done.run.path), "drafter": done.kind, "format": done.format, "heads": done.heads}
        console.emit_json({**facts, "calibrated": done.calibrated, "notes": list(done.notes)})
        return
    following = "medusa tree" if done.calibrated else "medusa calibrate"
    needs = "" if done.calibrated else " --data CONVERSATIONS.jsonl"
    console.result(
        f"{done.run.drafter_dir}: {done.heads} heads, a {done.kind} drafter (from the {done.format} layout). "
        f"Next: {following} --run {name}{needs}"
    )
